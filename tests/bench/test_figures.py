# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of made-up result files."""

import json
import sys

import pytest

from sgl_moe_jit.bench import figures, plot, readme, report
from sgl_moe_jit.bench.cases import CASES
from sgl_moe_jit.bench.contest import Outcome
from sgl_moe_jit.bench.ep_job import Job, Measured, record_of
from sgl_moe_jit.bench.timing import Timing

US = {"sgl_moe_jit": 2.0, "sglang": 3.0, "torch": 20.0, "stream": 1.5}
STAMP = report.Stamp(
    "NVIDIA H200", {"sglang": "0.5.23"}, "0123456789abcdef+changes", "python ...", "2026-11-29"
)


def record(subject, case, tokens, mode, provider, us, size=48_000_000):
    outcome = Outcome(Timing(us, us * 0.9, us * 1.1, 25), "a note")
    return report.Record.of(subject, CASES[case], tokens, mode, provider, outcome, size, 60)


def peak(case, tokens, provider, mib):
    outcome = Outcome(None, None)
    return report.Record.of(
        "memory",
        CASES[case],
        tokens,
        "eager",
        provider,
        outcome,
        0,
        note="8 experts",
        peak_bytes=mib * 2**20,
    )


def peaks():
    mib = {"sgl_moe_jit": 100, "sgl_moe_jit, shared first": 107, "transformers": 400}
    return [peak("deepseek-v3", 512, name, value) for name, value in mib.items()]


def records(subject="finalize", cases=("deepseek-v3",), us=US, modes=("hot", "cold")):
    return [
        record(subject, case, tokens, mode, name, took * tokens)
        for case in cases
        for tokens in (1, 16)
        for mode in modes
        for name, took in us.items()
    ]


def write(folder, name, rows):
    path = folder / f"{name}.json"
    report.write_json(rows, STAMP, path)
    return path


def test_a_record_says_its_share_of_peak():
    (row,) = report.to_json([record("finalize", "llama4", 1, "cold", "sgl_moe_jit", 20.0)], STAMP)
    assert row["share_of_peak"] == pytest.approx(0.5)  # 48 MB in 20 us of 4.8 TB/s
    assert (row["cache_bytes"], row["note"]) == (60, "a note")
    other = report.Stamp("some CPU", {}, "c", "x", "d")
    (row,) = report.to_json([record("cpu", "llama4", 1, "cold", "torch", 20.0)], other)
    assert row["share_of_peak"] is None


def test_lines_show_ratios_to_ours():
    rows = [record("finalize", "llama4", 1, "hot", name, us) for name, us in US.items()]
    lines = report.table_lines(rows, "NVIDIA H200")
    assert len(lines) == 4 and "1.50x" in lines[1] and "10.00x" in lines[2]
    assert "500.0%" in lines[0]  # 48 MB in 2 us: from L2
    assert report.table_lines(rows[1:], "some CPU")[0].split()[-3:] == ["-", "16000.0", "-"]


def test_the_table_of_a_comparison(tmp_path):
    path = write(tmp_path, "finalize", records())
    text = figures.FIGURES["finalize"](path)
    head, _, first, *rest = text.split("\n\n")[1].splitlines()
    assert head == (
        "| tokens | buffers | sgl_moe_jit, us | sglang, us | sglang / ours | stream, us "
        "| stream / ours |"
    )
    assert first == (
        "| 1 | hot | 2.00 (1.80 to 2.20) | 3.00 (2.70 to 3.30) | 1.50x | 1.50 (1.35 to 1.65) "
        "| 75% |"
    )
    assert [line.split(" | ")[1] for line in rest] == ["hot", "cold", "cold"], "hot ones first"
    assert text.startswith(
        "NVIDIA H200, 2026-11-29, commit `0123456+changes`, sglang 0.5.23, hidden 7168, top 8, "
        "median (p20 to p80); file `"
    )
    assert "command `python ...`" in text


def test_a_provider_missing_for_one_shape_is_a_dash(tmp_path):
    rows = [r for r in records() if (r.provider, r.num_tokens) != ("sglang", 16)]
    text = figures.FIGURES["finalize"](write(tmp_path, "finalize", rows))
    assert text.splitlines()[-1].startswith("| 16 | cold | 32.00 (28.80 to 35.20) | - | - |")


def test_the_ratio_table_has_a_row_a_model(tmp_path):
    rows = records(cases=("llama4", "kimi-k3"))
    text = figures.ratios(write(tmp_path, "finalize_models", rows))
    lines = text.splitlines()
    assert lines[2] == "| model | hidden | top | 1 hot | 16 hot | 1 cold | 16 cold |"
    assert lines[4] == "| llama4 | 5120 | 1 | 1.50x | 1.50x | 1.50x | 1.50x |"
    assert len(lines) == 6


def test_the_host_table(tmp_path):
    rows = [record("host", "deepseek-v3", 8, "eager", name, us) for name, us in US.items()]
    text = figures.host_table(write(tmp_path, "host", rows))
    assert "8 tokens of 7168, top 8" in text
    assert "| sglang | 3.00 (2.70 to 3.30) |" in text


def test_the_table_of_whole_layers(tmp_path):
    us = {"sgl_moe_jit": 22.0, "sgl_moe_jit, two streams": 24.0}
    us |= {"GEMMs alone": 20.0, "transformers": 55.0}
    rows = records("layer", ("deepseek-v3", "glm-4.5"), us, ("graph",))
    lines = figures.layer_table(write(tmp_path, "layer", rows)).splitlines()
    assert "deepseek-v3: a note; glm-4.5: a note" in lines[0]
    assert lines[4].startswith("| deepseek-v3 | 1 | 22.00 (19.80 to 24.20) | 24.00 (")
    assert lines[4].endswith(
        " | - | - | 20.00 (18.00 to 22.00) | 1.10x | 55.00 (49.50 to 60.50) | 2.50x |"
    )
    assert len(lines) == 8
    assert len(figures.SHORT["layer"](tmp_path / "layer.json").splitlines()) == 6, "one model's"


def test_the_table_of_memory(tmp_path):
    text = figures.memory_table(write(tmp_path, "memory", peaks()))
    # 512 tokens of 7168 in bfloat16 are 7 MiB
    assert text.splitlines()[-1] == "| deepseek-v3 | 512 | 100 | 107 | - | 1.00 | 400 | 0.25 |"
    assert "107.0 MiB at most           1.07x" in report.table_lines(peaks(), "some GPU")[1]


def test_every_kind_of_file_has_a_figure_and_a_title(tmp_path):
    for name in figures.FIGURES:
        if name == "jit":
            rows = [
                record("jit", "llama4", 1, mode, "sgl_moe_jit", 1e6) for mode in ("cold", "warm")
            ]
        else:
            rows = records(name, modes=("graph",) if name == "layer" else ("cold",))
        if name == "memory":
            rows = peaks()
        if name == "ep":
            measured = Measured("sgl_moe_jit", 5, Timing(1.0, 1.0, 1.0, 1), 0.001, [7, 6], [2, 1])
            job = Job("tiny", (5,), 2, "cpu", "gloo", 0.3, (), "exact", False, False, 1)
            rows = [record_of(job, measured)]
        assert "2026-11-29" in figures.FIGURES[name](write(tmp_path, name, rows))
    text = readme.all_figures(tmp_path)
    assert text.count("\n## ") == len(figures.FIGURES)


def test_markers_are_filled_and_stay_empty_without_a_file(tmp_path):
    write(tmp_path, "finalize", records())
    text = (
        "a\n<!-- finalize:begin -->\nstale\n<!-- finalize:end -->\nb\n"
        "<!-- norm:begin -->\nstale\n<!-- norm:end -->\nc\n"
    )
    got = readme.render(text, tmp_path)
    assert "stale" not in got and "1.50x" in got
    assert got.endswith("b\n<!-- norm:begin -->\n<!-- norm:end -->\nc\n")
    assert readme.render(got, tmp_path) == got
    with pytest.raises(ValueError, match="expected the marker <!-- norm:end -->"):
        readme.render("<!-- norm:begin -->\nx\n", tmp_path)
    with pytest.raises(ValueError, match=r"expected a marker of finalize, .*'nothing'"):
        readme.render("<!-- nothing:begin -->\n<!-- nothing:end -->\n", tmp_path)


def test_the_roofline_is_the_stream_or_the_datasheet(tmp_path):
    rows = json.loads(write(tmp_path, "x", records(modes=("cold",))).read_text())
    what, share = plot.share_of(rows)
    assert "`stream`" in what and share(rows[0]) == pytest.approx(0.75)
    rows = [row for row in rows if row["provider"] != "stream"]
    what, share = plot.share_of(rows)
    assert "datasheet" in what and share(rows[0]) == pytest.approx(5.0)


def test_plots_are_written_and_small(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sgl-moe-jit[bench]'")
    path = write(tmp_path, "finalize_models", records(cases=tuple(CASES)))
    one = write(tmp_path, "finalize", records())
    layer = write(
        tmp_path,
        "layer",
        [record("layer", "llama4", t, "graph", "sgl_moe_jit", t, 0) for t in (1, 2)],
    )
    memory = write(tmp_path, "memory", peaks())
    files = [str(file) for file in (path, one, layer, memory)]
    assert plot.main([*files, str(tmp_path / "png")]) == 0
    made = sorted((tmp_path / "png").iterdir())
    assert [file.name for file in made] == [
        "finalize_models_roofline.png",
        "finalize_models_time.png",
        "finalize_roofline.png",
        "finalize_time.png",
        "layer_time.png",  # whose bytes say nothing
        "memory_peak.png",
    ]
    for file in made:
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size < 150_000, file


def test_without_matplotlib_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'sgl-moe-jit\[bench\]'"):
        plot.require_matplotlib()
    assert plot.main([]) == 2

# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Each GPU subject end to end on a small shape, without peers' sources."""

import json

import pytest
import torch

from sgl_moe_jit import cli
from sgl_moe_jit.bench import layer

pytestmark = pytest.mark.gpu

SHAPE = ("--cases", "qwen3-30b", "--tokens", "4", "--rounds", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "options", "providers", "modes"),
    [
        ("finalize", SHAPE, {"sgl_moe_jit", "torch", "torch.compile", "stream"}, {"hot", "cold"}),
        (
            "norm",
            SHAPE,
            {
                *("sgl_moe_jit", "sgl_moe_jit, in place", "sgl_moe_jit, FP8 out"),
                *("sgl_moe_jit, two kernels",),
                *("torch", "torch.compile", "stream"),
            },
            {"hot", "cold"},
        ),
        (
            "layer",
            ("--cases", "qwen3-235b", "--tokens", "4", "--rounds", "2"),
            {*layer.OURS, "transformers", "GEMMs alone"},
            {"graph"},
        ),
        ("host", ("--rounds", "2"), None, {"eager"}),
    ],
)
def test_a_subject_measures_all_its_providers(tmp_path, subject, options, providers, modes):
    path = tmp_path / "out.json"
    assert cli.main(["bench", subject, *options, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert {row["mode"] for row in rows} == modes
    assert providers is None or {row["provider"] for row in rows} == providers
    for row in rows:
        assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
        assert row["device"] == torch.cuda.get_device_name()


def test_memory_is_measured_in_every_order(tmp_path):
    path = tmp_path / "out.json"
    command = ["bench", "memory", "--cases", "glm-4.5", "--tokens", "256", "--json", str(path)]
    assert cli.main(command) == 0
    rows = {row["provider"]: row["peak_bytes"] for row in json.loads(path.read_text())}
    assert len(rows) == 4 and all(peak >= 256 * 5120 * 2 for peak in rows.values())


def test_every_path_of_the_permutation_is_measured(tmp_path):
    path = tmp_path / "out.json"
    assert cli.main(["bench", "permute", *SHAPE, "--json", str(path)]) == 0
    providers = {row["provider"] for row in json.loads(path.read_text())}
    assert "torch" in providers and len(providers) == 5


def test_every_expansion_is_measured(tmp_path):
    path = tmp_path / "out.json"
    assert cli.main(["bench", "waterfill", *SHAPE, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert {row["mode"] for row in rows} == {"ep8", "ep32"}
    assert len(rows) == 2 * 7 and "torch, home" in {row["provider"] for row in rows}


def test_routing_is_measured(tmp_path):
    path = tmp_path / "out.json"
    words = ["bench", "route", "--cases", "deepseek-v3,qwen3-30b", "--tokens", "3,70"]
    assert cli.main([*words, "--rounds", "2", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert len(rows) == 2 * 2 * 2 and {row["provider"] for row in rows} == {"sgl_moe_jit", "torch"}

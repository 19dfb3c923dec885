# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels that only benchmarks need: they build, flashinfer's from a few files too, and run."""

import pytest
import torch

from sgl_moe_jit.bench import carry, checks, kernels, norm, norm_peers, stream
from sgl_moe_jit.bench.cases import FinalizeCase, make_finalize_inputs
from sgl_moe_jit.bench.norm_inputs import make_norm_inputs
from sgl_moe_jit.jit import toolchain
from sgl_moe_jit.jit.dependencies import package_dir

needs_nvcc = pytest.mark.skipif(
    toolchain.locate_nvcc() is None, reason=f"needs nvcc. {toolchain.missing_nvcc_message()}"
)


@pytest.fixture
def for_sm_90a(monkeypatch):
    monkeypatch.setenv("SGL_MOE_JIT_CUDA_ARCH", "9.0a")


@needs_nvcc
@pytest.mark.parametrize("build", [lambda: kernels.stream(6), kernels.add_rmsnorm])
def test_our_own_build(build, for_sm_90a):
    assert callable(build())


@pytest.mark.slow
@needs_nvcc
@pytest.mark.skipif(package_dir("flashinfer") is None, reason="needs flashinfer-python, --no-deps")
def test_flashinfers_build_from_what_is_carried(tmp_path, for_sm_90a, capsys):
    assert carry.main(["flashinfer", str(tmp_path)]) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) < 40 and sum(path.stat().st_size for path in files) < 2 << 20
    assert f"{len(files) - 1} files" in capsys.readouterr().out  # version.txt is ours
    (folder,) = kernels.parse_peers([f"flashinfer={tmp_path}"]).values()
    assert kernels.peer_version(folder) != "unknown"
    assert callable(kernels.flashinfer_add_rmsnorm(str(folder)))
    assert callable(kernels.flashinfer_finalize(str(folder)))


def test_sglangs_triton_kernels_are_loaded_from_their_file(tmp_path):
    (tmp_path / "deepep_waterfill_kernels.py").write_text("there = True")
    (folder,) = kernels.parse_peers([f"sglang={tmp_path}"]).values()
    assert kernels.sglang_waterfill(str(folder)).there
    (tmp_path / "other").mkdir()
    with pytest.raises(FileNotFoundError, match="--peer sglang: expected deepep_waterfill"):
        kernels.sglang_waterfill(str(tmp_path / "other"))


def test_carry_tells_how_it_is_called(capsys):
    assert carry.main(["vllm", "x"]) == 2
    assert "usage: python -m sgl_moe_jit.bench.carry flashinfer DIR" in capsys.readouterr().err


def test_carry_without_flashinfer_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(carry, "package_dir", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps flashinfer-python"):
        carry.carry_flashinfer(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [1, 6, 8, 16])  # one plane; the K of the two instantiations
@pytest.mark.parametrize("num_tokens", [1, 300])  # less than a block; more than all places
def test_every_stream_launch_sums_the_planes(top_k, num_tokens):
    case = FinalizeCase("tiny", 2056, 2304, top_k, 64)
    x = make_finalize_inputs(case, num_tokens, 2, device="cuda")[1]
    rows, shared, out = stream.planes(case, x)
    terms = torch.cat([rows.view(top_k, -1), shared[None]]).double()
    allowed = checks.ROUNDING * terms.sum(0).abs() + (top_k + 1) * 2.0**-23 * terms.abs().sum(0)
    for launch in stream.launches(out.numel(), 8):
        out.fill_(float("nan"))
        kernels.stream(top_k)(out, rows, shared, *launch)
        checks.compare(str(launch), "out", out, terms.sum(0), allowed + 2.0**-134)


@pytest.mark.gpu
def test_the_plain_add_rmsnorm_is_right():
    case = FinalizeCase("tiny", 2056, 2056, 8, 64)
    inputs = make_norm_inputs(case, 70, 2, device="cuda")
    provider = norm_peers.two_kernels(norm_peers.our_finalize, kernels.add_rmsnorm())
    for x, call in zip(inputs, provider(inputs, case.top_k), strict=True):
        norm.check("it", call, x, case.top_k)

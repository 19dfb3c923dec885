# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The quick way of eager GPU calls: it guesses a module, and must never serve a call wrongly."""

from dataclasses import replace

import pytest
import torch

from sgl_moe_jit import env
from sgl_moe_jit.ops import finalize_kernel, quick_call
from tests.ops.finalize_cases import BF16, F16, F32, assert_matches_oracle, assert_same_bits, make
from tests.ops.quick_call_cases import need_extension

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=["C", "Python"])
def way(request):
    """Both ways: through the extension and without it."""
    if request.param == "Python":
        with quick_call.in_python():
            yield
    else:
        need_extension()
        yield


@pytest.fixture
def guess():
    """A bfloat16 call with float32 weights, served twice: the guess for its top_k stands."""
    inputs = make(6, 8, 256, device="cuda")
    assert_same_bits(inputs.run(), inputs.run())
    assert finalize_kernel.LAST_KERNEL[8] is not None
    return inputs


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("weight_dtype", [F32, BF16, None])
@pytest.mark.parametrize("gate", [None, F32])
def test_another_module_than_the_guessed_one_is_found(guess, dtype, weight_dtype, gate):
    for _ in range(2):
        other = make(6, 8, 256, device="cuda", dtype=dtype, weight_dtype=weight_dtype, gate=gate)
        assert_matches_oracle(other.run(), other)
        assert_matches_oracle(other.run(out=torch.empty_like(other.shared)), other)
        assert_matches_oracle(guess.run(), guess)


def test_the_result_is_a_plain_tensor_that_torch_owns(guess):
    out = guess.run()
    assert type(out) is torch.Tensor and out.is_contiguous() and not out.requires_grad
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        guess.run()
    assert torch.cuda.memory_allocated() == before
    with torch.inference_mode():
        assert guess.run().shape == out.shape


def test_gradients_are_not_lost(guess):
    inputs = replace(guess, weights=guess.weights.clone().requires_grad_())
    inputs.run().sum().backward()
    assert inputs.weights.grad is not None
    with pytest.raises(RuntimeError, match="out= does not support gradients"):
        inputs.run(out=torch.empty_like(guess.shared))
    with torch.no_grad():
        assert_same_bits(inputs.run(), guess.run())


def test_a_write_is_seen_by_autograd(guess):
    out = torch.empty_like(guess.shared)
    scale = torch.ones_like(out, requires_grad=True)
    product = (out * scale).sum()
    guess.run(out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        frozen = torch.empty_like(guess.shared)
        guess.run(out=frozen)
    with pytest.raises(RuntimeError, match="inference tensor"):
        guess.run(out=frozen)


def test_modes_subclasses_and_functorch_take_the_dispatcher(guess):
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(str(op))
            return op(*args, **(kwargs or {}))

    with Watch():
        guess.run()
    assert any("moe_finalize_fuse_shared" in name for name in seen)

    def loss(shared):
        return replace(guess, shared=shared).run().float().sum()

    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(loss, (guess.shared,), (guess.shared,))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"top_k": True}, TypeError, "top_k: expected an int, got bool"),
        ({"top_k": 7}, ValueError, "expert_weights: expected"),
        ({"factor": torch.ones(())}, TypeError, "routed_scaling_factor: expected a float"),
        ({"idx": [1, 2]}, TypeError, "expanded_idx_to_permuted_idx: expected a Tensor"),
        ({"hidden_dim": 3}, ValueError, "hidden_dim: expected 256"),
        ({"hidden_dim": 256.0}, TypeError, "hidden_dim: expected an int"),
    ],
)
def test_errors_are_those_of_the_long_way(guess, change, error, text):
    with pytest.raises(error, match=text):
        replace(guess, **change).run()
    with pytest.raises(TypeError, match="enable_pdl: expected True, False or None"):
        guess.run(enable_pdl="no")


def test_tensors_elsewhere_are_refused(guess):
    with pytest.raises(ValueError, match="shared_output: expected device cuda:0"):
        replace(guess, shared=guess.shared.cpu()).run()
    with pytest.raises(ValueError, match="expected"):
        replace(guess, idx=guess.idx.cpu()).run()


def test_zeros_without_memory_are_refused_and_negations_served_rightly(guess):
    zeros = torch._efficientzerotensor(guess.shared.shape, dtype=BF16, device="cuda")
    with pytest.raises(ValueError, match="shared_output: expected adjacent columns"):
        replace(guess, shared=zeros).run()  # the dispatcher gives it strides of 0
    negated = torch._neg_view(guess.weights)
    assert_same_bits(
        replace(guess, weights=negated).run(), replace(guess, weights=-guess.weights).run()
    )
    gated = make(6, 8, 256, device="cuda", gate=F32)
    assert_same_bits(gated.run(), gated.run())
    negated = torch._neg_view(gated.gate)
    assert_same_bits(replace(gated, gate=negated).run(), replace(gated, gate=-gated.gate).run())


def test_environment_switches_are_seen_by_the_next_call(guess, monkeypatch):
    want = guess.run()
    bad = guess.idx.clone()
    bad[0, 0] = guess.gemm2_out.shape[0]
    monkeypatch.setenv(env.CHECK_INDICES.name, "1")
    with pytest.raises(ValueError, match="expected indices below"):
        replace(guess, idx=bad).run()
    monkeypatch.delenv(env.CHECK_INDICES.name)
    for variable in (env.PDL, env.VECTOR):
        monkeypatch.setenv(variable.name, "0")
        assert_same_bits(guess.run(), want)
        monkeypatch.setenv(variable.name, "maybe")
        with pytest.raises(ValueError, match=variable.name):
            guess.run()
        monkeypatch.delenv(variable.name)

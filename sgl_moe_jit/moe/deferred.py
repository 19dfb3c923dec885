# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Deferred finalize: the request, the un-finalized rows, and where either answer is finished."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from sgl_moe_jit import env
from sgl_moe_jit.moe.input_checks import check_dense
from sgl_moe_jit.ops import moe_finalize_fuse_shared

# The requests in force, innermost last, each with the context object that made it. A value and no
# tokens: a context object may be shared by threads and tasks, each of which sees its own requests.
_requests: ContextVar[tuple[tuple[bool, object], ...]] = ContextVar(
    "sgl_moe_jit_deferred_finalize", default=()
)


class deferred_finalize_context:
    """Ask the runners called inside to hand over their rows un-finalized.

    It is a request: a runner that cannot defer returns a finished tensor, and
    :func:`finalize_output` takes either. Nested contexts restore the outer request, also when an
    exception passes. The request belongs to this thread and asyncio task: a new thread starts
    without it (``contextvars.copy_context`` carries it over). Do not ``yield`` inside it in a
    generator: until the generator goes on, its caller runs with the request too.

    With ``SGL_MOE_JIT_ENABLE_DEFERRED_FINALIZE=0`` it asks for nothing.

    Args:
        enabled: False withdraws an outer request.
    """

    __slots__ = ("_enabled",)

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = bool(enabled)

    def __enter__(self) -> None:
        _requests.set((*_requests.get(), (self._enabled, self)))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Not always the last one, nor always there: a generator may be finished later, or by
        # another thread, where nothing is to be withdrawn.
        requests = _requests.get()
        for i in reversed(range(len(requests))):
            if requests[i][1] is self:
                _requests.set(requests[:i] + requests[i + 1 :])
                return


def is_deferred_finalize_enabled() -> bool:
    """Return whether the current thread and task asks runners to defer.

    Not traceable by ``torch.compile``: pass ``defer=`` explicitly in compiled code.
    """
    return bool(requested_defer()) and env.ENABLE_DEFERRED_FINALIZE.get()


def requested_defer() -> bool | None:
    """Return the innermost request of this thread and task, or None where none is in force.

    Whoever would defer on its own account can tell here a request not to from no request.
    Not traceable by ``torch.compile``.
    """
    requests = _requests.get()
    return requests[-1][0] if requests else None


@dataclass(frozen=True, eq=False)
class DeferredFinalizeOutput:
    """A layer's expert rows before their weighted sum: everything that is still owed.

    It keeps its tensors alive and is not a tensor: using it as one raises, so un-finalized rows can
    never pass for hidden states. Finishing it twice gives the same result twice.

    T tokens, K experts a token, P permuted rows, H hidden size, H_pad >= H.

    Attributes:
        gemm2_out: [P, H_pad] bfloat16, float16 or float32. Rows no slot refers to may hold
            anything.
        expert_weights: [T, K] float32, bfloat16 or float16. None: all are 1, as when the rows were
            scaled before.
        expanded_idx_to_permuted_idx: [T, K] or [T * K] int32; negative = no row.
        top_k: K.
        routed_scaling_factor: Factor still due on the routed sum; applied by :meth:`finalize`,
            once.
        hidden_dim: H; None means H_pad.
    """

    gemm2_out: Tensor
    expert_weights: Tensor | None
    expanded_idx_to_permuted_idx: Tensor
    top_k: int
    routed_scaling_factor: float = 1.0
    hidden_dim: int | None = None

    def finalize(
        self,
        shared_output: Tensor | None = None,
        *,
        shared_gate_logits: Tensor | None = None,
        enable_pdl: bool | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum of the rows plus ``shared_output``: [T, H].

        With ``shared_gate_logits`` each shared row is first multiplied by their sigmoid. Arguments
        and errors are those of :func:`sgl_moe_jit.moe_finalize_fuse_shared`.
        """
        return moe_finalize_fuse_shared(
            self.gemm2_out,
            self.expanded_idx_to_permuted_idx,
            self.expert_weights,
            shared_output,
            self.top_k,
            enable_pdl,
            routed_scaling_factor=self.routed_scaling_factor,
            shared_gate_logits=shared_gate_logits,
            hidden_dim=self.hidden_dim,
            out=out,
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        name = getattr(func, "__name__", repr(func))
        raise TypeError(
            f"{name}: got a DeferredFinalizeOutput, which is not a tensor; call .finalize() first"
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"DeferredFinalizeOutput has no attribute {name!r}; "
            "it is not a tensor: call .finalize() first"
        )


def finalize_output(
    output: Tensor | DeferredFinalizeOutput,
    shared_output: Tensor | None = None,
    *,
    shared_gate_logits: Tensor | None = None,
) -> Tensor:
    """Finish a runner's answer, deferred or not, and add the shared expert's output once.

    Args:
        output: [T, H] tensor, or the un-finalized rows.
        shared_output: [T, H], or None.
        shared_gate_logits: [T] or [T, 1], or None. The shared expert's gate before its sigmoid;
            needs ``shared_output``.

    Returns:
        [T, H]. One rounding when deferred; a finished tensor was rounded before the add, and a
        gated shared row is rounded to its own dtype in between.

    Raises:
        TypeError: ``output`` is neither, or another argument is no tensor.
        ValueError: the shapes differ, or there are gate logits and no shared output.
        TypeError, ValueError: deferred, see :func:`sgl_moe_jit.moe_finalize_fuse_shared`.
    """
    if isinstance(output, DeferredFinalizeOutput):
        return output.finalize(shared_output, shared_gate_logits=shared_gate_logits)
    if not isinstance(output, Tensor):
        raise TypeError(
            f"output: expected a Tensor or a DeferredFinalizeOutput, got {type(output).__name__}"
        )
    if shared_output is None:
        if shared_gate_logits is not None:
            raise ValueError("shared_gate_logits: expected None without shared_output")
        return output
    check_dense("shared_output", shared_output)
    if shared_gate_logits is not None:
        check_dense("shared_gate_logits", shared_gate_logits)
    if shared_output.shape != output.shape:  # no broadcast: the fused op has none either
        raise ValueError(
            f"shared_output: expected {tuple(output.shape)}, got {tuple(shared_output.shape)}"
        )
    if shared_gate_logits is not None:
        if shared_gate_logits.numel() != output.shape[0]:
            raise ValueError(
                f"shared_gate_logits: expected [{output.shape[0]}] or [{output.shape[0]}, 1], got "
                f"{tuple(shared_gate_logits.shape)}"
            )
        gate = torch.sigmoid(shared_gate_logits).reshape(-1, 1)
        shared_output = (gate * shared_output).to(shared_output.dtype)
    return output + shared_output

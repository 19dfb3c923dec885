# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""``route_topk``: from router logits to K expert ids and weights a token, one CUDA kernel.

What :func:`sgl_moe_jit.select_experts` computes in a dozen torch kernels. It is no torch op: where
something traces or wants a gradient, the torch form serves, which compilers can see into.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sgl_moe_jit import env
from sgl_moe_jit.jit import (
    BuildSpec,
    CudaArch,
    KernelFamily,
    cache_once,
    current_arch,
    load_spec,
    make_spec,
    register_family,
)
from sgl_moe_jit.ops.cpp_types import CPP_TYPES
from sgl_moe_jit.ops.library import can_bypass_dispatcher

OP = "route_topk"
# kRouteMax* in include/sgl_moe_jit/moe/route_topk_params.h
MAX_EXPERTS, MAX_TOP_K, MAX_GROUPS = 1024, 64, 32

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
"""In the order of ScoreFunction in include/sgl_moe_jit/moe/route_topk_params.h."""


class RouteFlag(enum.IntFlag):
    """Steps of a family; see RouteFlags in include/sgl_moe_jit/moe/route_topk_params.h."""

    SCORE_AFTER_TOP_K = 1
    ROUND_SCORES = 2
    RENORMALIZE = 4
    CLAMP_EPSILON = 8
    GROUP_BY_MAX = 16


class RouteOptions(NamedTuple):
    """What the kernel is told of a family's routing.

    Attributes:
        num_experts: E.
        top_k: K.
        score_function: Place in ``SCORE_FUNCTIONS``.
        flags: Of ``RouteFlag``.
        n_group: Groups of consecutive experts; 1: none.
        topk_group: Groups that stay open.
        epsilon: Of the renormalisation.
        factor: On the weights.
    """

    num_experts: int
    top_k: int
    score_function: int
    flags: int
    n_group: int
    topk_group: int
    epsilon: float
    factor: float


def cuda_spec(dtype: torch.dtype, arch: CudaArch) -> BuildSpec:
    """Return the module for logits of a dtype.

    Raises:
        TypeError: there is none.
    """
    if dtype not in CPP_TYPES:
        raise TypeError(f"logits: expected float32, bfloat16 or float16, got {dtype}")
    cpp_type, member = CPP_TYPES[dtype]
    return make_spec(
        (OP, member[1:]),
        cuda_files=["moe/route_topk.cu"],
        cpp_files=["moe/route_topk_binding.cc"],
        extra_cuda_cflags=[f"-DSMJ_LOGIT={cpp_type}"],
        extra_cflags=[f"-DSMJ_LOGIT_DTYPE={member}"],
        arch=arch,
    )


def _all_cuda_specs(arch: CudaArch) -> Iterator[BuildSpec]:
    for dtype in CPP_TYPES:
        yield cuda_spec(dtype, arch)


register_family(KernelFamily(OP, _all_cuda_specs, lambda: iter(())))


@cache_once
def _cuda_kernel(dtype: torch.dtype, device_index: int, /) -> Any:
    arch = current_arch(device_index)
    return load_spec(cuda_spec(dtype, arch)).route_topk, arch.supports_pdl


def _vector_refusal(name: str, x: Tensor | None, logits: Tensor, dtypes: Any) -> str:
    if x is None:
        return ""
    if x.dtype not in dtypes:
        return f"{name} is {x.dtype}"
    if x.device != logits.device or not x.is_contiguous():
        return f"{name} is elsewhere, or not contiguous"
    return ""


def refusal(
    logits: Tensor,
    options: RouteOptions,
    correction_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    num_token_non_padded: Tensor | int | None = None,
    weights_dtype: torch.dtype = torch.float32,
) -> str:
    """Return why the kernel does not serve a call; empty when it does.

    Arguments are those of :func:`route_topk`, and known to be right for ``select_experts``.
    """
    if torch.compiler.is_compiling():
        return "traced"
    if not is_cuda(logits):
        return f"on {logits.device.type}"
    count = num_token_non_padded if isinstance(num_token_non_padded, Tensor) else None
    if forward_ad._current_level >= 0 or not can_bypass_dispatcher(
        logits, correction_bias, expert_scale, count
    ):
        return "gradients, tracing, or tensors that are not plain"
    if logits.dtype not in CPP_TYPES or weights_dtype not in CPP_TYPES:
        return f"logits are {logits.dtype}, weights {weights_dtype}"
    if options.num_experts > MAX_EXPERTS or options.top_k > MAX_TOP_K:
        return f"{options.num_experts} experts, top_k {options.top_k}"
    if options.n_group > MAX_GROUPS:
        return f"{options.n_group} groups"
    rows, columns = logits.stride()
    if (columns != 1 and options.num_experts > 1) or logits.shape[0] >= 2**31:
        return f"logits have strides {(rows, columns)}, {logits.shape[0]} rows"
    if count is not None and count.dtype not in (torch.int32, torch.int64):
        return f"num_token_non_padded is {count.dtype}"
    bias = _vector_refusal("correction_bias", correction_bias, logits, (torch.float32,))
    scale = _vector_refusal("expert_scale", expert_scale, logits, CPP_TYPES)
    if bias or scale:
        return bias or scale
    return "" if env.ROUTING_KERNEL.get() else f"{env.ROUTING_KERNEL.name} is off"


def is_cuda(x: Tensor) -> bool:
    """Whether a tensor is where the kernel runs."""
    return x.is_cuda and torch.version.cuda is not None


def route_topk(
    logits: Tensor,
    options: RouteOptions,
    correction_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    num_token_non_padded: Tensor | int | None = None,
    weights_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Choose K experts a token and weigh them, as ``sgl_moe_jit.select_experts`` documents.

    Scores by torch's formulas in float32, without fast math: sigmoid and sqrt(softplus) element by
    element; a softmax's E terms, and the K weights of a renormalisation, are added lane by lane and
    then across the warp. So ids are those of torch's operations wherever the scores have the same
    bits, and scores of a softmax, whose sum torch may order in another way, may differ in the last
    bit, and near ties with them.

    T tokens, E experts, K = ``options.top_k``.

    Args:
        logits: [T, E] float32, bfloat16 or float16 on CUDA; adjacent columns, any row stride.
        options: E up to 1024, K up to 64, up to 32 groups.
        correction_bias: [E] float32, contiguous, or None: added to the scores for the choice.
        expert_scale: [E] float32, bfloat16 or float16, contiguous, or None: factors on the weights.
        num_token_non_padded: Rows from here on are padding: id -1, weight 0. One int32 or int64 on
            the logits' device, read there, or an int.
        weights_dtype: float32, bfloat16 or float16.

    Returns:
        Weights [T, K] and ids [T, K] int32, best first, new tensors. Deterministic; a row does not
        depend on the others. Does not synchronise; can be captured in a CUDA graph.

    Raises:
        TypeError, ValueError: names the argument; see :func:`refusal` for what is served.
        ToolchainError, BuildError: first use only; the kernel could not be compiled. With
            ``SGL_MOE_JIT_ROUTING_KERNEL=0`` nothing is.

    Cost: ``T * (E * logit bytes + K * (4 + weight bytes))`` bytes.
    Source: include/sgl_moe_jit/moe/route_topk.cuh. Reference: sgl_moe_jit.moe.topk_selection.
    """
    shape = (logits.shape[0], options.top_k)
    weights = torch.empty(shape, dtype=weights_dtype, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    kernel, pdl_supported = _cuda_kernel(logits.dtype, logits.device.index)
    count, valid_rows = None, logits.shape[0]
    if isinstance(num_token_non_padded, Tensor):
        count = num_token_non_padded
    elif num_token_non_padded is not None:
        valid_rows = num_token_non_padded
    kernel(
        *(weights, ids, logits, correction_bias, expert_scale, count, valid_rows),
        *options[2:],
        pdl_supported and bool(env.launch_flags() & env.FLAG_PDL),
    )
    return weights, ids

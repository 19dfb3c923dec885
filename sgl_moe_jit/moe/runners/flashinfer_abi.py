# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""What each version of FlashInfer takes and returns.

Read from ``fused_moe/core.py`` and ``csrc/trtllm_fused_moe_kernel_launcher.cu`` in the wheels of
0.6.14, 0.6.15, 0.6.15.post1, 0.6.16, 0.6.17, 0.6.18, 0.7.0, 0.7.1, 0.7.2.post1 and 0.7.4. With
``do_finalize=False`` the trtllm functions return ``[gemm2_output [P, H_pad], expert_weights [T, K],
expanded_idx_to_permuted_idx [T * K]]``; :mod:`flashinfer_answer` checks what did come back.
"""

from __future__ import annotations

import enum
import re

import torch

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.quantization import Quantization
from sgl_moe_jit.moe.runners.base import Support

FLOOR = "0.6.15"
"""In 0.6.14 every function labels its bfloat16 weights float32 when the logits are float32."""
CHECKED = "0.6.15 to 0.7.4"
"""The versions whose sources were read."""


class RoutingForm(enum.Enum):
    """How the router's choice reaches a trtllm function."""

    LOGITS = "logits"
    """Router logits: FlashInfer's kernel routes. The weights come back as bfloat16."""
    PAIR = "pair"
    """``(ids int32, weights)``. The weights come back as they are."""
    PACKED = "packed"
    """``id << 16 | bfloat16 bits`` in one int32 a slot. The weights come back as bfloat16."""


SERVED = (Quantization.NONE, Quantization.FP8_BLOCK, Quantization.NVFP4, Quantization.MXFP4)
"""What the trtllm functions with ``do_finalize`` are called for here."""

# First version whose weights, when FlashInfer routes, carry the dtype that they have.
# FP4: flashinfer#3644. The others (flashinfer#3926): 0.6.15 and 0.6.15.post1 still take the label
# from the logits while every routing kernel writes bfloat16.
_TRUE_LABEL = {
    Quantization.NVFP4: "0.6.15",
    Quantization.MXFP4: "0.6.15",
    Quantization.NONE: "0.6.16",
    Quantization.FP8_BLOCK: "0.6.16",
}
# First version that takes pairs with weights of that dtype. Before it, bfloat16 bits were read from
# float32 weights (flashinfer#3763), or the function had no pairs at all.
_PAIRS = {
    Quantization.NVFP4: {torch.bfloat16: "0.6.15", torch.float32: "0.6.16"},
    Quantization.MXFP4: {torch.bfloat16: "0.6.15", torch.float32: "0.6.16"},
    Quantization.NONE: {torch.bfloat16: "0.6.18", torch.float32: "0.6.18"},
    Quantization.FP8_BLOCK: {torch.bfloat16: "0.6.18", torch.float32: "0.6.18"},
}


def version_key(text: str) -> tuple[tuple[int, ...], int, int]:
    """Return a sort key of a version. A local label (``+cu130``) says nothing and is dropped.

    Raises:
        UnsupportedError: the text is not a version.
    """
    match = re.match(
        r"v?(\d+(?:\.\d+)*)(?:(\.dev|a|b|rc)\d*)?(?:\.post(\d+))?(?:\+.*)?$", text.strip()
    )
    if match is None:
        raise UnsupportedError(
            f"flashinfer: expected a version such as 0.7.2, got {text!r}; install a release of "
            "flashinfer-python: what an unnamed version returns cannot be known"
        )
    release = [int(part) for part in match[1].split(".")]
    while release and release[-1] == 0:
        release.pop()
    return tuple(release), 0 if match[2] else 1, int(match[3] or 0)


def at_least(version: str, since: str) -> bool:
    """Return whether ``version`` is ``since`` or newer; a pre-release of it is older."""
    return version_key(version) >= version_key(since)


def upgrade(since: str) -> str:
    """Return the command that brings a version."""
    return f"pip install -U 'flashinfer-python>={since}'"


def check_version(version: str) -> Support:
    """Say whether this version can be called at all."""
    if at_least(version, FLOOR):
        return Support(True)
    return Support(
        False,
        f"flashinfer {version}: needs {FLOOR} or newer, older versions hand over bfloat16 weights "
        f"as float32 (flashinfer#3595); {upgrade(FLOOR)}",
    )


def pair_dtype(
    version: str, quantization: Quantization, weights_dtype: torch.dtype
) -> torch.dtype | None:
    """Return the dtype of the weights in a pair; None where the function takes packed ids only.

    bfloat16 stays bfloat16; everything else is float32 where that is taken, else bfloat16.
    """
    wanted = torch.bfloat16 if weights_dtype == torch.bfloat16 else torch.float32
    for dtype in (wanted, torch.bfloat16):
        if at_least(version, _PAIRS[quantization][dtype]):
            return dtype
    return None


def deferral(
    version: str, quantization: Quantization, form: RoutingForm, *, padded: bool
) -> Support:
    """Say whether the rows can be handed over un-finalized.

    Args:
        version: FlashInfer's.
        quantization: Of the expert weights.
        form: How the router's choice is passed.
        padded: Whether the weights' hidden size is larger than the layer's.
    """
    if quantization not in SERVED:
        served = ", ".join(map(str, SERVED))
        return Support(False, f"quantization: {quantization} rows are not handed over; {served}")
    if quantization is Quantization.NVFP4 and padded:
        return Support(False, "hidden size: NVFP4 rows are handed over without padding only")
    since = _TRUE_LABEL[quantization]
    if form is RoutingForm.LOGITS and not at_least(version, since):
        return Support(
            False,
            f"flashinfer {version} may label its bfloat16 routing weights float32 for "
            f"quantization {quantization} (flashinfer#3925); {upgrade(since)}",
        )
    return Support(True)

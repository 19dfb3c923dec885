# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""CUDA targets: one strict parser, and the target of a device."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sgl_moe_jit import env

_PATTERN = re.compile(r"(?:sm_|compute_)?(\d+)(?:\.(\d))?([af]?)")

# What nvcc of CUDA 12.8 to 13.0 can build for, from 8.0 up.
_KNOWN = (
    *((8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0)),
    *((10, 0), (10, 3), (11, 0), (12, 0), (12, 1)),
)
# Architecture-specific ("a") and family ("f") targets exist only for these, as `nvcc --help` of
# CUDA 13.0 lists them.
_SPECIFIC = {(9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)}
_FAMILY = {(10, 0), (10, 3), (11, 0), (12, 0), (12, 1)}


@dataclass(frozen=True)
class CudaArch:
    """One compilation target, such as ``sm_90a``.

    Attributes:
        major: Compute capability, before the dot.
        minor: After the dot.
        suffix: ``""``, ``"a"`` (this chip only) or ``"f"`` (its family).
    """

    major: int
    minor: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> CudaArch:
        """Read ``9.0``, ``9.0a``, ``90a``, ``sm_90a`` or ``compute_90a``.

        Raises:
            ValueError: not such a form, below 8.0, or a target or an ``a`` or ``f`` form that does
                not exist; quotes the text.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"CUDA target: expected a form like 9.0a or sm_90a, got {text!r}")
        digits, minor, suffix = match.groups()
        if minor is None:
            if len(digits) < 2:
                raise ValueError(f"CUDA target: expected a form like 9.0a or sm_90a, got {text!r}")
            digits, minor = digits[:-1], digits[-1]
        arch = cls(int(digits), int(minor), suffix)
        if arch.major < 8:
            raise ValueError(f"CUDA target: expected 8.0 or newer (bfloat16), got {text!r}")
        if (arch.major, arch.minor) not in _KNOWN:
            known = ", ".join(f"{major}.{minor}" for major, minor in _KNOWN)
            raise ValueError(f"CUDA target: expected one of {known}, got {text!r}")
        forms = {"a": _SPECIFIC, "f": _FAMILY}
        if suffix and (arch.major, arch.minor) not in forms[suffix]:
            raise ValueError(
                f"CUDA target: sm_{digits}{minor} has no {suffix!r} form, got {text!r}"
            )
        return arch

    @property
    def name(self) -> str:
        """``sm_90a`` and the like."""
        return f"sm_{self.major}{self.minor}{self.suffix}"

    @property
    def supports_pdl(self) -> bool:
        """Whether the target has programmatic dependent launch (compute capability 9.0 and up)."""
        return self.major >= 9

    def gencode(self) -> str:
        """Return nvcc's ``-gencode`` flag for machine code of exactly this target."""
        number = f"{self.major}{self.minor}{self.suffix}"
        return f"-gencode=arch=compute_{number},code=sm_{number}"


def arch_of_capability(major: int, minor: int) -> CudaArch:
    """Return the target built for a device of this compute capability.

    A device newer than this library gets its plain target: whether that exists, nvcc knows.

    Raises:
        ValueError: below 8.0.
    """
    if major < 8:
        raise ValueError(
            f"CUDA device: expected compute capability 8.0 or newer, got {major}.{minor}"
        )
    if (major, minor) in {(9, 0), (10, 0), (10, 3)}:
        return CudaArch(major, minor, "a")
    if major == 12:
        return CudaArch(12, minor, "f")
    return CudaArch(major, minor)


def current_arch(device_index: int | None = None) -> CudaArch:
    """Return ``SGL_MOE_JIT_CUDA_ARCH``, or the target of a device.

    Args:
        device_index: CUDA device; None means the current one.

    Raises:
        RuntimeError: no variable and no CUDA device.
    """
    override = env.CUDA_ARCH.get()
    if override is not None:
        return CudaArch.parse(override)
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            "no CUDA device or driver found. To compile without one, set "
            f"{env.CUDA_ARCH.name} (for example 9.0a) or pass arch="
        )
    return arch_of_capability(*torch.cuda.get_device_capability(device_index))

# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Machine code of sm_90a: what our kernels may contain, and how wide they move rows."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sgl_moe_jit.jit import toolchain
from tests.ops.compile_kernels import Kernel

PIP_COMMAND = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"

# Reads or writes global memory; a prefetch (CCTL) does not.
_MEMORY = re.compile(r"(LDG|STG|LD|ST|ATOM|ATOMG|RED|REDG|LDGSTS|UBLKCP|UTMA\w+)(\.|$)")
_WAIT = "ACQBULK"


@dataclass(frozen=True)
class Instruction:
    """One instruction: ``LDG.E.128`` and its place in the kernel."""

    address: int
    opcode: str

    def is_a(self, name: str) -> bool:
        return self.opcode.split(".")[0] == name

    def has(self, modifier: str) -> bool:
        return modifier in self.opcode.split(".")[1:]

    @property
    def bytes(self) -> int:
        """Bytes a thread moves, of a load or store."""
        for modifier, size in (
            ("128", 16),
            ("64", 8),
            ("U16", 2),
            ("S16", 2),
            ("U8", 1),
            ("S8", 1),
        ):
            if self.has(modifier):
                return size
        return 4


def locate_cuobjdump() -> Path | None:
    """Return a cuobjdump that has nvdisasm beside it: the toolkit's, else pip's."""
    toolkit = toolchain.require_cuda_toolkit()
    for folder in (toolkit.root / "bin", *(root / "bin" for root in toolchain.pip_roots())):
        if (folder / "cuobjdump").is_file() and (folder / "nvdisasm").is_file():
            return folder / "cuobjdump"
    return None


def disassemble(cuobjdump: Path, binary: Path, arch: str) -> dict[str, list[Instruction]]:
    """Return the code of every kernel of one target, by symbol."""
    done = subprocess.run(
        [str(cuobjdump), "-sass", "-arch", arch, str(binary)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{cuobjdump}: {done.stderr}"
    return parse_sass(done.stdout)


def parse_sass(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions by symbol; ``@P0`` and operands are left out."""
    found = {}
    for part in re.split(r"^\s*Function : ", text, flags=re.MULTILINE)[1:]:
        found[part.split(None, 1)[0]] = [
            Instruction(int(address, 16), opcode)
            for address, opcode in re.findall(
                r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", part, re.MULTILINE
            )
        ]
    return found


def complaints(kernel: Kernel, code: list[Instruction]) -> Iterator[str]:
    """Yield what is wrong with a kernel's code."""
    yield from _memory_complaints(code)
    yield from _width_complaints(kernel, code)


def _memory_complaints(code: list[Instruction]) -> Iterator[str]:
    local = [x.opcode for x in code if x.is_a("LDL") or x.is_a("STL")]
    if local:
        yield f"{len(local)} accesses to local memory, such as {local[0]}"
    waits = [x.address for x in code if x.is_a(_WAIT)]
    touching = [x for x in code if _MEMORY.match(x.opcode)]
    if not waits:
        yield f"no {_WAIT}: never waits for its predecessor"
    elif touching and touching[0].address < waits[0]:
        first = touching[0]
        yield f"{first.opcode} at {first.address:#x}, before {_WAIT} at {waits[0]:#x}"
    # ld.global.nc promises that nobody writes while the kernel runs, from its first instruction on.
    constant = [x for x in touching if x.has("CONSTANT")]
    if constant:
        yield f"loads by the read-only path: {_summary(constant)}"


def _width_complaints(kernel: Kernel, code: list[Instruction]) -> Iterator[str]:
    width = kernel.access_bytes
    if width == 0:
        return
    loads = [x for x in code if x.is_a("LDG")]
    stores = [x for x in code if x.is_a("STG")]
    # The shared row comes besides.
    wanted = int(kernel.args.get("rows_in_flight", 0)) + 1
    if sum(x.bytes == width for x in loads) < wanted:
        yield f"expected {wanted} or more loads of {width} bytes, got: {_summary(loads)}"
    # A kernel that moves words may write indices too, one that quantises has bytes and a scale.
    alone = "Word" not in kernel.args and kernel.args.get("kQuantised") != "true"
    fitting = [x for x in stores if x.bytes == width]
    if not fitting or (alone and fitting != stores):
        yield f"expected stores of {width} bytes{' only' * alone}, got: {_summary(stores)}"


def _summary(accesses: list[Instruction]) -> str:
    counts = Counter(x.opcode for x in accesses)
    return ", ".join(f"{count}x {opcode}" for opcode, count in counts.items()) or "none"

# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels as the compiler reports them: readable name, registers, spills, launch bounds."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tests.ops.compile_batches import Call
from tests.ops.compile_names import demangle, parse_name, shipped_parameters
from tests.ops.compile_variants import batch_id

_ITEM_BYTES = {
    **{"bf16": 2, "f16": 2, "f32": 4},
    **{"unsigned short": 2, "unsigned int": 4, "uint2": 8, "uint4": 16},
}
_REGISTERS = 65536  # of a multiprocessor of each of our targets, in four equal parts
REGISTER_UNIT = 8  # registers a thread, by which a warp's share grows


@dataclass(frozen=True)
class Kernel:
    """One kernel of one target.

    Attributes:
        symbol: Mangled name.
        name: Function, without namespaces.
        args: Its template arguments by the names that the source gives them, those of a struct in
            place of the struct.
        arch: Target.
        registers: Registers a thread.
        limit: Registers that leave room for the launch bounds' blocks on a multiprocessor.
        local_bytes: Stack frame, spill stores, spill loads.
    """

    symbol: str
    name: str
    args: dict[str, str]
    arch: str
    registers: int
    limit: int
    local_bytes: tuple[int, int, int]

    @property
    def access_bytes(self) -> int:
        """Bytes that a thread moves at a time; 0 where the name does not say."""
        count = self.args.get("vec", self.args.get("kVec", "1"))
        item = self.args.get("Act", self.args.get("Element", self.args.get("Word", "")))
        return int(count) * _ITEM_BYTES.get(item, 0)

    @property
    def label(self) -> str:
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.args.items())])


def register_limit(threads: int, blocks: int) -> int:
    """Return the registers a thread may take if ``blocks`` are to run side by side, at most 255.

    A warp lives in one of the four parts of a multiprocessor, and takes registers in steps of 8 a
    thread.
    """
    warps = -(-threads // 32)

    def side_by_side(registers: int) -> int:
        return _REGISTERS // 4 // (32 * registers) * 4 // warps

    steps = range(REGISTER_UNIT, 257, REGISTER_UNIT)
    return min(255, max((r for r in steps if side_by_side(r) >= blocks), default=0))


def launch_bounds(ptx: str) -> dict[str, tuple[int, int]]:
    """Return (threads a block, blocks a multiprocessor) by symbol, as the kernels declare them."""
    found = {}
    for entry in re.split(r"\.entry\s+", ptx)[1:]:
        symbol = re.match(r"\w+", entry).group()
        directives = entry[: entry.index("{")]
        threads = re.search(r"\.maxntid\s+(\d+)", directives)
        blocks = re.search(r"\.minnctapersm\s+(\d+)", directives)
        found[symbol] = (
            int(threads.group(1)) if threads else 1024,
            int(blocks.group(1)) if blocks else 1,
        )
    return found


@functools.cache
def reported_kernels(call: Call) -> list[Kernel]:
    """Return the kernels of a successful call, from ``-Xptxas=-v`` and the PTX."""
    assert call.status == 0, f"{batch_id(call.batch)} does not compile"
    bounds = {}
    for path in call.folder.glob("*.ptx"):
        text = path.read_text(encoding="utf-8")
        target = re.search(r"^\.target\s+(\w+)", text, re.MULTILINE).group(1)
        bounds.update({(target, name): pair for name, pair in launch_bounds(text).items()})
    found = re.findall(
        r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        call.output,
        re.DOTALL,
    )
    kernels = []
    for symbol, arch, frame, stores, loads, registers in found:
        name, args = parse_name(demangle(symbol), shipped_parameters())
        kernels.append(
            Kernel(
                *(symbol, name, args, arch, int(registers)),
                limit=register_limit(*bounds[arch, symbol]),
                local_bytes=(int(frame), int(stores), int(loads)),
            )
        )
    return kernels


def of_target(calls: Iterable[Call], arch: str) -> list[Kernel]:
    """Return every kernel of one target once."""
    kernels = (kernel for call in calls for kernel in reported_kernels(call))
    return list({k.symbol: k for k in kernels if k.arch == arch}.values())

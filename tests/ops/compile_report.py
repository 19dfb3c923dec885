# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The recorded registers of every kernel, in register_bounds.txt, against a compiler's report.

``python -m tests.ops.compile_report`` prints what the tree gives now; with ``--update`` it writes
the file. A line is a launch shape of a kernel for some types; its cells are the counts of slots.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sgl_moe_jit.jit import CudaArch, toolchain
from tests.ops.compile_batches import Builds
from tests.ops.compile_kernels import REGISTER_UNIT, Kernel, of_target
from tests.ops.compile_variants import batch_id, make_batches, registered_variants

ARCH = CudaArch.parse("sm_90a")
COMMAND = "python -m tests.ops.compile_report --update"
FILE = Path(__file__).with_name("register_bounds.txt")

# What a line runs over, and what the launcher derives from that.
_CELL = "kTopK"
_DERIVED = ("rows_in_flight",)
# What models run most, where one register more is too many. Elsewhere a warp's share of them, which
# grows in steps, must not grow.
_HOT = {"Act": ("bf16",), "Element": ("bf16",), "Weight": ("f32", "AnyWeight"), "kTopK": ("8",)}

Place = tuple[str, str, str]  # (kernel and types, launch shape, count of slots)


@dataclass(frozen=True)
class Entry:
    """Registers of a kernel, and how many its launch bounds allow."""

    registers: int
    limit: int


def is_hot(kernel: Kernel) -> bool:
    """Whether every register counts: vectors of 16 bytes, common types and count of slots."""
    matches = all(kernel.args.get(name, values[0]) in values for name, values in _HOT.items())
    return matches and kernel.access_bytes == 16 and "Word" not in kernel.args


def most_registers(kernel: Kernel, recorded: Entry) -> int:
    """Return what a kernel may take, given what is recorded."""
    if is_hot(kernel):
        return recorded.registers
    return -(-recorded.registers // REGISTER_UNIT) * REGISTER_UNIT


def place_of(kernel: Kernel) -> Place:
    """Return where a kernel stands in the file."""
    types, shape = [kernel.name], []
    for name, value in kernel.args.items():
        if name != _CELL and name not in _DERIVED:
            is_number = re.fullmatch(r"-?\d+|true|false", value)
            (shape if is_number else types).append(f"{name}={value}")
    return " ".join(types), " ".join(shape) or "-", kernel.args.get(_CELL, "-")


def entries(kernels: Iterable[Kernel]) -> dict[Place, Entry]:
    """Return the file's entries for these kernels.

    Raises:
        ValueError: two kernels would share a place.
    """
    found: dict[Place, Kernel] = {}
    for kernel in kernels:
        place = place_of(kernel)
        if place in found:
            both = f"{found[place].label} and {kernel.label}"
            raise ValueError(f"one place for {both}: take what differs out of _DERIVED")
        found[place] = kernel
    return {place: Entry(k.registers, k.limit) for place, k in found.items()}


def release() -> str:
    """Return the compiler's release, which the registers hang on."""
    major, minor = toolchain.require_cuda_toolkit().version
    return f"{major}.{minor}"


def write_text(found: dict[Place, Entry], compiler: str) -> str:
    """Return the file's text."""
    lines = [
        f"# Registers a thread of every kernel for {ARCH.name}, by nvcc {compiler}, and how many",
        f"# its launch bounds allow: {_CELL}:registers/limit. Write it anew with",
        f"#   {COMMAND}",
    ]
    last = ("", "")
    for types, shape, cell in sorted(found, key=_order):
        if types != last[0]:
            lines += ["", types]
        if (types, shape) != last:
            lines.append(f"  {shape} |")
        last = (types, shape)
        entry = found[types, shape, cell]
        lines[-1] += f" {cell}:{entry.registers}/{entry.limit}"
    return "\n".join(lines) + "\n"


def _order(place: Place) -> list[list[tuple[int, str]]]:
    """Numbers by their value."""
    return [
        [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
        for text in place
    ]


def read_text(text: str) -> tuple[str, dict[Place, Entry]]:
    """Return the compiler's release and the entries of a file."""
    compiler = re.search(r"nvcc (\d+\.\d+)", text).group(1)
    found, types = {}, ""
    for line in text.splitlines():
        if line.startswith("  "):
            shape, _, cells = line.strip().partition(" | ")
            for cell in cells.split():
                name, registers, limit = re.fullmatch(r"(\S+):(\d+)/(\d+)", cell).groups()
                found[types, shape, name] = Entry(int(registers), int(limit))
        elif line and not line.startswith("#"):
            types = line
    return compiler, found


def compiled_kernels() -> list[Kernel]:
    """Compile every variant for the target and return its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        builds = Builds(Path(folder))
        try:
            calls = builds.calls(*make_batches(registered_variants([ARCH])))
        finally:
            builds.close()
        for call in calls:
            if call.status != 0:
                raise SystemExit(f"{batch_id(call.batch)}\n{call.messages}")
        return of_target(calls, ARCH.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help=f"write {FILE.name}")
    update = parser.parse_args().update
    text = write_text(entries(compiled_kernels()), release())
    if update:
        FILE.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()

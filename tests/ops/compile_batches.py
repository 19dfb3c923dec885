# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Many variants of one source in one nvcc call, and such calls side by side.

Compiling a small kernel is mostly parsing headers, once a target. A batch's translation unit
includes them once, then the source once a variant, with that variant's macros and inside a
namespace of its own. Templates live in the headers, so that the kernels are the instantiations that
a module gets. Sixteen variants of finalize.cu for four targets took 14 s of CPU time in one call
and 53 s in sixteen: AMD EPYC, nvcc 13.0, 2026-11-29, `os.times` around `call_nvcc`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sgl_moe_jit.jit import parallel, toolchain
from tests.ops.compile_variants import Batch, included_names

_TIMEOUT_S = 1500  # tests on every core leave it little


@dataclass(frozen=True)
class Call:
    """One finished nvcc call; ``folder`` has x.fatbin and a .ptx a target."""

    batch: Batch
    status: int
    output: str
    folder: Path

    @property
    def messages(self) -> str:
        """The output without ``-Xptxas=-v``'s reports."""
        report = re.compile(r"ptxas info|\s+\d+ bytes stack frame")
        return "\n".join(x for x in self.output.splitlines() if not report.match(x))


def named_namespaces(text: str) -> list[tuple[str, ...]]:
    """Return the named namespaces that a source opens, outer before inner."""
    code = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', "", text, flags=re.DOTALL)
    stack: list[tuple[str, ...]] = []
    found: dict[tuple[str, ...], None] = {}
    for match in re.finditer(r"\bnamespace(?:\s+([\w:]+))?\s*\{|[{}]", code):
        if match.group() == "}":
            stack.pop()
            continue
        names = tuple(match.group(1).split("::")) if match.group(1) else ()
        stack.append(names)
        if names:
            whole = tuple(name for part in stack for name in part)
            found.update((whole[: i + 1], None) for i in range(len(whole)))
    return list(found)


def batch_text(batch: Batch) -> str:
    """Return the translation unit that holds a batch."""
    source = batch[0].source
    text = source.read_text(encoding="utf-8")
    spaces = named_namespaces(text)
    lines = [f"#include {name}" for name in included_names(text)]
    lines += [_inside(space, "") for space in spaces]  # a header need not have opened it
    for i, variant in enumerate(batch):
        lines += [f"#define {name} {value}" for name, value in variant.macros]
        lines.append(f"namespace v{i} {{  // {variant.label}")
        lines += [_inside(space, f"using namespace ::{'::'.join(space)};") for space in spaces]
        lines += [f'#include "{source}"', "}"]
        lines += [f"#undef {name}" for name, _ in variant.macros]
    return "\n".join(lines) + "\n"


def _inside(space: tuple[str, ...], body: str) -> str:
    return "".join(f"namespace {name} {{ " for name in space) + body + " }" * len(space)


def call_nvcc(nvcc: Path, batch: Batch, folder: Path) -> Call:
    """Compile a batch in one call; a batch of one as its module does."""
    (folder / "keep").mkdir(parents=True)
    first = batch[0]
    source, macros = first.source, [f"-D{name}={value}" for name, value in first.macros]
    if len(batch) > 1:
        source, macros = folder / "batch.cu", [f"-I{first.source.parent}"]
        source.write_text(batch_text(batch), encoding="utf-8")
    command = [
        "nice",  # tests that run meanwhile come first
        *(str(nvcc), *first.flags, *macros, *(arch.gencode() for arch in first.archs)),
        *("-fatbin", "-Xptxas=-v", "--keep", "--keep-dir=keep", "-o", "x.fatbin", str(source)),
    ]
    own = {**os.environ, "TMPDIR": str(folder / "keep")}  # one that dies removes nothing
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=own,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        status, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        status, output = 124, f"no end after {_TIMEOUT_S} s: {command}"
    for ptx in (folder / "keep").glob("*.ptx"):
        ptx.rename(folder / ptx.name)
    shutil.rmtree(folder / "keep")  # ten times what is needed of it
    return Call(batch, status, output, folder)


def compile_batch(nvcc: Path, batch: Batch, folder: Path) -> list[Call]:
    """Compile a batch at once; where that fails, a call a variant says which one is at fault.

    Raises:
        CancelledError: Ctrl-C, which nvcc's compilers get as well.
    """
    whole = call_nvcc(nvcc, batch, folder / "all")
    if whole.status != 0 and f"died due to signal {signal.SIGINT.value}" in whole.output:
        raise CancelledError
    if whole.status == 0 or len(batch) == 1:
        return [whole]
    return [call_nvcc(nvcc, (variant,), folder / str(i)) for i, variant in enumerate(batch)]


class Builds:
    """Compiles batches in the background, each in one of the processes that have the same folder.

    Args:
        folder: Where; made if it is not there, to be removed after :meth:`close` by its owner.
        processes: How many have it. Together they compile as many batches at a time as there are
            cores, and those that tests wait for.
    """

    def __init__(self, folder: Path, processes: int = 1) -> None:
        self._nvcc = toolchain.require_cuda_toolkit().nvcc
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._threads = max(1, parallel.max_jobs() // processes)
        self._pool = ThreadPoolExecutor(self._threads)
        self._started: set[Batch] = set()
        self._is_open = True

    def start(self, batches: Iterable[Batch]) -> None:
        """Begin with batches; those that somebody else has begun are left to him."""
        todo = [batch for batch in batches if batch not in self._started]
        self._started.update(todo)

        def work() -> None:
            for batch in todo:
                if self._is_open:
                    self._compiled(batch, wait=False)

        for _ in range(self._threads):
            self._pool.submit(work)

    def _compiled(self, batch: Batch, wait: bool) -> list[Call] | None:
        folder = self._folder / hashlib.sha256(repr(batch).encode()).hexdigest()[:16]
        results = folder.with_suffix(".pickle")
        with folder.with_suffix(".lock").open("w") as lock:
            try:  # until the file is closed
                fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            if not results.exists():
                # Anew each time: of a process that died, half a batch and its nvcc may be left.
                made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=self._folder))
                calls = compile_batch(self._nvcc, batch, made)
                (made / "calls.pickle").write_bytes(pickle.dumps(calls))
                (made / "calls.pickle").rename(results)
            return pickle.loads(results.read_bytes())

    def calls(self, *batches: Batch) -> list[Call]:
        """Return the calls of batches, when they are done."""
        self.start(batches)
        return [call for batch in batches for call in self._compiled(batch, wait=True) or ()]

    def close(self) -> None:
        """Wait for what runs, and start no more."""
        self._is_open = False
        self._pool.shutdown(cancel_futures=True)

# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""One build: from a spec to ``module.so`` and the files it was made from, in a private folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sgl_moe_jit import env
from sgl_moe_jit.errors import BuildError, ToolchainError
from sgl_moe_jit.jit import parallel, spec, toolchain
from sgl_moe_jit.jit.spec import BuildSpec, CompileUnit

# A single kernel compiles in seconds; a compiler that runs this long is stuck.
_COMPILE_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Tools:
    """The compilers of one build; ``cuda`` is None for a module without device code."""

    host: toolchain.HostCompiler
    cuda: toolchain.CudaToolkit | None

    def fill(self, command: tuple[str, ...]) -> list[str]:
        """Replace a command's placeholders."""
        argv: list[str] = []
        for word in command:
            if word == spec.CXX:
                argv.extend(self.host.argv)
            elif word == spec.NVCC:
                assert self.cuda is not None
                argv.append(str(self.cuda.nvcc))
                if self.host.how == "CXX":  # nvcc ignores CXX; without it, nvcc's own choice stands
                    argv.append(f"-ccbin={self.host.path}")
            elif word == spec.CUDART:
                assert self.cuda is not None
                argv.append(self.cuda.cudart)
            else:
                argv.append(word)
        return argv


@dataclass(frozen=True)
class BuildResult:
    """What a build left.

    Attributes:
        module: The shared library, in the staging folder.
        dependencies: Every file the compilers read, as they named it: below ``roots/``, or absolute
            for the toolchain's own headers.
        linked: The same of the linker: objects, archives, libraries, files that flags name.
        started_ns: The file system's time just before the first compiler started. A file that
            changed later may have been read before or after its change.
    """

    module: Path
    dependencies: tuple[str, ...]
    linked: tuple[str, ...]
    started_ns: int


def find_tools(build: BuildSpec) -> Tools:
    """Return the compilers a spec needs.

    Raises:
        ToolchainError: names everything that is missing; nothing was compiled.
    """
    missing: list[str] = []
    host, cuda = None, None
    try:
        cuda = toolchain.require_cuda_toolkit() if build.uses_cuda else None
    except ToolchainError as error:
        missing.append(str(error))
    try:
        host = toolchain.require_host_compiler()
    except ToolchainError as error:
        missing.append(str(error))
    if missing or host is None:
        raise ToolchainError(f"{build.label} is to be compiled: " + "\n".join(missing))
    return Tools(host, cuda)


def parse_depfile(text: str) -> list[str]:
    r"""Return the prerequisites of a make rule as gcc and nvcc write it.

    ``\ `` and ``\#`` stand for the character, ``$$`` for a dollar, backslash-newline continues.
    """
    text = text.replace("\\\n", " ")
    match = re.search(r":(?=\s)", text)  # the target ends at a colon followed by white space
    words = re.findall(r"(?:\\[ #\\]|\$\$|\S)+", text[match.end() :] if match else "")
    return [re.sub(r"\\([ #\\])", r"\1", word).replace("$$", "$") for word in words]


def parse_trace(text: str, folder: Path) -> list[str]:
    """Return the files that a linker's ``--trace`` lists, without what the build itself made.

    A member of an archive stands for the archive: ``libfoo.a(foo.o)`` is how gold and lld write it,
    ``(libfoo.a)foo.o`` how old linkers did. Intermediate files are gone by now and left out.
    """
    found: dict[str, None] = {}
    for line in text.splitlines():
        after, before = re.sub(r"\([^()]*\)$", "", line), re.sub(r"^\((.*)\)[^()]*$", r"\1", line)
        for name in (line, after, before):
            if name.startswith(("/", "roots/")) and (folder / name).is_file():
                found[name] = None
                break
    return list(found)


# Flags that name a file to be written, which is no input.
_OUTPUT_FLAG = re.compile(r"-Map\b|--dependency-file|--out-implib|-save-temps|-dumpdir")


def named_files(words: Iterable[str]) -> list[str]:
    """Return the files that flags name by full path, such as ``-Wl,--version-script=/x/map``."""
    inputs = [word for word in words if not _OUTPUT_FLAG.search(word)]
    parts = [part[part.find("/") :] for word in inputs for part in re.split("[,=]", word)]
    return [part for part in parts if part.startswith("/") and Path(part).is_file()]


def _start_clock(folder: Path) -> int:
    """Return the new folder's time, once the file system's clock has moved on.

    The clock ticks every few milliseconds. After the wait, a file that has this time was written
    before the first compiler started, and one with a later time after the folder was made.
    """
    started = folder.stat().st_ctime_ns
    deadline = time.monotonic() + 2  # FAT has the coarsest clock, of two seconds
    while folder.stat().st_ctime_ns <= started and time.monotonic() < deadline:
        time.sleep(0.001)
        os.utime(folder)
    return started


def _explain(command: list[str], status: int, output: str, roots: dict[str, Path]) -> str:
    for name, folder in roots.items():
        output = output.replace(f"roots/{name}/", f"{folder}/")
    lines = output.strip().splitlines()
    first = next(
        (
            line
            for line in lines
            if re.search(r"\b(error|fatal)\b|undefined reference|cannot find", line)
        ),
        "",
    )
    if status < 0 or 128 < status < 160:
        signal = -status if status < 0 else status - 128
        first = f"the compiler was killed by signal {signal}" + (
            " (out of memory?)" if signal == 9 else ""
        )
    elif "No space left on device" in output:  # a linker's own last word does not say so
        first = (
            "no space left on the device of the cache or of the temporary folder; free some, or "
            f"set {env.CACHE_DIR.name} or TMPDIR"
        )
    tail = "\n".join(lines[-40:])
    return f"{first or 'the compiler failed'}\nexit status {status}: {shlex.join(command)}\n{tail}"


def _run(command: list[str], folder: Path, roots: dict[str, Path], label: str) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C"},  # _explain reads the compiler's English
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{label}: {shlex.join(command)}: {error}") from error
    if done.returncode != 0:
        output = done.stderr if done.stderr.strip() else done.stdout  # the latter: --trace's list
        raise BuildError(f"{label}: {_explain(command, done.returncode, output, roots)}")
    return done.stdout


def _require_output(path: Path, label: str, command: list[str]) -> None:
    if not path.is_file() or path.stat().st_size == 0:
        raise BuildError(
            f"{label}: the compiler exited with 0 but left no {path.name}: {shlex.join(command)}"
        )


def run_build(build: BuildSpec, tools: Tools, folder: Path) -> BuildResult:
    """Compile and link into ``folder``, which must exist, be empty and be private to this call.

    Raises:
        BuildError: the compiler or linker failed; the first line names file, line and error.
    """
    roots = dict(build.roots)
    if tools.cuda is not None:
        roots["cuda"] = tools.cuda.include
        roots["cudart"] = tools.cuda.lib
    started_ns = _start_clock(folder)
    commands = (*(unit.command for unit in build.units), build.link)
    named = named_files(word for command in commands for word in command)  # before any is written
    (folder / "roots").mkdir()
    for name, target in roots.items():
        (folder / "roots" / name).symlink_to(target, target_is_directory=True)

    def compile_unit(unit: CompileUnit) -> list[str]:
        if unit.text is not None:
            (folder / unit.source).write_text(unit.text, encoding="utf-8")
        command = tools.fill(unit.command)
        _run(command, folder, roots, build.label)
        _require_output(folder / f"{unit.stem}.o", build.label, command)
        depfile = folder / f"{unit.stem}.d"
        return parse_depfile(depfile.read_text(encoding="utf-8")) if depfile.is_file() else []

    read = parallel.run_all(compile_unit, build.units)
    link = tools.fill(build.link)
    linked = parse_trace(_run(link, folder, roots, build.label), folder)
    _require_output(folder / "module.so", build.label, link)
    linked += named
    generated = {unit.source for unit in build.units if unit.text is not None}
    names = dict.fromkeys(name for names in read for name in names if name not in generated)
    return BuildResult(folder / "module.so", tuple(names), tuple(linked), started_ns)

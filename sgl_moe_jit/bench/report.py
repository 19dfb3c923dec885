# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Result records: what a measurement says, stamped with where and how it was taken."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import sgl_moe_jit
from sgl_moe_jit.bench.timing import Timing

# Bytes a second by datasheet, for the share of peak.
_PEAK_BYTES = {"NVIDIA H200": 4.8e12}


@dataclass(frozen=True)
class Record:
    """One provider's time for one shape.

    Attributes:
        subject: finalize, cpu, jit, ...
        case: Model shape by name.
        num_tokens: T.
        hidden_dim: H.
        top_k: K.
        mode: hot, cold or eager.
        weight_dtype: Of the expert weights.
        provider: Who computed it.
        timing: Microseconds a call.
        bytes: What the fused op must move; the same for every provider.
    """

    subject: str
    case: str
    num_tokens: int
    hidden_dim: int
    top_k: int
    mode: str
    weight_dtype: str
    provider: str
    timing: Timing
    bytes: int


@dataclass(frozen=True)
class Stamp:
    """Where and how a file's records were taken."""

    device: str
    versions: dict[str, str]
    commit: str
    command: str
    date: str


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def device_name(device: str) -> str:
    """Return the GPU's name, or the CPU's with the threads torch uses."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{_cpu_name()}, {torch.get_num_threads()} threads"


def peak_bytes_per_s(device: str) -> float | None:
    """Return the datasheet bandwidth of the current GPU, or None when it is not listed."""
    return _PEAK_BYTES.get(torch.cuda.get_device_name()) if device == "cuda" else None


def git_commit() -> str:
    """Return the checkout's commit, with ``+changes`` when files differ from it, or ``unknown``."""
    root = Path(sgl_moe_jit.__file__).parent.parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "sgl_moe_jit", "csrc", "include")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def make_stamp(device: str, commit: str | None) -> Stamp:
    """Describe this machine, these versions and this command line."""
    versions = {
        "sgl_moe_jit": sgl_moe_jit.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
    }
    for name in ("apache-tvm-ffi", "nvidia-cutlass"):
        versions[name] = _version(name) or "unknown"
    return Stamp(
        device_name(device),
        versions,
        commit or git_commit(),
        shlex.join(["python", "-m", "sgl_moe_jit", *sys.argv[1:]]),
        datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def to_json(records: Sequence[Record], stamp: Stamp) -> list[dict[str, Any]]:
    """Return the records as result files hold them."""
    rows = []
    for record in records:
        row = asdict(record)
        timing = row.pop("timing")
        rows.append({**row, **timing, **asdict(stamp)})
    return rows


def write_json(records: Sequence[Record], stamp: Stamp, path: Path) -> None:
    """Write a result file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(records, stamp), indent=1) + "\n", encoding="utf-8")


def table(records: Sequence[Record], peak: float | None, ours: str = "sgl_moe_jit") -> str:
    """Return one line a shape: each provider's median, and its ratio to ours."""
    providers = list(dict.fromkeys(record.provider for record in records))
    shapes: dict[tuple[str, int, str], dict[str, Record]] = {}
    for record in records:
        key = (record.case, record.num_tokens, record.mode)
        shapes.setdefault(key, {})[record.provider] = record
    head = f"{'case':<13} {'tokens':>6} {'mode':<5}"
    head += "".join(f" {name + ' us':>16} {'ratio':>6}" for name in providers)
    lines = [head + f" {'TB/s':>6}" + (f" {'of peak':>8}" if peak else "")]
    for (case, tokens, mode), row in shapes.items():
        mine = row[ours]
        line = f"{case:<13} {tokens:>6} {mode:<5}"
        for name in providers:
            if name not in row:
                line += f" {'-':>16} {'':>6}"
                continue
            t = row[name].timing
            spread = f"{t.median_us:.2f} ±{(t.p80_us - t.p20_us) / 2:.2f}"
            line += f" {spread:>16} {t.median_us / mine.timing.median_us:>5.2f}x"
        rate = mine.bytes / mine.timing.median_us / 1e6
        line += f" {rate:>6.3f}" + (f" {rate * 1e12 / peak:>8.1%}" if peak else "")
        lines.append(line)
    return "\n".join(lines)

# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Result records: what a measurement says, stamped with where and how it was taken."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import sgl_moe_jit
from sgl_moe_jit.bench.cases import FinalizeCase
from sgl_moe_jit.bench.contest import Outcome
from sgl_moe_jit.bench.kernels import peer_version
from sgl_moe_jit.bench.timing import Timing

# Bytes a second by datasheet, for the share of peak.
_PEAK_BYTES = {"NVIDIA H200": 4.8e12}


@dataclass(frozen=True)
class Record:
    """One provider's time for one shape.

    Attributes:
        subject: finalize, norm, permute, waterfill, route, layer, memory, host, cpu, jit or ep.
        case: Model shape by name.
        num_tokens: T.
        hidden_dim: H.
        top_k: K.
        mode: hot, cold, graph, eager or warm; ep8 or ep32, hot, as one of so many ranks.
        weight_dtype: Of the expert weights.
        provider: Who computed it.
        timing: Microseconds a call; None where memory was measured.
        bytes: What the fused op must move; the same for every provider. 0 where that says nothing.
        cache_bytes: The cache that cold buffers were rotated past; None where there is none.
        note: What else decided the time, such as a launch shape.
        peak_bytes: Allocated at most during a call; None where time was measured.
    """

    subject: str
    case: str
    num_tokens: int
    hidden_dim: int
    top_k: int
    mode: str
    weight_dtype: str
    provider: str
    timing: Timing | None
    bytes: int
    cache_bytes: int | None = None
    note: str | None = None
    peak_bytes: int | None = None

    @classmethod
    def of(
        cls,
        subject: str,
        case: FinalizeCase,
        num_tokens: int,
        mode: str,
        provider: str,
        outcome: Outcome,
        num_bytes: int,
        cache_bytes: int | None = None,
        note: str | None = None,
        peak_bytes: int | None = None,
    ) -> Record:
        """Return the record of a provider's outcome on a case, weights in float32."""
        return cls(
            subject,
            case.name,
            num_tokens,
            case.hidden_dim,
            case.top_k,
            mode,
            "float32",
            provider,
            outcome.timing,
            num_bytes,
            cache_bytes,
            note or outcome.note,
            peak_bytes,
        )


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


def driver_version() -> str | None:
    """Return the NVIDIA driver's version, or None where ``nvidia-smi`` does not answer."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None


def peak_bytes_per_s(device: str) -> float | None:
    """Return the datasheet bandwidth of a GPU of this name, or None when it is not listed."""
    return _PEAK_BYTES.get(device)


def share_of_peak(num_bytes: int, us: float, device: str) -> float | None:
    """Return which share of a device's datasheet bandwidth a time is, or None."""
    peak = peak_bytes_per_s(device)
    return num_bytes / (us * 1e-6) / peak if peak and num_bytes else None


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


def make_stamp(
    device: str, commit: str | None, command: str, peers: Mapping[str, Path] | None = None
) -> Stamp:
    """Describe this machine, these versions, and the command line without a machine's paths."""
    versions = {
        "sgl_moe_jit": sgl_moe_jit.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
    }
    for name in ("apache-tvm-ffi", "nvidia-cutlass"):
        versions[name] = _version(name) or "unknown"
    if device == "cuda":
        versions["driver"] = driver_version() or "unknown"
    for name, folder in (peers or {}).items():
        versions[name] = peer_version(folder)
    return Stamp(
        device_name(device),
        versions,
        commit or git_commit(),
        command,
        datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def to_json(records: Iterable[Record], stamp: Stamp) -> list[dict[str, Any]]:
    """Return the records as result files hold them."""
    rows = []
    for record in records:
        row = asdict(record)
        timing = row.pop("timing")
        if record.timing is None:
            rows.append({**row, **asdict(stamp)})
            continue
        del row["peak_bytes"]
        share = share_of_peak(record.bytes, record.timing.median_us, stamp.device)
        rows.append({**row, **timing, "share_of_peak": share, **asdict(stamp)})
    return rows


def write_json(records: Iterable[Record], stamp: Stamp, path: Path) -> None:
    """Write a result file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_json(records, stamp), indent=1) + "\n", encoding="utf-8")


def table_head() -> str:
    """Return the line above :func:`table_lines`."""
    return (
        f"{'case':<13} {'tokens':>6} {'mode':<5} {'provider':<28} {'median us':>10} {'p20':>9} "
        f"{'p80':>9} {'/ ours':>7} {'GB/s':>8} {'of peak':>8}"
    )


def _value(record: Record) -> float:
    """Return what providers are compared by: microseconds, or bytes."""
    return record.peak_bytes or 0 if record.timing is None else record.timing.median_us


def table_lines(records: Sequence[Record], device: str) -> list[str]:
    """Return one line a provider of one shape; the ratio is its time, or its bytes, over ours."""
    ours = next((_value(r) for r in records if r.provider == "sgl_moe_jit"), None)
    lines = []
    for record in records:
        ratio = f"{_value(record) / ours:.2f}x" if ours else "-"
        head = f"{record.case:<13} {record.num_tokens:>6} {record.mode:<5} {record.provider:<28} "
        t = record.timing
        if t is None:
            lines.append(f"{head}{_value(record) / 2**20:>10.1f} MiB at most {ratio:>15}")
            continue
        rate = f"{record.bytes / t.median_us / 1e3:.1f}" if record.bytes else "-"
        share = share_of_peak(record.bytes, t.median_us, device)
        lines.append(
            f"{head}{t.median_us:>10.2f} {t.p20_us:>9.2f} {t.p80_us:>9.2f} {ratio:>7} {rate:>8} "
            f"{f'{share:.1%}' if share is not None else '-':>8}"
        )
    return lines

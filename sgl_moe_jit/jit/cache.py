# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The build cache: which built module, if any, is still exact.

``<root>/<label>/<key>/<leaf>/`` holds ``module.so`` and ``manifest.json``. The key is known before
a build: command lines, source contents, versions, target, machine. The leaf is named by what the
manifest records, and is a hit when all of that still holds. Looking up starts no process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from stat import S_ISDIR

from sgl_moe_jit.jit import manifest, paths
from sgl_moe_jit.jit.spec import BuildSpec

logger = logging.getLogger("sgl_moe_jit.jit")

_FORMAT = 2
_ABANDONED_S = 24 * 3600


def key_of(build: BuildSpec) -> str:
    """Return the part of a module's identity that is known before it is built."""
    roots = dict(build.roots)

    def source_digest(source: str) -> str | None:
        _, root, rest = source.split("/", 2)
        return manifest.file_digest(roots[root] / rest)

    text = json.dumps(
        {
            "format": _FORMAT,
            "name": build.name,
            "units": [
                [u.command, u.text if u.text is not None else source_digest(u.source)]
                for u in build.units
            ],
            "link": build.link,
            "dependencies": [[d.name, d.provider, d.version] for d in build.dependencies],
            "arch": build.arch.name if build.arch else None,
            "environment": manifest.environment(),
        },
        sort_keys=True,
    )
    return manifest.digest(text.encode())


def find(build: BuildSpec, key: str) -> Path | None:
    """Return the ``module.so`` of a leaf that is still exact, newest first, or None."""
    folder = paths.cache_root() / build.label / key
    try:
        leaves = sorted(folder.iterdir(), key=lambda leaf: leaf.stat().st_mtime_ns, reverse=True)
    except OSError:
        return None
    present = manifest.Present.look(build)
    for leaf in leaves:
        try:
            record = json.loads((leaf / "manifest.json").read_text(encoding="utf-8"))
            # dlopen of a damaged library may kill the process, so compare before loading.
            if manifest.file_digest(leaf / "module.so") != record["module"]:
                raise ValueError("module.so is not the file that was published")
            if manifest.fits(record, build, present):
                return leaf / "module.so"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            discard(leaf, error)
    return None


def discard(leaf: Path, reason: Exception) -> None:
    """Move a damaged entry out of the way, so that a rebuild can take its place. Warns."""
    if not leaf.is_dir():  # another process was first
        return
    logger.warning("damaged cache entry %s, rebuilding it: %s", leaf, reason)
    grave = paths.cache_root() / ".staging" / f"bad-{secrets.token_hex(6)}"
    try:
        grave.parent.mkdir(parents=True, exist_ok=True)
        leaf.rename(grave)
    except OSError:
        return
    shutil.rmtree(grave, ignore_errors=True)


def _remove_abandoned(staging_root: Path) -> None:
    """Remove what killed builds of this user left: folders that no build touched for a day."""
    for folder in staging_root.glob("*"):
        with contextlib.suppress(OSError):
            stat = folder.lstat()
            old = time.time() - stat.st_mtime > _ABANDONED_S
            if old and stat.st_uid == os.getuid() and S_ISDIR(stat.st_mode):
                shutil.rmtree(folder, ignore_errors=True)


def new_staging() -> Path:
    """Make and return a folder that only this call uses.

    It lies on the cache's own file system, so that publishing is a rename; in the temporary folder
    when the cache cannot be written, which costs the caching and not the build.
    """
    _remove_abandoned(paths.cache_root() / ".staging")
    folder = paths.cache_root() / ".staging" / f"{os.getpid()}-{secrets.token_hex(6)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        logger.debug("%s: %s; building in the temporary folder", folder, error)
        return Path(tempfile.mkdtemp(prefix="sgl_moe_jit-"))
    return folder


def publish(build: BuildSpec, key: str, leaf: str, staging: Path) -> Path:
    """Rename a loaded build to its place and return its module there.

    Losing the race to another process is winning: its module is the same, and stays.
    """
    for entry in staging.iterdir():
        if entry.name not in ("module.so", "manifest.json"):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    with (staging / "module.so").open("rb") as module:
        os.fsync(module.fileno())
    target = paths.cache_root() / build.label / key / leaf
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Rename, not copy: readers take no lock, so a half-written module must never be visible.
        staging.rename(target)
    except OSError:
        if not (target / "module.so").is_file():
            raise
        shutil.rmtree(staging, ignore_errors=True)
    return target / "module.so"

# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Where sources lie and where built modules go. Nothing here creates a file or a folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sgl_moe_jit import env

_PACKAGE = Path(__file__).resolve().parent.parent

# A file that tells our folder from another one of the same name beside the package.
_PROBES = {"csrc": "moe/finalize.cu", "include": "sgl_moe_jit/tvm_ffi_utils.h"}


def _shipped(name: str) -> Path:
    """Return ``name`` inside the package (wheel), or beside it (checkout, editable install)."""
    for base in (_PACKAGE, _PACKAGE.parent):
        if (base / name / _PROBES[name]).is_file():
            return base / name
    raise FileNotFoundError(
        f"{name}/ is missing: looked in {_PACKAGE} and {_PACKAGE.parent}. The installation is "
        "incomplete; reinstall sgl-moe-jit."
    )


def csrc_dir() -> Path:
    """Return the folder of .cu and .cc sources."""
    return _shipped("csrc")


def include_dir() -> Path:
    """Return the folder that holds ``sgl_moe_jit/*.h`` and ``*.cuh``."""
    return _shipped("include")


def cache_root() -> Path:
    """Return the folder of built modules; it may not exist yet.

    Order: ``SGL_MOE_JIT_CACHE_DIR``, ``$XDG_CACHE_HOME/sgl_moe_jit``, ``~/.cache/sgl_moe_jit`` when
    the home folder exists and is not ``/``, else a folder of this user in the temporary folder.

    Raises:
        PermissionError: that last folder belongs to somebody else, whose code it would run.
    """
    chosen = env.CACHE_DIR.get()
    if chosen is not None:
        return chosen.absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if xdg.strip():
        return (Path(xdg) / "sgl_moe_jit").absolute()
    # os.path.expanduser keeps a literal "~" where Path.expanduser raises (no HOME, unknown uid).
    home = os.path.expanduser("~")  # noqa: PTH111
    if home not in ("~", "/") and Path(home).is_dir() and os.access(home, os.W_OK):
        return Path(home) / ".cache" / "sgl_moe_jit"
    shared = Path(tempfile.gettempdir()) / f"sgl_moe_jit-{os.getuid()}"
    if os.path.lexists(shared) and shared.lstat().st_uid != os.getuid():
        raise PermissionError(
            f"{shared} belongs to another user; set {env.CACHE_DIR.name} to a folder of your own"
        )
    return shared

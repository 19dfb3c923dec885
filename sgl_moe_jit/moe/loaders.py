# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""Who turns another library's module into a layer: integrations, which register here.

Layers do not know the integrations, which stand on them. A caller that names one has it loaded
then, and only then.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from sgl_moe_jit.errors import UnsupportedError
from sgl_moe_jit.moe.input_checks import check_callable, described

if TYPE_CHECKING:
    from sgl_moe_jit.moe.layer import FusedMoE

Loader = Callable[..., "FusedMoE"]
_HOMES = {"transformers": "sgl_moe_jit.integrations.transformers"}
_loaders: dict[str, Loader] = {}


def register_loader(library: str, loader: Loader) -> None:
    """Make ``loader`` the one for a library's blocks; a later one replaces it.

    Args:
        library: Its name.
        loader: Called as ``loader(cls, block, ep_rank, ep_size, fuse_shared, **options)``.

    Raises:
        TypeError: ``library`` is no string, or ``loader`` is no function.
    """
    if not isinstance(library, str):
        raise TypeError(f"library: expected a string, got {described(library)}")
    check_callable("loader", loader)
    _loaders[library] = loader


def loader_of(library: str) -> Loader:
    """Return the loader of a library's blocks.

    Raises:
        UnsupportedError: no integration has registered one.
        ImportError: the integration cannot be imported; says what to install.
    """
    if library not in _loaders and library in _HOMES:
        import_module(_HOMES[library])
    if library not in _loaders:
        raise UnsupportedError(f"library: expected one of {sorted(_loaders)}, got {library!r}")
    return _loaders[library]

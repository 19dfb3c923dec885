# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""The file of a routing trace: which experts the calls of a model chose. ``ep/trace.py`` records.

It is a ``.npz`` and holds no weights, no hidden states and no tokens. Its arrays, none pickled:

=============== ===================== ===========================================================
``format``      text                  :data:`FORMAT`
``model``       text                  name given by who recorded it
``num_experts`` int64                 E, routed experts of a layer
``top_k``       int64                 K
``layers``      [Y] text              names of the recorded modules
``call_layer``  [C] int32             index into ``layers`` of each call, in the order of the run
``call_rows``   [C] int64             rows of each call
``topk_ids``    [R, K] int16 or int32 rows of all calls, one after the other; -1: no expert (masked
                                      or padded, or an id that is no routed expert)
=============== ===================== ===========================================================

Reading and writing need numpy.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FORMAT = "sgl_moe_jit routing trace 1"
_INT16_MAX = 32767
# name -> (number of dimensions, kinds of dtype)
_ARRAYS = {
    "format": (0, "U"),
    "model": (0, "U"),
    "num_experts": (0, "i"),
    "top_k": (0, "i"),
    "layers": (1, "U"),
    "call_layer": (1, "i"),
    "call_rows": (1, "i"),
    "topk_ids": (2, "i"),
}


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise ImportError(
            "routing traces need numpy. Install it with: pip install 'sgl-moe-jit[bench]'"
        ) from error
    return numpy


@dataclass(frozen=True)
class RoutingTrace:
    """The routing of some calls of a model.

    Attributes:
        model: Its name.
        num_experts: E, routed experts of a layer.
        top_k: K.
        calls: (layer, ids) of each call in the order of the run; ids [T, K] int16 or int32, -1
            where there is no expert.
    """

    model: str
    num_experts: int
    top_k: int
    calls: tuple[tuple[str, npt.NDArray[np.signedinteger[Any]]], ...]

    def by_layer(self) -> dict[str, npt.NDArray[np.signedinteger[Any]]]:
        """Return the rows of each layer, [R, K], in the order of the run."""
        layers: dict[str, list[Any]] = {}
        for layer, ids in self.calls:
            layers.setdefault(layer, []).append(ids)
        return {layer: _numpy().concatenate(parts) for layer, parts in layers.items()}

    def save(self, path: Path) -> None:
        """Write the file, making its folder.

        Raises:
            ValueError: there is no call, or one whose ids :func:`load_trace` would refuse or, cut
                to the file's dtype, would take for others.
        """
        numpy = _numpy()
        if not self.calls:
            raise ValueError("calls: expected at least one, got none")
        for layer, ids in self.calls:
            expected = f"[T, {self.top_k}] integers from -1 to {self.num_experts - 1}"
            span = (int(ids.min()), int(ids.max())) if ids.size else (-1, -1)
            if (
                ids.ndim != 2
                or ids.shape[1] != self.top_k
                or ids.dtype.kind != "i"
                or span[0] < -1
                or span[1] >= self.num_experts
            ):
                got = f"{ids.shape} of {ids.dtype} from {span[0]} to {span[1]}"
                raise ValueError(f"calls: expected {expected} of {layer}, got {got}")
        layers = list(dict.fromkeys(layer for layer, _ in self.calls))
        ids_type = numpy.int16 if self.num_experts <= _INT16_MAX else numpy.int32
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:  # given a name, numpy appends .npz to it
            numpy.savez_compressed(
                file,
                format=numpy.array(FORMAT),
                model=numpy.array(self.model),
                num_experts=numpy.int64(self.num_experts),
                top_k=numpy.int64(self.top_k),
                layers=numpy.array(layers),
                call_layer=numpy.array([layers.index(x) for x, _ in self.calls], numpy.int32),
                call_rows=numpy.array([len(ids) for _, ids in self.calls], numpy.int64),
                topk_ids=numpy.concatenate([ids for _, ids in self.calls]).astype(ids_type),
            )


def load_trace(path: Path) -> RoutingTrace:
    """Read a trace.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no trace, or one that contradicts itself; names the file, the array, what
            was expected and what came.
    """
    numpy = _numpy()

    def check(ok: bool, name: str, expected: str, got: object) -> None:
        if not ok:
            raise ValueError(f"{path}: {name}: expected {expected}, got {got}")

    try:
        with path.open("rb") as file:
            check(zipfile.is_zipfile(file), "file", "a .npz archive", "something else")
            file.seek(0)
            with numpy.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
    except (zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path}: file: expected a whole .npz archive, got {error}") from error
    for name, (dimensions, kinds) in _ARRAYS.items():
        check(name in arrays, name, "an array of this name", f"only {', '.join(sorted(arrays))}")
        x = arrays[name]
        expected = f"{dimensions} dimensions of {'text' if kinds == 'U' else 'integers'}"
        check(x.ndim == dimensions and x.dtype.kind in kinds, name, expected, (x.shape, x.dtype))
    check(str(arrays["format"]) == FORMAT, "format", repr(FORMAT), repr(str(arrays["format"])))
    num_experts, top_k = int(arrays["num_experts"]), int(arrays["top_k"])
    layers, layer_of, rows = arrays["layers"], arrays["call_layer"], arrays["call_rows"]
    ids = arrays["topk_ids"]
    check(num_experts >= 1, "num_experts", "at least 1", num_experts)
    check(ids.shape[1] == top_k >= 1, "topk_ids", f"top_k = {top_k} >= 1 columns", ids.shape)
    check(len(rows) >= 1, "call_rows", "at least one call", 0)
    check(len(layer_of) == len(rows), "call_layer", f"{len(rows)} calls", len(layer_of))
    known = bool(((layer_of >= 0) & (layer_of < len(layers))).all())
    check(known, "call_layer", f"0 to {len(layers) - 1}", layer_of.tolist())
    check(int(rows.min()) >= 0, "call_rows", "no number below 0", int(rows.min()))
    total = int(rows.sum())
    check(total == len(ids), "topk_ids", f"{total} rows, the sum of call_rows", len(ids))
    if ids.size:
        span = int(ids.min()), int(ids.max())
        check(span[0] >= -1 and span[1] < num_experts, "topk_ids", f"-1 to {num_experts - 1}", span)
    parts = numpy.split(ids, numpy.cumsum(rows)[:-1])
    calls = tuple((str(layers[i]), part) for i, part in zip(layer_of, parts, strict=True))
    return RoutingTrace(str(arrays["model"]), num_experts, top_k, calls)

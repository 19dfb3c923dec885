# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
r"""The alternate CUDA stream: one for all layers, and the fork to it and back.

    main       ---+--- routed experts ---+--- finalize with shared add ---
                   \                    /
    alternate       +- shared experts -+

One stream, because each stream that a capture touches becomes a branch of its graph: a stream a
layer made 61 of them in a public report (sglang#30460).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor


class _Streams(threading.local):
    """Streams of a thread: threads may capture graphs of their own side by side."""

    def __init__(self) -> None:
        self.of_device: dict[int, list[torch.cuda.Stream]] = {}


_streams = _Streams()


def alternate_stream(main: torch.cuda.Stream) -> torch.cuda.Stream:
    """Return this thread's alternate stream beside ``main``; made at the first call.

    Torch hands out streams from a pool, so a caller's own may be the one chosen before: then there
    is a second one.
    """
    index = main.device.index
    own = _streams.of_device.setdefault(index, [])
    for stream in own:
        if stream != main:
            return stream
    stream = torch.cuda.Stream(device=index)
    while stream == main:
        stream = torch.cuda.Stream(device=index)
    own.append(stream)
    return stream


class Fork:
    """Work on the alternate stream, from the present point of the current stream to a join.

    The join comes at the end of the ``with`` block, also when an exception passes, so a capture
    never ends with a stream left open.

    Outside a capture, tensors that cross over are kept from reuse until the other stream is done
    with them: ``wait_stream`` orders work and keeps no memory. Inside one nothing is needed: a
    graph's memory is handed on within a stream, and the join orders the two.

    Args:
        device: A CUDA device.
        reads: Tensors of the current stream that the alternate one will read.
    """

    def __init__(self, device: torch.device, *reads: Tensor) -> None:
        self._main = torch.cuda.current_stream(device)
        self._alternate = alternate_stream(self._main)
        self._reads = reads
        self._eager = not torch.cuda.is_current_stream_capturing()

    def __enter__(self) -> Fork:
        self._alternate.wait_stream(self._main)
        self._keep(self._reads, self._alternate)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._main.wait_stream(self._alternate)

    def _keep(self, tensors: tuple[Tensor | None, ...], stream: torch.cuda.Stream) -> None:
        if self._eager:
            for x in tensors:
                if x is not None:
                    x.record_stream(stream)

    @contextmanager
    def alternate(self) -> Iterator[None]:
        """Run what is inside on the alternate stream."""
        with torch.cuda.stream(self._alternate):
            yield

    def hand_over(self, *made: Tensor | None) -> None:
        """Keep what the alternate stream made until the current one is done with it."""
        self._keep(made, self._main)

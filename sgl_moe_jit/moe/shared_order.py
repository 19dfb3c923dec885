# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
"""In which order routed and shared experts run, and whether the finalize waits: by peak memory.

Bytes of one call: T tokens, P = T * K rows, H hidden, I expert width, I_s shared width, b an item:

    x    = b T H          hidden states, alive throughout
    ws   = b P max(H + 2I, 3I, I + H)
                          routed workspace at its largest: permuted input and first projection, or
                          that and the activation, or that and the expert rows (without a gate
                          I for 2I and 2I for 3I)
    rows = b P H          the un-finalized rows, part of ws
    s_ws = b T 3 I_s      shared workspace
    s, r, y = b T H       shared, routed, final output

    order                      peak - x
    shared first, finished     max(s_ws + s,  s + max(ws, rows + r),  s + r + y)
    routed first, finished     max(ws, rows + r,  r + s_ws + s,  s + r + y)
    shared first, deferred     max(s_ws + s,  s + ws,  s + rows + y)
    routed first, deferred     max(ws,  rows + s_ws + s,  rows + s + y)

Deferral saves a pass over memory, so it is taken when it asks for no more than the best order that
finishes at once, but for ``SLACK_BYTES``. As a rule it asks for nothing: ws counts the rows once
and the workspace of the GEMMs on top, which is gone when the shared experts start.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

SLACK_BYTES = 20 << 20
"""One segment of torch's caching allocator (``kLargeBuffer``): less does not show."""


class Order(enum.Enum):
    """Which of the two runs first."""

    SHARED_FIRST = "shared first"
    ROUTED_FIRST = "routed first"

    def __str__(self) -> str:
        return self.value


class BlockShape(NamedTuple):
    """The sizes of one call.

    Attributes:
        num_tokens: T.
        top_k: K.
        hidden_dim: H.
        intermediate_dim: I.
        shared_width: Elements a token that the shared experts hold at once beside input and output.
        item_size: Bytes of an element.
        has_gate: Whether experts have a gate.
    """

    num_tokens: int
    top_k: int
    hidden_dim: int
    intermediate_dim: int
    shared_width: int
    item_size: int
    has_gate: bool = True

    @property
    def output_bytes(self) -> int:
        """Bytes of x, s, r and y each."""
        return self.num_tokens * self.hidden_dim * self.item_size

    @property
    def rows_bytes(self) -> int:
        """Bytes of the un-finalized rows."""
        return self.output_bytes * self.top_k

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the routed experts at their largest."""
        hidden, width = self.hidden_dim, self.intermediate_dim
        first = (2 if self.has_gate else 1) * width
        widest = max(hidden + first, first + width, width + hidden)
        return self.num_tokens * self.top_k * widest * self.item_size

    @property
    def shared_workspace_bytes(self) -> int:
        """Bytes of the shared experts at their largest, input and output apart."""
        return self.num_tokens * self.shared_width * self.item_size

    def peak_bytes(self, order: Order, deferred: bool) -> int:
        """Return the predicted peak, x included. See this module's docstring."""
        out, rows, ws = self.output_bytes, self.rows_bytes, self.workspace_bytes
        shared = self.shared_workspace_bytes + out
        kept = rows if deferred else out  # of the routed experts, once they have run
        if order is Order.SHARED_FIRST:
            routed = out + (ws if deferred else max(ws, rows + out))
            return out + max(shared, routed, out + kept + out)
        routed = ws if deferred else max(ws, rows + out)
        return out + max(routed, kept + shared, kept + out + out)


@dataclass(frozen=True)
class Peak:
    """One way to run, and the peak predicted for it."""

    order: Order
    deferred: bool
    bytes: int

    def __str__(self) -> str:
        finish = "deferred" if self.deferred else "finished"
        return f"{self.order}, {finish}: {self.bytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class OrderChoice:
    """What was chosen, why, and what each way was predicted to need."""

    order: Order
    deferred: bool
    reason: str
    peaks: tuple[Peak, ...]

    def __str__(self) -> str:
        return f"{self.order}, {self.reason} ({'; '.join(map(str, self.peaks))})"


def choose_order(
    shape: BlockShape,
    *,
    mutates_input: bool,
    may_defer: bool,
    must_defer: bool = False,
    slack_bytes: int = SLACK_BYTES,
) -> OrderChoice:
    """Choose the way to run with the lowest predicted peak, deferral first where it is free.

    Args:
        shape: The sizes of the call.
        mutates_input: The runner overwrites its input, so the shared experts have to run first.
        may_defer: Whether the rows may wait for the shared experts.
        must_defer: Do it whatever it needs; then ``may_defer`` has to be True.
        slack_bytes: How much more deferral may need.

    Returns:
        The choice; of equal peaks the order that runs the routed experts first.
    """
    orders = [Order.SHARED_FIRST] if mutates_input else [Order.ROUTED_FIRST, Order.SHARED_FIRST]
    peaks = tuple(
        Peak(order, deferred, shape.peak_bytes(order, deferred))
        for deferred in ((True, False) if may_defer else (False,))
        for order in orders
    )

    def lowest(deferred: bool) -> Peak:
        return min((p for p in peaks if p.deferred is deferred), key=lambda p: p.bytes)

    finished = lowest(False)
    if not may_defer:
        return OrderChoice(finished.order, False, "lowest peak that finishes at once", peaks)
    deferred = lowest(True)
    more = deferred.bytes - finished.bytes
    if must_defer:
        return OrderChoice(deferred.order, True, "lowest peak that defers, as asked for", peaks)
    if more <= slack_bytes:
        return OrderChoice(deferred.order, True, "deferral needs no more memory", peaks)
    return OrderChoice(
        finished.order,
        False,
        f"deferral would need {more / 2**20:.1f} MiB more, allowed {slack_bytes / 2**20:.1f}",
        peaks,
    )


def shared_width_of(weight_shapes: list[tuple[int, ...]], hidden_dim: int) -> int:
    """Estimate ``BlockShape.shared_width`` from the matrices of the shared experts.

    A matrix [n, H] makes n elements a token and one [H, n] reads n: for SwiGLU 3 I_s. For the
    memory model alone: an [H, H] counts twice.
    """
    matrices = [shape for shape in weight_shapes if len(shape) == 2]
    made = sum(rows for rows, columns in matrices if columns == hidden_dim)
    return made + sum(columns for rows, columns in matrices if rows == hidden_dim)

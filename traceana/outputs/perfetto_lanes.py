"""The order in which slices of one track have to be written, and the lanes that overlapping slices need.

Perfetto keeps a stack per track: a slice's END closes whatever is on top. So slices have to nest, at equal nanoseconds
an END comes before the next BEGIN, and a slice that crosses another one has to go to a track of its own (a lane).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["arrange"]

I64 = NDArray[np.int64]


def arrange(ts: I64, end: I64) -> tuple[I64, I64]:
    """The writing order and the lane of every slice.

    `ts` and `end` (ns, shape (n,), end >= ts) are sorted by ts, longer first on ties. Returns `order`, where i >= 0 is
    the BEGIN of slice i and ~i its END (slices of zero length have no END: they are written as instants), and `lane`
    (shape (n,)), 0 for every slice that crosses no other one. Within each lane the order is a correct nesting.
    """
    n = len(ts)
    lane = np.zeros(n, np.int64)
    if n == 0:
        return np.empty(0, np.int64), lane
    spans = end > ts
    if bool((end[:-1] <= ts[1:]).all()):
        both = np.stack([np.arange(n), ~np.arange(n)], axis=1)
        return both[np.stack([np.ones(n, np.bool_), spans], axis=1)], lane
    # Innermost first among equal ends: the sort is stable, so hand it the slices from the last to the first.
    candidates = np.flatnonzero(spans)[::-1]
    closing = candidates[np.argsort(end[candidates], kind="stable")]
    closing_ns = end[closing]
    order = np.empty(n + len(closing), np.int64)
    order[np.arange(n) + np.searchsorted(closing_ns, ts, "right")] = np.arange(n)
    order[np.arange(len(closing)) + np.searchsorted(ts, closing_ns, "left")] = ~closing
    crossing = _crossing(order, spans)
    if len(crossing):
        lane[crossing] = _greedy_lanes(ts[crossing].tolist(), end[crossing].tolist())
    return order, lane


def _crossing(order: I64, spans: NDArray[np.bool_]) -> I64:
    """Slices that cross another one, and those around them, in start order.

    A slice whose BEGIN and END are neighbours crosses nothing; take such pairs out until none is left. Each round
    removes one level of nesting, so the cost is the number of slices, not its square.
    """
    slices = np.where(order >= 0, order, ~order)
    rest = order[spans[slices]]
    while len(rest):
        pair = (rest[:-1] >= 0) & (rest[1:] == ~rest[:-1])
        if not pair.any():
            break
        keep = np.ones(len(rest), np.bool_)
        keep[:-1][pair] = False
        keep[1:][pair] = False
        rest = rest[keep]
    return np.sort(rest[rest >= 0])


def _greedy_lanes(ts: list[int], end: list[int]) -> list[int]:
    """The first lane in which each slice nests. Only slices that cross come here, so the loop is off the hot path."""
    stacks: list[list[int]] = []
    lanes: list[int] = []
    for start, stop in zip(ts, end, strict=True):
        for number, stack in enumerate(stacks):
            while stack and stack[-1] <= start:
                stack.pop()
            if not stack or stop <= stack[-1]:
                stack.append(stop)
                lanes.append(number)
                break
        else:
            lanes.append(len(stacks))
            stacks.append([stop])
    return lanes

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
        return both.ravel() if spans.all() else both[np.stack([np.ones(n, np.bool_), spans], axis=1)], lane
    # Innermost first among equal ends: the sort is stable, so hand it the slices from the last to the first.
    candidates = np.flatnonzero(spans)[::-1]
    closing = candidates[np.argsort(end[candidates], kind="stable")]
    # Both lists are in order of time: a stable sort merges them, ends first.
    merged = np.argsort(np.concatenate([end[closing], ts]), kind="stable")
    order = np.concatenate([~closing, np.arange(n)])[merged]
    crossing = _crossing(order, spans)
    if len(crossing):
        lane[crossing] = _greedy_lanes(ts[crossing].tolist(), end[crossing].tolist())
    return order, lane


def _crossing(order: I64, spans: NDArray[np.bool_]) -> I64:
    """Slices that cross another one, and those around them, in start order."""
    rest = order if spans.all() else order[spans[np.where(order >= 0, order, ~order)]]
    if _nested(rest):
        return np.empty(0, np.int64)
    # A slice whose BEGIN and END are neighbours crosses nothing; take such pairs out until none is left. Each round
    # removes one level of nesting, so the cost is the number of slices, not its square.
    while len(rest):
        pair = (rest[:-1] >= 0) & (rest[1:] == ~rest[:-1])
        if not pair.any():
            break
        keep = np.ones(len(rest), np.bool_)
        keep[:-1][pair] = False
        keep[1:][pair] = False
        rest = rest[keep]
    return np.sort(rest[rest >= 0])


def _nested(order: I64) -> bool:
    """Whether no slice crosses another one: on each level of the stack, each BEGIN is followed by its own END."""
    begins = order >= 0
    level = np.cumsum(np.where(begins, np.int8(1), np.int8(-1)), dtype=np.int64) - begins
    highest = int(level.max(initial=0))
    if highest >= 1 << 16:
        return False
    # numpy sorts small numbers in linear time.
    by_level = order[np.argsort(level.astype(np.uint8 if highest < 256 else np.uint16), kind="stable")]
    return bool((by_level[::2] >= 0).all() and (by_level[1::2] == ~by_level[::2]).all())


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

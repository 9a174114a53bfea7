"""Sets of half-open integer intervals `[start, end)` as pairs of sorted numpy arrays, and what one does with them.

Every function takes and returns `int64` arrays. A *set* is disjoint, sorted by start, and has no empty interval; `union`
makes one from any intervals. All are O(n log n) or better, with no Python loop over intervals.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["IntArray", "Intervals", "empty", "intersect", "intersect_pairs", "length", "subtract", "union", "within"]

IntArray = NDArray[np.int64]


class Intervals(NamedTuple):
    """Starts and ends of the same length."""

    start: IntArray
    end: IntArray

    @property
    def total(self) -> int:
        """Sum of the lengths."""
        return int((self.end - self.start).sum())


def empty() -> Intervals:
    """The empty set."""
    zero = np.zeros(0, dtype=np.int64)
    return Intervals(zero, zero)


def union(start: IntArray, end: IntArray) -> Intervals:
    """The set covered by any intervals, in any order; empty and inverted ones cover nothing, touching ones merge."""
    keep = end > start
    start, end = start[keep], end[keep]
    if start.size == 0:
        return empty()
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Intervals(start[first], reach[last])


def intersect_pairs(a: Intervals, b: Intervals) -> tuple[IntArray, IntArray, Intervals]:
    """Every non-empty overlap of an interval of `a` with one of the set `b`.

    `a` may be any intervals (they may overlap each other and need no order); `b` must be disjoint and sorted. Returns the
    index into `a`, the index into `b`, and the overlaps, ordered by (index into a, start).
    """
    none = np.zeros(0, dtype=np.int64)
    if a.start.size == 0 or b.start.size == 0:
        return none, none, empty()
    lo = np.searchsorted(b.end, a.start, side="right")
    hi = np.searchsorted(b.start, a.end, side="left")
    count = np.maximum(hi - lo, 0)
    ia = np.repeat(np.arange(a.start.size), count)
    offset = np.arange(ia.size) - np.repeat(np.cumsum(count) - count, count)
    ib = np.repeat(lo, count) + offset
    start, end = np.maximum(a.start[ia], b.start[ib]), np.minimum(a.end[ia], b.end[ib])
    keep = end > start
    return ia[keep], ib[keep], Intervals(start[keep], end[keep])


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """The intersection of two sets."""
    return intersect_pairs(a, b)[2]


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """What of the set `a` is not in the set `b`."""
    if a.start.size == 0 or b.start.size == 0:
        return a
    lo = np.iinfo(np.int64).min
    hi = np.iinfo(np.int64).max
    outside = Intervals(np.concatenate(([lo], b.end)), np.concatenate((b.start, [hi])))
    return intersect(a, outside)


def within(points: IntArray, spans: Intervals) -> IntArray:
    """For each point the index of the span of the set that holds it, or -1."""
    if spans.start.size == 0:
        return np.full(points.shape, -1, dtype=np.int64)
    index = np.searchsorted(spans.start, points, side="right") - 1
    inside = (index >= 0) & (points < spans.end[np.maximum(index, 0)])
    return np.where(inside, index, -1)


def length(spans: Intervals) -> int:
    """Sum of the lengths of a set."""
    return spans.total

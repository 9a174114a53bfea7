"""Gaps: which activity ends each idle stretch of a stage, and where the stretch that its chain explains begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traceana.arrays import distinct, numbered
from traceana.intervals import IntArray, Intervals
from traceana.model.graph import Graph

__all__ = ["Gaps", "find_gaps"]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps of one rank: the activity that ends each (`head`), where its chain stops (`begin`), and for every idle
    interval of the rank the gap it lies in (`of_idle`; -1: nothing in the trace ends it)."""

    head: IntArray
    begin: IntArray
    of_idle: IntArray


def find_gaps(graph: Graph, rank: int, idle: Intervals, communication: np.ndarray) -> Gaps:
    """Gaps of the rank at position `rank` for its idle set (docs/concepts/attribution.md, section 4).

    Between forwards a gap ends at the first activity of the next forward; inside one, at the forward's next activity.
    Without forwards it ends at the next activity that computes or copies. What else runs in between ends no gap.
    `communication` marks the activities that are NCCL kernels.
    """
    act = graph.activity
    here = act.of_rank(rank)
    mine = np.arange(here.start, here.stop)
    x, y = idle.start, idle.end
    head = np.full(x.size, -1, dtype=np.int64)
    begin = x.copy()
    forwards = np.flatnonzero(graph.forward_rank == rank)
    if forwards.size:
        members = mine[act.forward[mine] >= 0]
        order = np.lexsort((members, act.start[members], act.forward[members]))
        members = members[order]
        owner = act.forward[members]
        # Forwards are in visit order, and run in it: the number of a forward sorts like its start.
        first = np.searchsorted(owner, forwards, side="left")
        last = np.searchsorted(owner, forwards, side="right")
        f_start = act.start[members[first]]
        f_end = np.maximum.reduceat(act.end[members], first)
        at = np.searchsorted(f_start, x, side="right") - 1
        inside = (at >= 0) & (x < f_end[np.maximum(at, 0)])
        begin = np.where(at >= 0, np.maximum.accumulate(f_end)[np.maximum(at, 0)], begin)
        # Inside: the next activity of the same forward, searched in (forward, start) order.
        key_base = int(min(f_start.min(), x.min() if x.size else f_start.min()))
        key = (owner - forwards[0] << 44) + np.clip(act.start[members] - key_base, 0, (1 << 44) - 1)
        want = (np.maximum(at, 0) << 44) + np.clip(y - key_base, 0, (1 << 44) - 1)
        position = np.searchsorted(key, want, side="left")
        exists = inside & (position < last[np.maximum(at, 0)])
        reach = _running_end(act.end[members], owner)
        previous = reach[np.maximum(position - 1, 0)]
        head[exists] = members[position[exists]]
        begin[exists] = np.minimum(previous[exists], x[exists])
        # Between forwards: the first activity of the next one.
        following = np.searchsorted(f_start, y, side="left")
        outside = ~exists & (following < forwards.size)
        head[outside] = members[first[following[outside]]]
        begin = np.where(outside & (at < 0), x, begin)
    lost = head < 0
    if lost.any():
        compute = mine[~communication[mine]]
        position = np.searchsorted(act.start[compute], y[lost], side="left")
        ok = position < compute.size
        head[np.flatnonzero(lost)[ok]] = compute[position[ok]]
        if compute.size:
            reach = np.maximum.accumulate(act.end[compute])
            before = np.searchsorted(act.start[compute], x[lost], side="right") - 1
            begin[lost] = np.where(before >= 0, np.minimum(reach[np.maximum(before, 0)], x[lost]), x[lost])
    begin = np.minimum(begin, x)
    known = head >= 0
    heads, inverse = numbered(head[known])
    begins = np.full(heads.size, np.iinfo(np.int64).max)
    np.minimum.at(begins, inverse, begin[known])
    of_idle = np.full(x.size, -1, dtype=np.int64)
    of_idle[known] = inverse
    return Gaps(heads, begins, of_idle)


def _running_end(end: IntArray, owner: IntArray) -> IntArray:
    """Furthest end so far within each run of equal owners."""
    if end.size == 0:
        return end
    low = int(end.min())
    # Runs are made to sort above each other, so that one running maximum serves all of them.
    step = int(end.max()) - low + 1
    run = np.cumsum(np.concatenate(([0], (owner[1:] != owner[:-1]).astype(np.int64))))
    if run[-1] * step < 1 << 62:
        above: IntArray = np.maximum.accumulate(end - low + run * step) - run * step + low
        return above
    out = end.copy()
    for value in distinct(run):
        pick = run == value
        out[pick] = np.maximum.accumulate(end[pick])
    return out

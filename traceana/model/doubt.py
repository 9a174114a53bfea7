"""What the clocks leave open: which other clocks to try, and how far an edge that another rank makes may lie elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from traceana.arrays import numbered
from traceana.intervals import IntArray, Intervals
from traceana.model.graph import Graph

__all__ = ["other_clocks", "room_between", "unsure_edges"]

_FAR = np.int64(1 << 60)
# Up to so many ranks each one's clock is also tried alone; of more, the time for it would grow with their square.
_FEW = 4


def room_between(graph: Graph) -> IntArray:
    """How much later the clock of one rank (row) may be moved than another's (column) before a message of the first
    would arrive before it is sent, in ns."""
    n, act = len(graph.ranks), graph.activity
    send, recv = graph.message_send, graph.message_recv
    src = np.concatenate((act.rank[send], graph.thread_rank[graph.control_src]))
    dst = np.concatenate((act.rank[recv], graph.thread_rank[graph.control_dst]))
    took = np.concatenate((act.end[recv] - act.start[send], graph.control_done - graph.control_send))
    room = np.full(n * n, _FAR)
    if src.size:
        pairs, place = numbered(src * n + dst)
        least = np.full(pairs.size, _FAR)
        np.minimum.at(least, place, np.maximum(took, 0))
        room[pairs] = least
    return room.reshape(n, n)


def _possible(shift: IntArray, u: IntArray, room: IntArray) -> IntArray:
    """The shift nearest to `shift` within the uncertainty `u` under which no message arrives before it is sent."""
    high = _settled(lambda v: np.minimum(v, (v[None, :] + room).min(axis=1)), u)
    low = _settled(lambda v: np.maximum(v, (v[:, None] - room).max(axis=0)), -u)
    return _settled(lambda v: np.maximum(v, (v[:, None] - room).max(axis=0)), np.clip(shift, low, high))


def _settled(step: Callable[[IntArray], IntArray], values: IntArray) -> IntArray:
    """`step` done until it changes nothing: as often as the longest path of messages that matters has edges."""
    for _ in range(values.size):
        before, values = values, step(values)
        if (before == values).all():
            break
    return values


def other_clocks(u: IntArray, room: IntArray) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shifts of the ranks' clocks (positions and ns) within their uncertainty `u`: half of the ranks, with the others
    still or the other way, such that any two ranks are apart in one of the halves, in steps of a half; of few ranks
    also each one's alone, and in steps of a quarter; all no further than messages allow."""
    ranks = np.arange(u.size)
    halves = [ranks >> bit & 1 for bit in range(max(int(u.size - 1).bit_length(), 1))]
    ways = [*halves, *(2 * half - 1 for half in halves)]
    steps: tuple[int, ...] = (-4, -2, 2, 4)
    if u.size <= _FEW:
        ways += list(np.eye(u.size, dtype=np.int64))
        steps = (-4, -3, -2, -1, 1, 2, 3, 4)
    shifts = [_possible(way * u * step // 4, u, room) for way in ways for step in steps] if u.any() else []
    found = dict.fromkeys(tuple(s.tolist()) for s in shifts if s.any())
    return [(tuple(i for i, ns in enumerate(s) if ns), tuple(ns for ns in s if ns)) for s in found]


def unsure_edges(
    waiter: int, gap: IntArray, lo: IntArray, hi: IntArray, cause: IntArray, root: IntArray, u: IntArray, room: IntArray
) -> Intervals:
    """The nanoseconds around the edges of the stretches of one rank that events on other ranks make: as far to either
    side as the two clocks may be off against each other. The stretches are of whole chains, so that no window cuts
    them; `root` is a rank's position, or -1."""
    n = u.size
    late = np.minimum(u[:, None] + u[None, :], room)  # how much later a row's clock may be than a column's
    late[np.arange(n), np.arange(n)] = 0
    order = np.lexsort((lo, gap))
    one, two = order[:-1], order[1:]
    edge = (gap[one] == gap[two]) & (hi[one] == lo[two]) & ((cause[one] != cause[two]) | (root[one] != root[two]))
    one, two = one[edge], two[edge]
    roots = [np.where(root[j] >= 0, root[j], waiter) for j in (one, two)]
    before = np.maximum(late[waiter, roots[0]], late[waiter, roots[1]])
    after = np.maximum(late[roots[0], waiter], late[roots[1], waiter])
    some = before + after > 0
    return Intervals((hi[one] - before)[some], (hi[one] + after)[some])

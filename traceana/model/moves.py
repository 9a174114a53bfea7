"""A graph whose ranks' clocks can be moved, a few at a time and back again: a move costs what those ranks hold, not what
the capture holds."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from traceana.intervals import IntArray
from traceana.model.chain import Holds, find_holds, held_commits, hold_key
from traceana.model.graph import NEVER, STOP_COMMIT, Graph

__all__ = ["Groups", "Moves"]


class Groups:
    """The rows of each of `count` groups, from the group of every row (-1: the last one, as an index would)."""

    def __init__(self, group: IntArray, count: int) -> None:
        group = np.where(group < 0, np.int64(count) + group, group)
        self._order = np.argsort(group, kind="stable")
        self._start = np.searchsorted(group[self._order], np.arange(count + 1))

    def __getitem__(self, index: int) -> IntArray:
        return self._order[self._start[index] : self._start[index + 1]]


class Moves:
    """`graph` has times of its own, equal to those of the graph given unless inside `moved`. `most_ns` is the furthest
    that any clock will be moved."""

    def __init__(self, graph: Graph, most_ns: int) -> None:
        a, s, n = graph.activity, graph.stop, len(graph.ranks)
        self.graph = replace(
            graph,
            activity=replace(
                a, start=a.start.copy(), end=a.end.copy(), call_start=a.call_start.copy(), call_end=a.call_end.copy()
            ),
            forward_start=graph.forward_start.copy(),
            control_send=graph.control_send.copy(),
            control_recv=graph.control_recv.copy(),
            control_done=graph.control_done.copy(),
            stop=replace(s, start=s.start.copy(), end=s.end.copy(), before=s.before.copy(), soon=s.soon.copy()),
            thread_begin=graph.thread_begin.copy(),
        )
        rank = graph.thread_rank
        self._threads, self._stops = Groups(rank, n), Groups(rank[s.thread], n)
        self._sent, self._received = Groups(rank[graph.control_src], n), Groups(rank[graph.control_dst], n)
        self._forwards = Groups(graph.forward_rank, n)
        self._commits = np.flatnonzero(s.kind == STOP_COMMIT)
        self._peers = Groups(rank[graph.control_dst[s.ref[self._commits]]], n)
        holds = find_holds(self.graph, 2 * most_ns)
        self._zero = holds.zero
        self._keep = np.zeros(s.end.size, dtype=np.bool_)
        self._keep[holds.rows] = True
        self._key = hold_key(s.thread, s.end, self._zero)

    @contextmanager
    def moved(self, ranks: Sequence[int], by: Sequence[int]) -> Generator[Holds, None, None]:
        """Within it `graph` has the clocks of `ranks` (by position) moved by that many ns. Gives what can hold then."""
        try:
            for rank, ns in zip(ranks, by, strict=True):
                self._move(rank, ns)
            self._settle(ranks)
            rows = np.flatnonzero(self._keep)
            yield Holds(rows, self._key[rows], self._zero)
        finally:
            for rank, ns in zip(ranks, by, strict=True):
                self._move(rank, -ns)
            self._settle(ranks)

    def _move(self, rank: int, by: int) -> None:
        g, a, s = self.graph, self.graph.activity, self.graph.stop
        here = a.of_rank(rank)
        a.start[here] += by
        a.end[here] += by
        called = a.call_start[here] != NEVER
        a.call_start[here] += np.where(called, by, 0)
        a.call_end[here] += np.where(called, by, 0)
        g.forward_start[self._forwards[rank]] += by
        g.control_send[self._sent[rank]] += by
        g.control_recv[self._received[rank]] += by
        g.control_done[self._received[rank]] += by
        g.thread_begin[self._threads[rank]] += by
        rows = self._stops[rank]
        s.start[rows] += by
        s.end[rows] += by
        s.before[rows] += by
        # Lags are between the two ends' clocks: the peer of a thread's commits is the same for all of them.
        s.soon[rows[s.kind[rows] == STOP_COMMIT]] += by
        s.soon[self._commits[self._peers[rank]]] -= by

    def _settle(self, ranks: Sequence[int]) -> None:
        """Keys and holding of every stop that the clocks of `ranks` matter for."""
        s = self.graph.stop
        for rank in ranks:
            rows = self._stops[rank]
            self._key[rows] = hold_key(s.thread[rows], s.end[rows], self._zero)
            commits = np.concatenate([rows[s.kind[rows] == STOP_COMMIT], self._commits[self._peers[rank]]])
            self._keep[commits] = held_commits(self.graph, commits)

"""The blame chain: from the end of a gap walk backwards through what each element truly had to wait for.

All chains advance in lock step, one link each a round, in arrays; the number of rounds is the length of the longest
chain. The rules are those of docs/concepts/attribution.md, section 4: at each element the predecessor that finished
last is taken; ties go to the lower rank, the lower stream, the earlier event.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traceana.arrays import narrow
from traceana.intervals import IntArray
from traceana.model.graph import NEVER, STOP_ALONE, STOP_COMMIT, STOP_RECEIVE, STOP_SYNC, Graph

__all__ = ["CAUSES", "ELEMENTS", "Holds", "Links", "find_holds", "held_commits", "hold_key", "walk"]

CAUSES = (
    "no_work", "upstream_compute", "downstream_backpressure", "p2p_transfer_wait", "control_message", "host_schedule",
    "host_launch", "host_sync", "launch_latency", "stream_dependency", "collective_late", "profiler", "ambiguous",
    "unknown",
)  # fmt: skip
CODE = {name: i for i, name in enumerate(CAUSES)}

# What a link is; `ref` indexes activities, forwards, messages, controls, threads or stops accordingly.
ELEMENTS = ("activity", "forward", "message", "control", "thread", "sync", "start", "end")
ACTIVITY, FORWARD, MESSAGE, CONTROL, THREAD, SYNC, START, END = range(8)

REASONS = (
    "", "no launch call for it in the trace", "its partner is not in the traces", "the message arrives before it is sent",
    "the thread's trace begins later", "the chain does not end",
)  # fmt: skip
_NO_CALL, _NO_PARTNER, _ACAUSAL, _BEFORE_TRACE, _ENDLESS = 1, 2, 3, 4, 5
_MAX_ROUNDS = 100_000
_MAX_STUCK = 1_000  # elements of one instant: impossible stamps can close a circle, in which no chain gets earlier


@dataclass(frozen=True, slots=True)
class Links:
    """Links of all chains: chain, link (0 at the gap's end, growing backwards), `[lo, hi)`, cause (index into CAUSES;
    for host threads only what kind of link it is tells more), root (position of the rank, -1 for none), element (index
    into ELEMENTS), ref, crossed (the token return lies between the gap and this link), reason (index into REASONS)."""

    chain: IntArray
    link: IntArray
    lo: IntArray
    hi: IntArray
    cause: IntArray
    root: IntArray
    element: IntArray
    ref: IntArray
    crossed: np.ndarray
    reason: IntArray

    def kept(self) -> Links:
        """The same in less memory."""
        whole = ("lo", "hi", "crossed")
        return Links(*(getattr(self, f) if f in whole else narrow(getattr(self, f)) for f in self.__slots__))


_DONE, _DEVICE, _INSIDE, _HOST = 0, 1, 2, 3


def held_commits(graph: Graph, rows: IntArray) -> np.ndarray:
    """Which of the stops `rows`, commits of gloo sends, held their thread.

    A commit returns once the message is taken. It was held if the peer posted its receive after the thread had come to
    the commit. If the message was in flight then, it was held if it returned as soon after the arrival as those that were
    surely held, and sooner than any free commit takes; where the receiver woke after the sender, if it took longer than
    commits do by themselves.
    """
    s = graph.stop
    posted, done = graph.control_recv[s.ref[rows]], graph.control_done[s.ref[rows]]
    before, end = s.before[rows], s.end[rows]
    late = posted > before
    arrived = (end >= done) & (end - done <= np.minimum(s.fastest[rows], s.soon[rows]))
    in_flight = (done > before) & (arrived | ((end < done) & (end - before > s.usual[rows])))
    held: np.ndarray = (before != NEVER) & (posted < end) & (late | in_flight)
    return held


@dataclass(frozen=True, slots=True)
class Holds:
    """The stops that can hold their thread under some clocks: their rows, and keys that sort by (thread, end)."""

    rows: IntArray
    key: IntArray
    zero: int


def find_holds(graph: Graph, margin_ns: int = 0) -> Holds:
    """Those of `graph`; its keys stay in order when stops come up to `margin_ns` earlier."""
    s = graph.stop
    keep = np.ones(s.end.size, dtype=np.bool_)
    commit = np.flatnonzero(s.kind == STOP_COMMIT)
    keep[commit] = held_commits(graph, commit)
    rows = np.flatnonzero(keep)
    zero = (int(s.end.min()) if s.end.size else 0) - 1 - margin_ns
    return Holds(rows, hold_key(s.thread[rows], s.end[rows], zero), zero)


def hold_key(thread: IntArray, time: IntArray, zero: int) -> IntArray:
    """What sorts by (thread, time), for times after `zero`; earlier ones come before every stop of their thread."""
    # 44 bits hold five hours in nanoseconds; a thread number goes above them.
    return (thread << 44) + np.clip(time - zero, 0, (1 << 44) - 1)


class _Walker:
    """State of the chains: mode, index (activity or thread), time reached, and what the chain has crossed."""

    def __init__(self, graph: Graph, head: IntArray, begin: IntArray, waiter: IntArray, holds: Holds) -> None:
        self.graph = graph
        self.holds = holds
        self.here = waiter.copy()
        self.seen: list[tuple[IntArray, IntArray]] = []
        n = head.size
        self.begin, self.waiter = begin, waiter
        self.mode = np.full(n, _DEVICE)
        self.index = head.copy()
        self.time = graph.activity.start[head].copy()
        self.crossed = np.zeros(n, dtype=np.bool_)
        self.blocked = np.zeros(n, dtype=np.bool_)
        self.link = np.zeros(n, dtype=np.int32)
        self.out: list[tuple[np.ndarray, ...]] = []

    def emit(
        self,
        chains: IntArray,
        lo: IntArray,
        cause: int | IntArray,
        root: IntArray,
        element: int,
        ref: IntArray,
        reason: int = 0,
    ) -> None:
        """One link `[lo, time)` for each chain, cut at the gap's start; the chain's time moves to lo."""
        hi = self.time[chains]
        lo = np.minimum(np.maximum(lo, self.begin[chains]), hi)
        some = hi > lo
        c = chains[some]
        full = np.full(c.size, cause, np.int8) if isinstance(cause, int) else cause[some].astype(np.int8)
        self.out.append(
            (c.astype(np.int32), self.link[c], lo[some], hi[some], full, root[some].astype(np.int32),
             np.full(c.size, element, np.int8), ref[some].astype(np.int32), self.crossed[c], np.full(c.size, reason, np.int8))
        )  # fmt: skip
        self.link[c] += 1
        self.time[chains] = lo

    def give_up(self, chains: IntArray, ref: IntArray, reason: int) -> None:
        """The rest of these chains is unknown."""
        if chains.size:
            self.emit(chains, self.begin[chains], CODE["unknown"], np.full(chains.size, -1), END, ref, reason)
            self.mode[chains] = _DONE

    def go(self, chains: IntArray, mode: int, index: IntArray, time: IntArray | None = None) -> None:
        """Continue these chains at another element."""
        self.mode[chains] = mode
        self.index[chains] = index
        if time is not None:
            self.time[chains] = np.minimum(time, self.time[chains])

    def device(self, chains: IntArray) -> None:
        """Why did an activity start when it did?"""
        a = self.graph.activity
        i = self.index[chains]
        start = a.start[i]
        previous, other = a.previous[i], a.other[i]
        e1 = np.where(previous >= 0, np.minimum(a.end[previous], start), NEVER)
        # Nodes of a graph after the first wait for the node before them only, also while the launch call is still open.
        node = (previous >= 0) & (a.call_start[previous] == a.call_start[i]) & (a.thread[previous] == a.thread[i])
        call = np.where(node | (a.call_start[i] == NEVER), NEVER, np.minimum(a.call_end[i], start))
        e3 = np.where(other >= 0, np.minimum(a.end[other], start), NEVER)
        best = np.maximum(np.maximum(e1, call), e3)
        lost = best == NEVER
        self.give_up(chains[lost], i[lost], _NO_CALL)
        by_stream = (e3 == best) & (e1 < best) & (call < best) & ~lost
        by_call = (call == best) & (e1 < best) & ~by_stream & ~lost
        by_same = ~by_stream & ~by_call & ~lost
        cause = np.where(by_stream, CODE["stream_dependency"], CODE["launch_latency"])
        live = ~lost
        self.emit(chains[live], best[live], cause[live], a.rank[i[live]], START, i[live])
        self.go(chains[by_stream], _INSIDE, other[by_stream])
        self.go(chains[by_same], _INSIDE, previous[by_same])
        self.go(chains[by_call], _HOST, a.thread[i[by_call]])

    def inside(self, chains: IntArray) -> None:
        """What was an activity doing until the time reached?"""
        g, a = self.graph, self.graph.activity
        j = self.index[chains]
        rank = a.rank[j]
        received, sent, forward = a.recv_of[j], a.send_of[j], a.forward[j]
        is_recv = received >= 0
        lone = (a.receives[j] & ~is_recv) | (a.sends[j] & (sent < 0))
        self.give_up(chains[lone], j[lone], _NO_PARTNER)
        chains, j, rank = chains[~lone], j[~lone], rank[~lone]
        received, sent, forward, is_recv = received[~lone], sent[~lone], forward[~lone], is_recv[~lone]
        is_send = (sent >= 0) & ~is_recv
        remote = (forward >= 0) & (rank != self.waiter[chains]) & ~is_recv & ~is_send
        rest = ~is_recv & ~is_send & ~remote
        if is_recv.any():
            c, m, me = chains[is_recv], received[is_recv], j[is_recv]
            peer = g.message_send[m]
            begun, mine = a.start[peer], a.start[me]
            bad = begun > self.time[c]
            self.give_up(c[bad], m[bad], _ACAUSAL)
            late = (begun > mine) & ~bad
            ok = ~bad
            self.emit(
                c[ok], np.where(late, begun, mine)[ok], CODE["p2p_transfer_wait"], a.rank[peer[ok]], MESSAGE, m[ok]
            )
            self.crossed[c[late]] |= g.message_token[m[late]]
            self.blocked[c[late]] = False
            self.go(c[late], _DEVICE, peer[late])
            self.go(c[ok & ~late], _DEVICE, me[ok & ~late])
        if is_send.any():
            c, m, me = chains[is_send], sent[is_send], j[is_send]
            peer = g.message_recv[m]
            held = (a.waits[me] > 0) & (a.start[peer] > a.start[me]) & (a.start[peer] <= self.time[c])
            lo = np.where(held, a.start[peer], a.start[me])
            self.emit(c, lo, CODE["p2p_transfer_wait"], a.rank[me], MESSAGE, m)
            self.blocked[c[held]] = True
            self.go(c, _DEVICE, np.where(held, peer, me))
        if remote.any():
            c, f = chains[remote], forward[remote]
            cause = np.where(self.blocked[c], CODE["downstream_backpressure"], CODE["upstream_compute"])
            self.emit(c, g.forward_start[f], cause, rank[remote], FORWARD, f)
            self.go(c, _DEVICE, g.forward_first[f])
        if rest.any():
            c, me, r = chains[rest], j[rest], rank[rest]
            own = r == self.waiter[c]
            away = np.where(self.blocked[c], CODE["downstream_backpressure"], CODE["upstream_compute"])
            self.emit(c, a.start[me], np.where(own, CODE["stream_dependency"], away), r, ACTIVITY, me)
            self.go(c, _DEVICE, me)

    def host(self, chains: IntArray) -> None:
        """What held a host thread before the time reached?"""
        g, s = self.graph, self.graph.stop
        thread = self.index[chains]
        holds = self.holds
        at = np.searchsorted(holds.key, hold_key(thread, self.time[chains], holds.zero), side="right") - 1
        row = holds.rows[np.maximum(at, 0)] if holds.rows.size else np.zeros(at.size, dtype=np.int64)
        found = (at >= 0) & (s.thread[row] == thread) if holds.rows.size else np.zeros(at.size, dtype=np.bool_)
        begun = g.thread_begin[thread]
        floor = np.where(found, np.where(found, s.end[row] if row.size and s.end.size else 0, 0), begun)
        root = g.thread_rank[thread]
        self.emit(chains, np.minimum(floor, self.time[chains]), CODE["host_schedule"], root, THREAD, thread)
        alone = ~found
        self.give_up(chains[alone], thread[alone], _BEFORE_TRACE)
        c, row = chains[found], row[found]
        alive = self.time[c] > self.begin[c]
        self.mode[c[~alive]] = _DONE
        c, row = c[alive], row[alive]
        kind, ref = s.kind[row], s.ref[row]
        pick = kind == STOP_RECEIVE
        if pick.any():
            k, m, r = c[pick], ref[pick], row[pick]
            sent, posted = g.control_send[m], s.start[r]
            bad = sent > self.time[k]
            self.give_up(k[bad], m[bad], _ACAUSAL)
            late = (sent > posted) & ~bad
            ok = ~bad
            self.emit(
                k[ok],
                np.maximum(sent, posted)[ok],
                CODE["control_message"],
                g.thread_rank[g.control_src[m[ok]]],
                CONTROL,
                m[ok],
            )
            self.crossed[k[late]] |= g.control_token[m[late]]
            self.blocked[k[late]] = False
            self.go(k[late], _HOST, g.control_src[m[late]])
        pick = kind == STOP_ALONE
        self.give_up(c[pick], row[pick], _NO_PARTNER)
        pick = kind == STOP_COMMIT
        if pick.any():
            k, m = c[pick], ref[pick]
            self.emit(k, g.control_recv[m], CODE["control_message"], g.thread_rank[g.control_src[m]], CONTROL, m)
            self.blocked[k] = True
            self.go(k, _HOST, g.control_dst[m])
        pick = kind == STOP_SYNC
        if pick.any():
            k, j, r = c[pick], ref[pick], row[pick]
            self.emit(k, g.activity.end[j], CODE["host_sync"], g.activity.rank[j], SYNC, r)
            self.go(k, _INSIDE, j)

    def note(self, chains: IntArray) -> None:
        """Remember which ranks these chains have come to."""
        chains = chains[self.mode[chains] != _DONE]  # one that was given up has not gone anywhere
        host = self.mode[chains] == _HOST
        index = self.index[chains]
        now = self.graph.activity.rank[np.where(host, 0, index)]
        if host.any():
            now = np.where(host, self.graph.thread_rank[np.where(host, index, 0)], now)
        new = now != self.here[chains]
        self.seen.append((chains[new], now[new]))
        self.here[chains] = now

    def run(self) -> Links:
        """Walk until every chain has reached its gap's start."""
        stuck, reached = np.zeros(self.time.size, dtype=np.int64), self.time + 1
        for _ in range(_MAX_ROUNDS):
            self.mode[(self.time <= self.begin)] = _DONE
            active = np.flatnonzero(self.mode != _DONE)
            if active.size == 0:
                break
            stuck[active] = np.where(self.time[active] < reached[active], 0, stuck[active] + 1)
            reached[active] = self.time[active]
            circling = active[stuck[active] > _MAX_STUCK]
            if circling.size:
                self.give_up(circling, self.index[circling], _ENDLESS)
                continue
            mode = self.mode[active]
            for value, step in ((_DEVICE, self.device), (_INSIDE, self.inside), (_HOST, self.host)):
                chains = active[mode == value]
                if chains.size:
                    step(chains)
            self.note(active)
        else:
            active = np.flatnonzero(self.mode != _DONE)
            self.give_up(active, self.index[active], _ENDLESS)
        if not self.out:
            none = np.zeros(0, dtype=np.int64)
            return Links(none, none, none, none, none, none, none, none, np.zeros(0, dtype=np.bool_), none)
        order = np.argsort(np.concatenate([o[0] for o in self.out]), kind="stable")  # those of a chain are in order
        return Links(*(np.concatenate([o[k] for o in self.out])[order] for k in range(10)))


def walk(
    graph: Graph, head: IntArray, begin: IntArray, holds: Holds | None = None
) -> tuple[Links, tuple[IntArray, IntArray]]:
    """Chains of the gaps that end where the activities `head` start and begin at `begin` (trace time of `graph`), and
    which ranks they came to: chain and rank, the waiter's own not among them. `holds` are those of `graph`."""
    walker = _Walker(graph, head, begin, graph.activity.rank[head], holds or find_holds(graph))
    links = walker.run()
    none = np.zeros(0, dtype=np.int64)
    chains, ranks = (np.concatenate([none, *(part[k] for part in walker.seen)]) for k in (0, 1))
    return links, (chains, ranks)

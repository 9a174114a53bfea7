"""Bubbles cut into stretches with one cause each: chains, host phases and clock uncertainty put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from traceana import schema
from traceana.arrays import distinct
from traceana.intervals import IntArray, Intervals, intersect_pairs, subtract, union
from traceana.model.chain import (
    CAUSES,
    CODE,
    CONTROL,
    FORWARD,
    MESSAGE,
    REASONS,
    THREAD,
    Holds,
    Links,
    find_holds,
    walk,
)
from traceana.model.doubt import other_clocks, room_between, unsure_edges
from traceana.model.gaps import Gaps, find_gaps
from traceana.model.graph import Graph, build_graph
from traceana.model.kernel_classes import is_communication
from traceana.model.moves import Groups, Moves
from traceana.model.phases import host_phases
from traceana.model.states import DeviceStates
from traceana.model.trace import Trace

__all__ = ["Blame", "blame"]

_CHAINS_AT_A_TIME = 1 << 17


@dataclass(frozen=True, slots=True)
class Blame:
    """`attribution` (ATTRIBUTION) tiles every rank's bubble; `links` are the whole chains it was cut from, `graph` what
    they refer to. `bounds` gives, per rank and cause, the least and most nanoseconds over the clocks tried.
    `first_gap` is the number of the first chain of each rank: chain = first_gap[position of rank] + gap. `phases` are the host phases of each rank, by position."""

    attribution: pl.DataFrame
    links: Links
    graph: Graph
    bounds: pl.DataFrame
    first_gap: tuple[int, ...]
    phases: tuple[pl.DataFrame, ...]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Stretches of bubbles on the waiter's own clock, in arrays; `detail` and `visit` of host phases come along."""

    rank: IntArray
    lo: IntArray
    hi: IntArray
    cause: IntArray
    root: IntArray
    crossed: np.ndarray
    gap: IntArray
    link: IntArray
    element: IntArray
    ref: IntArray
    reason: IntArray
    phase: IntArray

    def take(self, rows: IntArray | np.ndarray, **changed: IntArray) -> _Pieces:
        """The given rows, with some columns changed."""
        columns: dict[str, Any] = {f: changed.get(f, getattr(self, f)[rows]) for f in self.__slots__}
        return _Pieces(**columns)


def _joined(parts: Sequence[_Pieces]) -> _Pieces:
    if len(parts) == 1:
        return parts[0]
    return _Pieces(*(np.concatenate([getattr(p, f) for p in parts]) for f in _Pieces.__slots__))


def _in_order(parts: Sequence[_Pieces]) -> _Pieces:
    """All pieces by rank and time."""
    order = np.lexsort([np.concatenate([getattr(p, f) for p in parts]) for f in ("lo", "rank")])
    return _Pieces(*(np.concatenate([getattr(p, f) for p in parts])[order] for f in _Pieces.__slots__))


class _Blamer:
    def __init__(self, trace: Trace, states: Mapping[int, DeviceStates]) -> None:
        self.trace = trace
        self.states = states
        self.phases = [host_phases(r, trace.visits.filter(pl.col("rank") == r.info.rank)) for r in trace.capture.ranks]
        self.graph = build_graph(trace, self.phases)
        codes = {**CODE}
        self.phase_cause = [
            p.get_column("cause").replace_strict(codes, return_dtype=pl.Int64).to_numpy() for p in self.phases
        ]
        flags = [r.device.get_column("name").cast(pl.String).unique().to_list() for r in trace.capture.ranks]
        nccl = {n for names in flags for n in names if is_communication(n)}
        communication = (
            np.concatenate(
                [r.device.get_column("name").cast(pl.String).is_in(list(nccl)).to_numpy() for r in trace.capture.ranks]
            )
            if trace.capture.ranks
            else np.zeros(0, dtype=np.bool_)
        )
        # A collective that waits for its last rank needs no chain, and what comes before it ends at its start.
        self.labels = [_spans(states[r].labels) for r in trace.ranks]
        self.idle = [subtract(states[r].bubbles, label) for r, label in zip(trace.ranks, self.labels, strict=True)]
        self.gaps: list[Gaps] = [find_gaps(self.graph, i, idle, communication) for i, idle in enumerate(self.idle)]
        self.head = np.concatenate([g.head for g in self.gaps])
        self.begin = np.concatenate([g.begin for g in self.gaps])
        self.first = np.cumsum([0, *(g.head.size for g in self.gaps)])
        self.waiter = self.graph.activity.rank[self.head]
        self.idle_gap = [
            np.where(g.of_idle >= 0, g.of_idle + first, -1) for g, first in zip(self.gaps, self.first[:-1], strict=True)
        ]
        self.u = np.array([trace.uncertainty_ns.get(r) or 0 for r in trace.ranks], dtype=np.int64)
        self.room = room_between(self.graph)
        self.edges: list[Intervals] = []  # where other ranks' clocks leave an edge open, by rank
        self.at = {rank: position for position, rank in enumerate(trace.ranks)}

    def settled(self) -> tuple[list[_Pieces], Links, tuple[IntArray, IntArray]]:
        """All bubbles of each rank in pieces, all chains, and which ranks each chain came to (chain and rank)."""
        n = len(self.trace.ranks)
        holds = find_holds(self.graph)
        pieces: list[_Pieces] = []
        chains: list[Links] = []
        seen: list[tuple[IntArray, IntArray]] = []
        first = 0
        while first < n or not chains:  # so many ranks at a time that what the walk needs stays small
            most = self.first[first] + _CHAINS_AT_A_TIME
            last = min(max(int(np.searchsorted(self.first, most, side="right")) - 1, first + 1), n)
            which = np.arange(self.first[first], self.first[last])
            links, (chain, rank) = walk(self.graph, self.head[which], self.begin[which], holds)
            links = replace(links, chain=which[links.chain])
            chains.append(links)
            seen.append((which[chain], rank))
            bounds = np.searchsorted(links.chain, self.first[first : last + 1])
            for i in range(first, last):
                own = Links(*(getattr(links, f)[bounds[i - first] : bounds[i - first + 1]] for f in Links.__slots__))
                cut = self._in_phases(own, np.zeros(n, dtype=np.int64))
                if self.u.any():
                    self.edges.append(unsure_edges(i, cut.gap, cut.lo, cut.hi, cut.cause, cut.root, self.u, self.room))
                pieces.append(_in_order([*self._in_bubbles(cut, i), *self._without_chain(i)]))
            first = last
        every = Links(*(np.concatenate([getattr(c, f) for c in chains]) for f in Links.__slots__))
        waits = np.arange(self.head.size), self.waiter
        touched = [np.concatenate([waits[k], *(s[k] for s in seen)]) for k in (0, 1)]
        return pieces, every, (touched[0], touched[1])

    def moved(self, graph: Graph, holds: Holds, chains: IntArray, shift: IntArray) -> dict[int, _Pieces]:
        """The bubbles of `chains` in pieces, by waiting rank, on the waiters' own (unmoved) clocks; `graph` has clocks
        moved by `shift`."""
        waiter = self.waiter[chains]
        links, _ = walk(graph, self.head[chains], self.begin[chains] + shift[waiter], holds)
        every = self._in_phases(replace(links, chain=chains[links.chain]), shift)
        return {i: _in_order(self._in_bubbles(every, i)) for i in distinct(every.rank).tolist()}

    def _in_phases(self, links: Links, shift: IntArray) -> _Pieces:
        """`links` as pieces on the waiters' own clocks, those of host threads cut by what the host did."""
        graph, waiter = self.graph, self.waiter
        base = _Pieces(
            rank=waiter[links.chain], lo=links.lo, hi=links.hi, cause=links.cause, root=links.root, crossed=links.crossed,
            gap=links.chain, link=links.link, element=links.element, ref=links.ref, reason=links.reason,
            phase=np.full(links.chain.size, -1, dtype=np.int64),
        )  # fmt: skip
        host = base.element == THREAD
        parts: list[_Pieces] = []
        parts.append(base.take(np.flatnonzero(~host)) if host.any() else base)
        held = np.flatnonzero(host)
        thread_rank = graph.thread_rank[base.ref[held]]
        for i in distinct(thread_rank).tolist():
            phases, rows = self.phases[i], held[thread_rank == i]
            on_main = graph.main[i] == base.ref[rows]
            spans = Intervals(
                phases.get_column("ts_ns").to_numpy() + shift[i], phases.get_column("end_ns").to_numpy() + shift[i]
            )
            known = rows[on_main]
            a, b, over = intersect_pairs(Intervals(base.lo[known], base.hi[known]), spans)
            parts.append(base.take(known[a], lo=over.start, hi=over.end, cause=self.phase_cause[i][b], phase=b))
            # What no phase covers, and what other threads do, the trace does not tell.
            rest, left = _uncovered(Intervals(base.lo[known], base.hi[known]), spans)
            rest, left = (
                np.concatenate([known[rest], rows[~on_main]]),
                Intervals(
                    np.concatenate([left.start, base.lo[rows[~on_main]]]),
                    np.concatenate([left.end, base.hi[rows[~on_main]]]),
                ),
            )
            parts.append(
                base.take(
                    rest,
                    lo=left.start,
                    hi=left.end,
                    cause=np.full(rest.size, CODE["unknown"]),
                    root=np.full(rest.size, -1),
                )
            )
        every = _joined(parts)
        back = shift[every.rank]
        return replace(every, lo=every.lo - back, hi=every.hi - back)

    def _in_bubbles(self, every: _Pieces, rank: int) -> list[_Pieces]:
        """What of the pieces lies in the idle intervals of `rank`, each in its own gap."""
        idle = self.idle[rank]
        rows = np.flatnonzero(every.rank == rank)
        a, b, over = intersect_pairs(Intervals(every.lo[rows], every.hi[rows]), idle)
        same = every.gap[rows[a]] == self.idle_gap[rank][b]
        return [every.take(rows[a[same]], lo=over.start[same], hi=over.end[same])]

    def _without_chain(self, rank: int) -> list[_Pieces]:
        """The stretches of the bubbles of `rank` that need no chain."""
        idle, label = self.idle[rank], self.labels[rank]
        nothing = self.idle_gap[rank] < 0
        out = [self._plain(rank, Intervals(idle.start[nothing], idle.end[nothing]), CODE["unknown"])]
        if label.start.size:
            labels = self.states[self.trace.ranks[rank]].labels
            causes = labels.get_column("cause").replace_strict(CODE, return_dtype=pl.Int64).to_numpy()
            said = labels.get_column("root_rank").cast(pl.Int64)
            roots = said.replace_strict(self.at, default=-1, return_dtype=pl.Int64).fill_null(-1).to_numpy()
            plain, rows = self._plain(rank, label, causes), np.arange(label.start.size)
            out.append(plain.take(rows, root=roots, ref=rows, element=np.full(rows.size, -2)))
        return out

    def _plain(self, rank: int, spans: Intervals, cause: int | IntArray) -> _Pieces:
        n = spans.start.size
        minus = np.full(n, -1, dtype=np.int64)
        code = np.full(n, cause) if isinstance(cause, int) else cause
        return _Pieces(
            rank=np.full(n, rank), lo=spans.start, hi=spans.end, cause=code, root=minus, crossed=np.zeros(n, dtype=np.bool_),
            gap=minus, link=np.zeros(n, dtype=np.int64), element=minus, ref=minus, reason=np.zeros(n, dtype=np.int64), phase=minus,
        )  # fmt: skip


def _spans(frame: pl.DataFrame) -> Intervals:
    return Intervals(frame.get_column("ts_ns").to_numpy(), frame.get_column("end_ns").to_numpy())


def _uncovered(a: Intervals, b: Intervals) -> tuple[IntArray, Intervals]:
    """What of each interval of `a` the set `b` does not cover: index into `a`, and the rest."""
    lo, hi = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    outside = Intervals(np.concatenate(([lo], b.end)), np.concatenate((b.start, [hi])))
    index, _, over = intersect_pairs(a, outside)
    return index, over


def _disagreement(base: _Pieces, other: _Pieces) -> Intervals:
    """The nanoseconds whose cause or root differs between two tilings of the same bubbles of one rank."""
    a, b, over = intersect_pairs(Intervals(base.lo, base.hi), Intervals(other.lo, other.hi))
    differs = (base.cause[a] != other.cause[b]) | (base.root[a] != other.root[b])
    return Intervals(over.start[differs], over.end[differs])


def blame(
    trace: Trace, states: Mapping[int, DeviceStates], progress: Callable[[str, int, int], None] | None = None
) -> Blame:
    """The attribution of every bubble of `trace`. `progress` is told how many ranks' clocks were tried, and of how many.

    The clocks are moved within their uncertainty (`other_clocks`); nanoseconds whose cause or root is not the same
    under all of them are `ambiguous`, and so are those around edges that other ranks make.
    """
    blamer = _Blamer(trace, states)
    n = len(trace.ranks)
    base, links, touched = blamer.settled()
    tally = np.stack([_tally(p) for p in base]) if base else np.zeros((0, len(CAUSES)), dtype=np.int64)
    low, high = tally.copy(), tally.copy()
    doubt: list[list[Intervals]] = [[] for _ in range(n)]
    others = other_clocks(blamer.u, blamer.room)
    affected = _Affected(blamer, links, touched) if others else None
    moves = Moves(blamer.graph, max(abs(by) for _, ns in others for by in ns)) if others else None
    for done, (ranks, by) in enumerate(others):
        if progress is not None:
            progress("try other clocks", done, len(others))
        assert affected is not None
        assert moves is not None
        chains = affected.by(ranks)
        if not chains.size:
            continue
        shift = np.zeros(n, dtype=np.int64)
        shift[list(ranks)] = by
        chosen = np.zeros(blamer.head.size + 1, dtype=np.bool_)  # the last one stands for no chain
        chosen[chains] = True
        with moves.moved(ranks, by) as holds:
            found = blamer.moved(moves.graph, holds, chains, shift)
        for i in distinct(blamer.waiter[chains]).tolist():
            before = base[i].take(np.flatnonzero(chosen[base[i].gap]))
            after = found.get(i) or before.take(np.zeros(0, dtype=np.int64))
            then = tally[i] - _tally(before) + _tally(after)
            low[i], high[i] = np.minimum(low[i], then), np.maximum(high[i], then)
            doubt[i].append(_disagreement(before, after))
    for i, spans_of in enumerate(blamer.edges):
        doubt[i].append(spans_of)
    forwards = _Forwards(trace, blamer.graph)
    frames = []
    for spans in doubt:
        pieces = base.pop(0)  # its memory is needed for the table
        marked = _mark_ambiguous(pieces, spans) if spans else pieces
        frames.append(_frame(blamer, forwards.split(marked)))
    return Blame(
        pl.concat(frames) if frames else schema.ATTRIBUTION.empty(),
        links,
        blamer.graph,
        _bounds(low, high, trace),
        tuple(int(x) for x in blamer.first[:-1]),
        tuple(blamer.phases),
    )


class _Affected:
    """Which chains the clocks of some ranks matter for: of those that a clock can change at all, the ones that came to
    one of these ranks, or to one that exchanges messages with them (where the walk compares the two)."""

    def __init__(self, blamer: _Blamer, links: Links, touched: tuple[IntArray, IntArray]) -> None:
        graph, n = blamer.graph, len(blamer.trace.ranks)
        rank = graph.activity.rank
        sides = [rank[graph.message_send], graph.thread_rank[graph.control_src]]
        peers = [rank[graph.message_recv], graph.thread_rank[graph.control_dst]]
        a, b = np.concatenate(sides), np.concatenate(peers)
        pairs = distinct(np.concatenate((a * n + b, b * n + a)))
        self._next = Groups(pairs // n, n)
        self._peer = pairs % n
        open_chains = np.zeros(blamer.head.size, dtype=np.bool_)
        open_chains[_clock_bound(links, graph, blamer.head)] = True
        chain, came = touched
        kept = open_chains[chain]
        self._chain, self._came = chain[kept], Groups(came[kept], n)

    def by(self, ranks: Sequence[int]) -> IntArray:
        """The chains, in order."""
        near = distinct(np.concatenate([np.array(ranks), *(self._peer[self._next[r]] for r in ranks)]))
        return distinct(np.concatenate([self._chain[self._came[int(r)]] for r in near]))


def _clock_bound(links: Links, graph: Graph, head: IntArray) -> IntArray:
    """Chains that a clock can change: those with a message, with a host thread (whose commits compare clocks), or with
    anything on another rank. Most chains are gaps inside CUDA graphs and have none of it."""
    bound = np.isin(links.element, (MESSAGE, CONTROL)) | (links.root != graph.activity.rank[head[links.chain]])
    if graph.control_send.size:
        bound |= links.element == THREAD
    return distinct(links.chain[bound])


def _tally(pieces: _Pieces) -> IntArray:
    """Nanoseconds of each cause."""
    out = np.zeros(len(CAUSES), dtype=np.int64)
    np.add.at(out, pieces.cause, pieces.hi - pieces.lo)
    return out


def _bounds(low: IntArray, high: IntArray, trace: Trace) -> pl.DataFrame:
    rows = [
        {"rank": r, "cause": cause, "low_ns": int(low[i, k]), "high_ns": int(high[i, k])}
        for i, r in enumerate(trace.ranks)
        for k, cause in enumerate(CAUSES)
        if high[i, k]
    ]
    return pl.DataFrame(rows, schema={"rank": pl.Int32, "cause": pl.String, "low_ns": pl.Int64, "high_ns": pl.Int64})


def _mark_ambiguous(base: _Pieces, doubt: Sequence[Intervals]) -> _Pieces:
    """The pieces of one rank, those stretches of them that are in doubt as ambiguous."""
    marked = union(np.concatenate([s.start for s in doubt]), np.concatenate([s.end for s in doubt]))
    mine = Intervals(base.lo, base.hi)
    keep, left = _uncovered(mine, marked)
    rows, _, over = intersect_pairs(mine, marked)
    m = rows.size
    return _in_order(
        [
            base.take(keep, lo=left.start, hi=left.end),
            base.take(
                rows, lo=over.start, hi=over.end, cause=np.full(m, CODE["ambiguous"]), root=np.full(m, -1),
                element=np.where(base.cause[rows] == CODE["ambiguous"], base.element[rows], -3),
            ),
        ]
    )  # fmt: skip


_PARTS = ("serial", "structural", "workload")


class _Forwards:
    """Cuts stretches of `upstream_compute` in another stage's forward into serial, structural and workload, exactly.

    A stage's baseline is the median duration of its forwards of the capture's commonest mode. Structural is how far the
    baseline lies above the fastest stage's; workload how far this forward lies above its stage's baseline; serial the
    rest: it has to pass through. They are laid out in the order serial, structural, workload from the forward's start,
    so a gap that opens within the forward loses serial time first.
    """

    def __init__(self, trace: Trace, graph: Graph) -> None:
        ns = (pl.col("end_ns") - pl.col("ts_ns")).alias("ns")
        forwards = trace.forwards.sort("rank", "visit").with_columns(ns)
        mode = forwards.get_column("mode").mode().sort()
        common = forwards.filter(pl.col("mode").eq_missing(pl.lit(mode[0] if mode.len() else None, dtype=pl.String)))
        base = {int(r): int(v) for r, v in common.group_by("rank").agg(pl.col("ns").quantile(0.5, "lower")).iter_rows()}
        fastest = min(base.values(), default=0)
        self._first, self._took = graph.forward_start, forwards.get_column("ns").to_numpy()
        baseline = np.array([base.get(int(r), fastest) for r in forwards.get_column("rank")], dtype=np.int64)
        self._workload = np.maximum(self._took - baseline, 0)
        self._structural = np.minimum(baseline - fastest, self._took - self._workload)

    def split(self, p: _Pieces) -> _Pieces:
        """The pieces of one rank, in order, with those stretches cut."""
        chosen = (p.cause == CODE["upstream_compute"]) & (p.element == FORWARD)
        rows = np.flatnonzero(chosen)
        if rows.size == 0:
            return p
        f = p.ref[rows]
        first, took, workload = self._first[f], self._took[f], self._workload[f]
        cuts = [first, first + (took - workload - self._structural[f]), first + (took - workload), first + took]
        cuts[0] = np.minimum(cuts[0], p.lo[rows])
        cuts[3] = np.maximum(cuts[3], p.hi[rows])
        out = [p.take(np.flatnonzero(~chosen))]
        for part in range(3):
            lo, hi = np.maximum(p.lo[rows], cuts[part]), np.minimum(p.hi[rows], cuts[part + 1])
            some = hi > lo
            out.append(p.take(rows[some], lo=lo[some], hi=hi[some], phase=np.full(int(some.sum()), part)))
        return _in_order(out)


_EMPTY = ("slot_empty_queue_unknown", "slot_empty_requests_waiting", "slot_empty_all_admitted", "queue_empty")


def _empty_slots(trace: Trace, rank: int) -> IntArray:
    """Why each visit of a rank that holds no batch holds none, as an index into _EMPTY, by number of the visit.

    Whether requests wait the server says (log, metrics); a trace alone cannot tell. Where none waits, either all have
    been admitted and run in other slots, or there is no request at all: then none of the slots visited in the round
    before held a batch.
    """
    visits = trace.visits.filter(pl.col("rank") == rank).sort("visit")
    number = visits.get_column("visit").to_numpy()
    size = int(number.max(initial=-1)) + 1
    facts = trace.capture.server.facts if trace.capture.server is not None else {}
    queue = facts.get("queue")
    waiting = queue.get("p50") if isinstance(queue, dict) else None
    if not isinstance(waiting, int | float):
        return np.full(size, 0)
    if waiting > 0:
        return np.full(size, 1)
    holds = np.zeros(size, dtype=np.bool_)
    holds[number] = visits.get_column("run_ts_ns").is_not_null().to_numpy()
    latest = np.maximum.accumulate(np.where(holds, np.arange(size), -1))
    slots = trace.slots or max(trace.topology.pp_size, 1)
    # Of a round that began before the trace nothing is known but what comes next.
    follows = np.append(np.flatnonzero(holds), size)
    early = follows[np.searchsorted(follows, np.arange(size))] - np.arange(size) < slots
    since = np.arange(size) - latest
    active = np.where(latest >= 0, since < slots, (np.arange(size) < slots - 1) & early)
    return np.where(active, 2, 3)


def _frame(blamer: _Blamer, p: _Pieces) -> pl.DataFrame:
    """Pieces as ATTRIBUTION rows; details in words."""
    trace, graph = blamer.trace, blamer.graph
    n = p.lo.size
    texts: list[str | None] = [None]
    detail = np.zeros(n, dtype=np.int64)  # which of the texts

    def say(rows: np.ndarray, words: Sequence[str | None], which: IntArray | int) -> None:
        detail[rows] = len(texts) + which
        texts.extend(words)

    hosts = np.flatnonzero((p.phase >= 0) & (p.element == THREAD))
    for i in distinct(p.root[hosts]).tolist():
        rows = hosts[p.root[hosts] == i]
        say(rows, blamer.phases[i].get_column("detail").to_list() if i >= 0 else [None], p.phase[rows])
    split = np.flatnonzero((p.element == FORWARD) & (p.phase >= 0))
    say(split, _PARTS, p.phase[split])
    for i in distinct(p.root[hosts]).tolist():
        rows = hosts[(p.root[hosts] == i) & (p.cause[hosts] == CODE["no_work"])]
        if rows.size and i >= 0:
            visits = blamer.phases[i].get_column("visit").to_numpy()[p.phase[rows]]
            say(rows, _EMPTY, _empty_slots(trace, trace.ranks[i])[visits])
    unknown = p.cause == CODE["unknown"]
    said = unknown & (p.reason > 0)
    say(said, REASONS, p.reason[said])
    say(unknown & (p.reason == 0) & (p.element == THREAD), ["no scheduler span says what the host does"], 0)
    say(unknown & (p.gap < 0) & (p.element == -1), ["nothing in the trace ends this gap"], 0)
    labels = np.flatnonzero(p.element == -2)
    for i in distinct(p.rank[labels]).tolist():
        rows = labels[p.rank[labels] == i]
        if rows.size:
            say(rows, blamer.states[trace.ranks[i]].labels.get_column("detail").to_list(), p.ref[rows])
    say(p.element == -3, ["the clocks cannot tell"], 0)
    visit = np.full(n, -1, dtype=np.int64)
    has = p.gap >= 0
    forward = graph.activity.forward[blamer.head[np.maximum(p.gap, 0)]] if blamer.head.size else np.full(n, -1)
    known = has & (forward >= 0)
    if graph.forward_visit.size:
        visit[known] = graph.forward_visit[forward[known]]
    ranks = np.array(trace.ranks, dtype=np.int64)
    roots = np.append(ranks, -1)[p.root]
    gap = np.where(has, p.gap - blamer.first[p.rank], -1)
    frame = pl.DataFrame(
        {
            "rank": ranks[p.rank], "ts_ns": p.lo, "end_ns": p.hi, "cause": pl.Series(CAUSES)[p.cause],
            "root_rank": roots, "detail": pl.Series(texts, dtype=pl.String)[detail], "crossed_token_return": p.crossed, "visit": visit,
            "gap": gap, "chain": p.link, "element": p.element, "ref": p.ref,
        }
    ).with_columns(
        pl.when(pl.col("root_rank") >= 0).then(pl.col("root_rank")).alias("root_rank"),
        pl.when(pl.col("visit") >= 0).then(pl.col("visit")).alias("visit"),
    )  # fmt: skip
    return schema.ATTRIBUTION.frame(frame)

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
from traceana.model.chain import CAUSES, CODE, CONTROL, FORWARD, MESSAGE, REASONS, THREAD, Links, walk
from traceana.model.gaps import Gaps, find_gaps
from traceana.model.graph import Graph, build_graph
from traceana.model.kernel_classes import is_communication
from traceana.model.phases import host_phases
from traceana.model.states import DeviceStates
from traceana.model.trace import Trace

__all__ = ["Blame", "blame"]


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


# Up to so many ranks each one's clock is also tried alone; of more, the time for it would grow with their square.
_FEW = 8


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

    def pieces(self, shift: IntArray, chains: IntArray | None = None) -> tuple[_Pieces, Links]:
        """All bubbles, or those of some chains, in pieces under clocks moved by `shift`, on the waiters' own (unmoved)
        clocks. Some chains come without the stretches that need none."""
        graph = self.graph.shifted(shift)
        which = np.arange(self.head.size) if chains is None else chains
        waiter = self.graph.activity.rank[self.head]
        links = walk(graph, self.head[which], (self.begin + shift[waiter])[which])
        links = replace(links, chain=which[links.chain])
        parts: list[_Pieces] = []
        base = _Pieces(
            rank=waiter[links.chain], lo=links.lo, hi=links.hi, cause=links.cause, root=links.root, crossed=links.crossed,
            gap=links.chain, link=links.link, element=links.element, ref=links.ref, reason=links.reason,
            phase=np.full(links.chain.size, -1, dtype=np.int64),
        )  # fmt: skip
        host = base.element == THREAD
        parts.append(base.take(np.flatnonzero(~host)) if host.any() else base)
        thread_rank = np.append(graph.thread_rank, -1)[np.where(host, base.ref, -1)]
        for i, phases in enumerate(self.phases):
            rows = np.flatnonzero(host & (thread_rank == i))
            if rows.size == 0:
                continue
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
        every = replace(every, lo=every.lo - back, hi=every.hi - back)
        return self._in_bubbles(every, whole=chains is None), links

    def _in_bubbles(self, every: _Pieces, *, whole: bool) -> _Pieces:
        """Cut to the idle intervals; if `whole`, with the stretches that need no chain."""
        out: list[_Pieces] = []
        for i, r in enumerate(self.trace.ranks):
            state = self.states[r]
            labels, label, idle = state.labels, self.labels[i], self.idle[i]
            idle_gap = np.where(self.gaps[i].of_idle >= 0, self.gaps[i].of_idle + self.first[i], -1)
            rows = np.flatnonzero(every.rank == i)
            a, b, over = intersect_pairs(Intervals(every.lo[rows], every.hi[rows]), idle)
            same = every.gap[rows[a]] == idle_gap[b]
            cut = every.take(rows[a[same]], lo=over.start[same], hi=over.end[same])
            out.append(cut)
            if not whole:
                continue
            nothing = idle_gap < 0
            out.append(self._plain(i, Intervals(idle.start[nothing], idle.end[nothing]), CODE["unknown"]))
            if label.start.size:
                causes = labels.get_column("cause").replace_strict(CODE, return_dtype=pl.Int64).to_numpy()
                at = {rank: k for k, rank in enumerate(self.trace.ranks)}
                roots = (
                    labels.get_column("root_rank")
                    .cast(pl.Int64)
                    .replace_strict(at, default=-1, return_dtype=pl.Int64)
                    .fill_null(-1)
                    .to_numpy()
                )
                plain = self._plain(i, label, causes)
                out.append(
                    plain.take(
                        np.arange(label.start.size),
                        root=roots,
                        ref=np.arange(label.start.size),
                        element=np.full(label.start.size, -2),
                    )
                )
        return _in_order(out)

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


def _disagreement(base: _Pieces, other: _Pieces, ranks: int) -> list[Intervals]:
    """Per rank the nanoseconds whose cause or root differs between two tilings of the same bubbles."""
    out: list[Intervals] = []
    for i in range(ranks):
        p, q = np.flatnonzero(base.rank == i), np.flatnonzero(other.rank == i)
        a, b, over = intersect_pairs(Intervals(base.lo[p], base.hi[p]), Intervals(other.lo[q], other.hi[q]))
        differs = (base.cause[p[a]] != other.cause[q[b]]) | (base.root[p[a]] != other.root[q[b]])
        out.append(Intervals(over.start[differs], over.end[differs]))
    return out


def blame(
    trace: Trace, states: Mapping[int, DeviceStates], progress: Callable[[str, int, int], None] | None = None
) -> Blame:
    """The attribution of every bubble of `trace`. `progress` is told how many ranks' clocks were tried, and of how many.

    The clocks are moved within their uncertainty (`_other_clocks`); nanoseconds whose cause or root is not the same
    under all of them are `ambiguous`.
    """
    blamer = _Blamer(trace, states)
    n = len(trace.ranks)
    zero = np.zeros(n, dtype=np.int64)
    base, links = blamer.pieces(zero)
    doubt: list[list[Intervals]] = [[] for _ in range(n)]
    tallies = [_tally(base, n)]
    open_chains = _clock_bound(links, blamer.graph, blamer.head)
    settled = _tally(base.take(~np.isin(base.gap, open_chains)), n)
    others = _other_clocks(trace) if open_chains.size else []
    for done, shift in enumerate(others):
        if progress is not None:
            progress("try other clocks", done, len(others))
        moved, _ = blamer.pieces(shift, open_chains)
        tallies.append(settled + _tally(moved, n))
        for k, spans in enumerate(_disagreement(base, moved, n)):
            doubt[k].append(spans)
    if len(tallies) > 1:
        base = _mark_ambiguous(base, doubt)
    base = _split_forwards(base, trace, blamer.graph)
    return Blame(
        _frame(blamer, base),
        links,
        blamer.graph,
        _bounds(tallies, trace),
        tuple(int(x) for x in blamer.first[:-1]),
        tuple(blamer.phases),
    )


def _other_clocks(trace: Trace) -> list[IntArray]:
    """Shifts of the ranks' clocks within their uncertainty, in steps of a quarter: each rank's alone (of few), and half
    of the ranks, with the others still or the other way, such that any two ranks are apart in one of the halves."""
    u = np.array([trace.uncertainty_ns.get(r) or 0 for r in trace.ranks], dtype=np.int64)
    ranks = np.arange(u.size)
    halves = [ranks >> bit & 1 for bit in range(max(int(u.size - 1).bit_length(), 1))]
    ways = [*halves, *(2 * half - 1 for half in halves)]
    if u.size <= _FEW:
        ways += list(np.eye(u.size, dtype=np.int64))
    shifts = [way * u * quarters // 4 for way in ways for quarters in (-4, -3, -2, -1, 1, 2, 3, 4)]
    return [np.array(x) for x in {tuple(s.tolist()): None for s in shifts} if any(x)]


def _clock_bound(links: Links, graph: Graph, head: IntArray) -> IntArray:
    """Chains that a clock can change: those with a message, with a host thread (whose commits compare clocks), or with
    anything on another rank. Most chains are gaps inside CUDA graphs and have none of it."""
    bound = np.isin(links.element, (MESSAGE, CONTROL)) | (links.root != graph.activity.rank[head[links.chain]])
    if graph.control_send.size:
        bound |= links.element == THREAD
    return distinct(links.chain[bound])


def _tally(pieces: _Pieces, ranks: int) -> IntArray:
    out = np.zeros((ranks, len(CAUSES)), dtype=np.int64)
    np.add.at(out, (pieces.rank, pieces.cause), pieces.hi - pieces.lo)
    return out


def _bounds(tallies: list[IntArray], trace: Trace) -> pl.DataFrame:
    stack = np.stack(tallies)
    low, high = stack.min(axis=0), stack.max(axis=0)
    rows = [
        {"rank": r, "cause": cause, "low_ns": int(low[i, k]), "high_ns": int(high[i, k])}
        for i, r in enumerate(trace.ranks)
        for k, cause in enumerate(CAUSES)
        if high[i, k]
    ]
    return pl.DataFrame(rows, schema={"rank": pl.Int32, "cause": pl.String, "low_ns": pl.Int64, "high_ns": pl.Int64})


def _mark_ambiguous(base: _Pieces, doubt: list[list[Intervals]]) -> _Pieces:
    out: list[_Pieces] = []
    for i, spans in enumerate(doubt):
        rows = np.flatnonzero(base.rank == i)
        marked = (
            union(np.concatenate([s.start for s in spans]), np.concatenate([s.end for s in spans]))
            if spans
            else Intervals(rows[:0], rows[:0])
        )
        keep, left = _uncovered(Intervals(base.lo[rows], base.hi[rows]), marked)
        out.append(base.take(rows[keep], lo=left.start, hi=left.end))
        a, _, over = intersect_pairs(Intervals(base.lo[rows], base.hi[rows]), marked)
        m = a.size
        out.append(
            base.take(
                rows[a], lo=over.start, hi=over.end, cause=np.full(m, CODE["ambiguous"]), root=np.full(m, -1),
                element=np.where(base.cause[rows[a]] == CODE["ambiguous"], base.element[rows[a]], -3),
            )
        )  # fmt: skip
    return _in_order(out)


_PARTS = ("serial", "structural", "workload")


def _split_forwards(p: _Pieces, trace: Trace, graph: Graph) -> _Pieces:
    """Cut stretches of `upstream_compute` in another stage's forward into serial, structural and workload, exactly.

    A stage's baseline is the median duration of its forwards of the capture's commonest mode. Structural is how far the
    baseline lies above the fastest stage's; workload how far this forward lies above its stage's baseline; serial the
    rest: it has to pass through. They are laid out in the order serial, structural, workload from the forward's start,
    so a gap that opens within the forward loses serial time first.
    """
    rows = np.flatnonzero((p.cause == CODE["upstream_compute"]) & (p.element == FORWARD))
    if rows.size == 0:
        return p
    forwards = trace.forwards.sort("rank", "visit").with_columns((pl.col("end_ns") - pl.col("ts_ns")).alias("ns"))
    mode = forwards.get_column("mode").mode().sort()
    common = forwards.filter(pl.col("mode").eq_missing(pl.lit(mode[0] if mode.len() else None, dtype=pl.String)))
    base = {int(r): int(v) for r, v in common.group_by("rank").agg(pl.col("ns").quantile(0.5, "lower")).iter_rows()}
    fastest = min(base.values(), default=0)
    took = forwards.get_column("ns").to_numpy()
    baseline = np.array([base.get(int(r), fastest) for r in forwards.get_column("rank")], dtype=np.int64)
    workload = np.maximum(took - baseline, 0)
    structural = np.minimum(baseline - fastest, took - workload)
    f = p.ref[rows]
    first = graph.forward_start[f]
    cuts = [first, first + (took - workload - structural)[f], first + (took - workload)[f], first + took[f]]
    cuts[0] = np.minimum(cuts[0], p.lo[rows])
    cuts[3] = np.maximum(cuts[3], p.hi[rows])
    out = [p.take(np.setdiff1d(np.arange(p.lo.size), rows))]
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

    for i, phases in enumerate(blamer.phases):
        rows = np.flatnonzero((p.phase >= 0) & (p.root == i) & (p.element == THREAD))
        if rows.size:
            say(rows, phases.get_column("detail").to_list(), p.phase[rows])
    split = np.flatnonzero((p.element == FORWARD) & (p.phase >= 0))
    say(split, _PARTS, p.phase[split])
    for i, r in enumerate(trace.ranks):
        rows = np.flatnonzero((p.cause == CODE["no_work"]) & (p.root == i) & (p.phase >= 0))
        if rows.size:
            say(rows, _EMPTY, _empty_slots(trace, r)[blamer.phases[i].get_column("visit").to_numpy()[p.phase[rows]]])
    unknown = p.cause == CODE["unknown"]
    said = unknown & (p.reason > 0)
    say(said, REASONS, p.reason[said])
    say(unknown & (p.reason == 0) & (p.element == THREAD), ["no scheduler span says what the host does"], 0)
    say(unknown & (p.gap < 0) & (p.element == -1), ["nothing in the trace ends this gap"], 0)
    for i, r in enumerate(trace.ranks):
        rows = np.flatnonzero((p.element == -2) & (p.rank == i))
        if rows.size:
            say(rows, blamer.states[r].labels.get_column("detail").to_list(), p.ref[rows])
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

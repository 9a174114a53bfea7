"""Bubbles cut into stretches with one cause each: chains, host phases and clock uncertainty put together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import polars as pl

from traceana import schema
from traceana.arrays import distinct, narrow
from traceana.categories import in_numbers, spelled_out
from traceana.engine import side_by_side
from traceana.intervals import IntArray, Intervals, empty, intersect_pairs, subtract, union
from traceana.model.chain import (
    CAUSES,
    CODE,
    CONTROL,
    MESSAGE,
    THREAD,
    Holds,
    Links,
    find_holds,
    walk,
)
from traceana.model.details import Known, attribution_rows, different_words
from traceana.model.doubt import other_clocks, room_between, unsure_edges
from traceana.model.forward_parts import ForwardParts
from traceana.model.gaps import Gaps, find_gaps
from traceana.model.graph import Graph, build_graph
from traceana.model.kernel_classes import is_communication
from traceana.model.moves import Groups, Moves
from traceana.model.phases import host_phases
from traceana.model.pieces import (
    Pieces,
    S,
    Stretches,
    disagreement,
    in_order,
    joined,
    mark_ambiguous,
    tally,
    uncovered,
)
from traceana.model.states import DeviceStates
from traceana.model.trace import Trace

__all__ = ["Blame", "blame"]

_CHAINS_AT_A_TIME = 1 << 15  # what is made of them on the way is many times as large as they are
_PIECES_AT_A_TIME = 1 << 17
_PARTS = 8  # of doubtful stretches of a rank before they are put together


@dataclass(frozen=True, slots=True)
class Blame:
    """`attribution` (ATTRIBUTION) tiles every rank's bubble, and is kept as `compact`, its words as categories; `links`
    are the whole chains it was cut from, `graph` what they refer to. `bounds` gives, per rank and cause, the least and
    most nanoseconds over the clocks tried. `first_gap` is the number of the first chain of each rank: chain =
    first_gap[position of rank] + gap. `phases` are the host phases of each rank, by position."""

    compact: pl.DataFrame
    links: Links
    graph: Graph
    bounds: pl.DataFrame
    first_gap: tuple[int, ...]
    phases: tuple[pl.DataFrame, ...]

    @property
    def attribution(self) -> pl.DataFrame:
        """ATTRIBUTION of all ranks, made anew each time."""
        return spelled_out(self.compact)


class _Blamer:
    def __init__(self, trace: Trace, states: Mapping[int, DeviceStates]) -> None:
        self.trace = trace
        self.states = states
        self.alone = not trace.capture.in_memory
        self.phases = list(
            side_by_side(
                lambda r: in_numbers(host_phases(r, trace.visits.filter(pl.col("rank") == r.info.rank))),
                trace.capture.ranks,
                alone=self.alone,
            )
        )
        self.graph = build_graph(trace, self.phases)
        self.phase_cause = [
            p.get_column("cause").replace_strict(CODE, return_dtype=pl.Int64).to_numpy() for p in self.phases
        ]
        communication = _communication(trace)
        # A collective that waits for its last rank needs no chain, and what comes before it ends at its start.
        self.labels = [_spans(states[r].labels) for r in trace.ranks]
        self.idle = [subtract(states[r].bubbles, label) for r, label in zip(trace.ranks, self.labels, strict=True)]
        self.gaps: list[Gaps] = list(
            side_by_side(
                lambda i: find_gaps(self.graph, i, self.idle[i], communication), range(len(self.idle)), alone=self.alone
            )
        )
        self.head = np.concatenate([g.head for g in self.gaps])
        self.begin = np.concatenate([g.begin for g in self.gaps])
        self.first = np.cumsum([0, *(g.head.size for g in self.gaps)])
        self.waiter = self.graph.activity.rank[self.head]
        self.idle_gap = [
            np.where(g.of_idle >= 0, g.of_idle + first, -1) for g, first in zip(self.gaps, self.first[:-1], strict=True)
        ]
        self.u = np.array([trace.uncertainty_ns.get(r) or 0 for r in trace.ranks], dtype=np.int64)
        self.room = room_between(self.graph)
        words = [different_words(p.get_column("detail")) for p in self.phases]
        self.known = Known(trace, states, self.phases, self.graph, self.head, self.first, words)
        self.at = {rank: position for position, rank in enumerate(trace.ranks)}

    def settled(self) -> tuple[list[Pieces], list[Intervals], Links, tuple[IntArray, IntArray]]:
        """All bubbles of each rank in pieces; by rank, where other ranks' clocks leave an edge open; all chains, and
        which ranks each chain came to (chain and rank)."""
        holds = find_holds(self.graph)
        still = np.zeros(len(self.trace.ranks), dtype=np.int64)
        parts: list[list[Pieces]] = [[self._without_chain(rank)] for rank in range(still.size)]
        edges: list[list[Intervals]] = [[] for _ in range(still.size)]
        chains: list[Links] = []
        seen: list[tuple[IntArray, IntArray]] = [(narrow(np.arange(self.head.size)), narrow(self.waiter))]
        for first in range(0, max(self.head.size, 1), _CHAINS_AT_A_TIME):  # what the walk needs stays small
            which = np.arange(first, min(first + _CHAINS_AT_A_TIME, self.head.size))
            links, (chain, rank) = walk(self.graph, self.head[which], self.begin[which], holds)
            links = replace(links, chain=which[links.chain])
            chains.append(links.kept())
            seen.append((narrow(which[chain]), narrow(rank)))
            here = distinct(self.waiter[which]).tolist()
            work = partial(self._of_rank, links, still)
            for i, (own, open_edges) in zip(here, side_by_side(work, here, alone=self.alone), strict=True):
                parts[i].append(own)
                edges[i].append(open_edges)
        every = Links(*(np.concatenate([getattr(c, f) for c in chains]) for f in Links.__slots__))
        chains.clear()
        touched = np.concatenate([s[0] for s in seen]), np.concatenate([s[1] for s in seen])
        pieces: list[Pieces] = []
        while parts:  # its parts make room for the next one
            pieces.append(in_order(parts.pop(0)).kept())
        return pieces, [_together(e) if e else empty() for e in edges], every, touched

    def _of_rank(self, links: Links, still: IntArray, rank: int) -> tuple[Pieces, Intervals]:
        """The bubbles of the rank at position `rank` that its chains among `links` explain, in pieces; and its unsure
        edges."""
        low, high = np.searchsorted(links.chain, self.first[rank : rank + 2])
        own = Links(*(getattr(links, f)[low:high] for f in Links.__slots__))
        cut = self._in_phases(_as_pieces(own, self.waiter), own, still)
        edges = empty()
        if self.u.any():
            edges = unsure_edges(rank, cut.gap, cut.lo, cut.hi, cut.cause, cut.root, self.u, self.room)
        return self._in_bubbles(cut, rank).kept(), edges

    def moved(self, graph: Graph, holds: Holds, chains: IntArray, shift: IntArray) -> Iterator[tuple[int, Stretches]]:
        """The bubbles of `chains` in stretches in order, by waiting rank, on the waiters' own (unmoved) clocks; `graph`
        has clocks moved by `shift`."""
        waiter = self.waiter[chains]
        links, _ = walk(graph, self.head[chains], self.begin[chains] + shift[waiter], holds)
        links = replace(links, chain=chains[links.chain])
        every = self._in_phases(_as_stretches(links, self.waiter), links, shift)
        for i in distinct(waiter).tolist():
            yield i, in_order([self._in_bubbles(every, i)])

    def _in_phases(self, base: S, links: Links, shift: IntArray) -> S:
        """`base`, which stands for `links`, on the waiters' own clocks, those of host threads cut by what the host
        did."""
        graph = self.graph
        host = links.element == THREAD
        parts = [base.take(np.flatnonzero(~host)) if host.any() else base]
        held = np.flatnonzero(host)
        thread_rank = graph.thread_rank[links.ref[held]]
        for i in distinct(thread_rank).tolist():
            phases, rows = self.phases[i], held[thread_rank == i]
            on_main = graph.main[i] == links.ref[rows]
            spans = Intervals(
                phases.get_column("ts_ns").to_numpy() + shift[i], phases.get_column("end_ns").to_numpy() + shift[i]
            )
            known = rows[on_main]
            a, b, over = intersect_pairs(Intervals(base.lo[known], base.hi[known]), spans)
            parts.append(base.take(known[a], lo=over.start, hi=over.end, cause=self.phase_cause[i][b], phase=b))
            # What no phase covers, and what other threads do, the trace does not tell.
            rest, left = uncovered(Intervals(base.lo[known], base.hi[known]), spans)
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
        every = joined(parts)
        back = shift[every.rank]
        return replace(every, lo=every.lo - back, hi=every.hi - back)

    def _in_bubbles(self, every: S, rank: int) -> S:
        """What of the pieces lies in the idle intervals of `rank`, each in its own gap."""
        idle = self.idle[rank]
        rows = np.flatnonzero(every.rank == rank)
        a, b, over = intersect_pairs(Intervals(every.lo[rows], every.hi[rows]), idle)
        same = every.gap[rows[a]] == self.idle_gap[rank][b]
        return every.take(rows[a[same]], lo=over.start[same], hi=over.end[same])

    def _without_chain(self, rank: int) -> Pieces:
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
        return joined(out).kept()

    def _plain(self, rank: int, spans: Intervals, cause: int | IntArray) -> Pieces:
        n = spans.start.size
        minus = np.full(n, -1, dtype=np.int64)
        code = np.full(n, cause) if isinstance(cause, int) else cause
        return Pieces(
            rank=np.full(n, rank), lo=spans.start, hi=spans.end, cause=code, root=minus, crossed=np.zeros(n, dtype=np.bool_),
            gap=minus, link=np.zeros(n, dtype=np.int64), element=minus, ref=minus, reason=np.zeros(n, dtype=np.int64), phase=minus,
        )  # fmt: skip


def _as_stretches(links: Links, waiter: IntArray) -> Stretches:
    return Stretches(waiter[links.chain], links.lo, links.hi, links.cause, links.root, links.chain)


def _as_pieces(links: Links, waiter: IntArray) -> Pieces:
    return Pieces(
        rank=waiter[links.chain], lo=links.lo, hi=links.hi, cause=links.cause, root=links.root, crossed=links.crossed,
        gap=links.chain, link=links.link, element=links.element, ref=links.ref, reason=links.reason,
        phase=np.full(links.chain.size, -1, dtype=np.int64),
    )  # fmt: skip


def _communication(trace: Trace) -> np.ndarray:
    """Which device activities are communication, of all ranks one after another."""
    found = [np.zeros(0, dtype=np.bool_)]
    for rank in trace.capture.ranks:
        names = rank.device.get_column("name")
        nccl = [n for n in names.unique().cast(pl.String).to_list() if is_communication(n)]
        found.append(names.is_in(nccl).to_numpy())
    return np.concatenate(found)


def _together(parts: Sequence[Intervals]) -> Intervals:
    return union(np.concatenate([p.start for p in parts]), np.concatenate([p.end for p in parts]))


def _spans(frame: pl.DataFrame) -> Intervals:
    return Intervals(frame.get_column("ts_ns").to_numpy(), frame.get_column("end_ns").to_numpy())


def blame(
    trace: Trace, states: Mapping[int, DeviceStates], progress: Callable[[str, int, int], None] | None = None
) -> Blame:
    """The attribution of every bubble of `trace`. `progress` is told how many ranks' clocks were tried, and of how many.

    The clocks are moved within their uncertainty (`other_clocks`); nanoseconds whose cause or root is not the same
    under all of them are `ambiguous`, and so are those around edges that other ranks make.
    """
    blamer = _Blamer(trace, states)
    n = len(trace.ranks)
    base, edges, links, touched = blamer.settled()
    spent = np.stack([tally(p) for p in base]) if base else np.zeros((0, len(CAUSES)), dtype=np.int64)
    low, high = spent.copy(), spent.copy()
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
        then = spent.copy()
        with moves.moved(ranks, by) as holds:
            for first in range(0, chains.size, _CHAINS_AT_A_TIME):
                some = chains[first : first + _CHAINS_AT_A_TIME]
                chosen = np.zeros(blamer.head.size + 1, dtype=np.bool_)  # the last one stands for no chain
                chosen[some] = True
                for i, after in blamer.moved(moves.graph, holds, some, shift):
                    before = base[i].bare(np.flatnonzero(chosen[base[i].gap]))
                    then[i] += tally(after) - tally(before)
                    doubt[i].append(disagreement(before, after))
        low, high = np.minimum(low, then), np.maximum(high, then)
        doubt = [[_together(spans)] if len(spans) > _PARTS else spans for spans in doubt]
    for i, open_edges in enumerate(edges):
        if open_edges.start.size:
            doubt[i].append(open_edges)
    forwards = ForwardParts(trace, blamer.graph)
    left = dict(enumerate(base))
    base.clear()

    def rows(i: int) -> pl.DataFrame:
        pieces = left.pop(i)  # its memory is needed for the table
        marked = _together(doubt[i]) if doubt[i] else empty()
        return pl.concat(
            attribution_rows(forwards.split(mark_ambiguous(part, marked)), blamer.known)
            for part in pieces.runs(_PIECES_AT_A_TIME)
        )

    frames = list(side_by_side(rows, range(n), alone=blamer.alone))
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


def _bounds(low: IntArray, high: IntArray, trace: Trace) -> pl.DataFrame:
    rows = [
        {"rank": r, "cause": cause, "low_ns": int(low[i, k]), "high_ns": int(high[i, k])}
        for i, r in enumerate(trace.ranks)
        for k, cause in enumerate(CAUSES)
        if high[i, k]
    ]
    return pl.DataFrame(rows, schema={"rank": pl.Int32, "cause": pl.String, "low_ns": pl.Int64, "high_ns": pl.Int64})

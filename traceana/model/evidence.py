"""The links of a chain in words: which event waited for which, with rank, micro-batch and nanoseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceana.arrays import once
from traceana.categories import few_words
from traceana.intervals import IntArray
from traceana.model.chain import ACTIVITY, CAUSES, CONTROL, END, FORWARD, MESSAGE, REASONS, START, SYNC, THREAD, Links
from traceana.model.model import Model

__all__ = ["Words", "describe_chain", "describe_events", "describe_links"]

_WORDS = {
    "upstream_compute": "computes", "downstream_backpressure": "computes and takes nothing yet",
    "p2p_transfer_wait": "moves the data", "control_message": "is in flight", "host_sync": "wakes up late",
    "launch_latency": "is launched and has not started", "stream_dependency": "waits for another stream",
}  # fmt: skip


def _short(name: str) -> str:
    """A kernel name without its template arguments, at most 60 characters."""
    head = name.removeprefix("void ").split("<", 1)[0].split("(", 1)[0] if not name.startswith("void (") else name[5:]
    return (head or name)[:60]


def _joined(*parts: pl.Series | str) -> pl.Series:
    """Texts put together row by row."""
    return pl.select(pl.concat_str([pl.lit(p) for p in parts])).to_series()


class Words:
    """What the links of a model refer to, in words, for arrays of them. Safe for several threads."""

    def __init__(self, model: Model) -> None:
        self.model, self._graph = model, model.blame.graph
        self._rank = pl.Series([f"rank {r}" for r in self._graph.ranks], dtype=pl.String())
        self._names: list[str] = []  # short names of activities, of all ranks read so far
        self._number: dict[str, int] = {}
        self._of_rank: dict[int, NDArray[np.int32]] = {}
        self._lock = threading.Lock()

    def _numbers(self, rank: int) -> NDArray[np.int32]:
        """For each activity of a rank, by position, the number of its short name."""
        with self._lock:
            found = self._of_rank.get(rank)
            if found is None:
                names = self.model.trace.capture.ranks[rank].device.get_column("name")
                codes = names.to_physical().to_numpy()
                used, first = np.unique(codes, return_index=True)
                number = np.zeros(int(codes.max(initial=0)) + 1, np.int32)
                for code, name in zip(used.tolist(), names.gather(first).cast(pl.String).to_list(), strict=True):
                    short = _short(name)
                    number[code] = self._number.setdefault(short, len(self._names))
                    if number[code] == len(self._names):
                        self._names.append(short)
                found = self._of_rank[rank] = number[codes]
        return found

    def _called(self, index: IntArray) -> IntArray:
        """The number of the short name of each activity."""
        act = self._graph.activity
        rank = act.rank[index]
        number = np.zeros(index.size, np.int64)
        for r in np.flatnonzero(np.bincount(rank)).tolist():
            mine = rank == r
            number[mine] = self._numbers(r)[act.row[index[mine]]]
        return number

    def activities(self, index: IntArray) -> pl.Series:
        """`kernel on rank 0`."""
        names = pl.Series(self._names, dtype=pl.String()).gather(self._called(index))
        return _joined(names, " on ", self._rank.gather(self._graph.activity.rank[index]))

    def in_forwards(self, index: IntArray) -> pl.Series:
        """As `activities`, with the visit of the forward it is part of."""
        forward = pl.Series(self._graph.activity.forward[index])
        visits = pl.Series(self._graph.forward_visit).cast(pl.String())
        known = pl.select(pl.when(forward >= 0).then(forward)).to_series()
        inside = _joined(" (visit ", visits.gather(known), ")")
        return _joined(self.activities(index), inside.fill_null(""))

    def once_in_forwards(self, index: IntArray) -> tuple[pl.Series, IntArray]:
        """`in_forwards` of each activity, equal ones once, and which one is that of each activity."""
        first, place = once(*self._in_forward(index))
        return self.in_forwards(index[first]), place

    def _in_forward(self, index: IntArray) -> tuple[IntArray, ...]:
        """Numbers that are equal where `in_forwards` is."""
        act = self._graph.activity
        return self._called(index), act.rank[index], act.forward[index]

    def _forwards(self, index: IntArray) -> pl.Series:
        """`forward of visit 3 on rank 0`."""
        visit = pl.Series(self._graph.forward_visit[index]).cast(pl.String())
        return _joined("forward of visit ", visit, " on ", self._rank.gather(self._graph.forward_rank[index]))

    def _messages(self, table: pl.DataFrame, index: IntArray, library: str) -> pl.Series:
        """`NCCL proxy message 0->1 of visit 3`."""
        said = table[index].select(
            pl.format("{} {} message {}->{} of visit {}", pl.lit(library), "kind", "src", "dst", pl.col("visit").fill_null(-1))
        )  # fmt: skip
        return said.to_series()

    def _threads(self, index: IntArray) -> pl.Series:
        """`scheduler of rank 0`."""
        return _joined("scheduler of ", self._rank.gather(self._graph.thread_rank[index]))

    def _syncs(self, index: IntArray) -> pl.Series:
        """`host of rank 0 after kernel on rank 0`."""
        activity = self._graph.stop.ref[index]
        host = self._rank.gather(self._graph.activity.rank[activity])
        return _joined("host of ", host, " after ", self.activities(activity))

    def of(self, links: Links) -> tuple[pl.Series, IntArray]:
        """The events of links, equal ones mostly once, and which one is that of each link."""
        trace = self.model.trace
        doing = pl.Series([f" {_WORDS[c]}" if c in _WORDS else "" for c in CAUSES])

        def itself(index: IntArray) -> tuple[IntArray, ...]:
            return (index,)

        def stopped(index: IntArray) -> tuple[IntArray, ...]:
            return self._in_forward(self._graph.stop.ref[index])

        kinds: tuple[tuple[tuple[int, ...], Callable[[IntArray], tuple[IntArray, ...]], Callable[[IntArray], pl.Series]], ...] = (
            ((ACTIVITY, START), self._in_forward, self.in_forwards), ((SYNC,), stopped, self._syncs),
            ((FORWARD,), itself, self._forwards), ((THREAD,), itself, self._threads),
            ((MESSAGE,), itself, lambda index: self._messages(trace.messages, index, "NCCL")),
            ((CONTROL,), itself, lambda index: self._messages(trace.controls, index, "gloo")),
        )  # fmt: skip
        told = [pl.Series(REASONS, dtype=pl.String())]
        number = np.where(links.element == END, links.reason, 0).astype(np.int64)
        for codes, same, tell in kinds:
            mine = np.flatnonzero(np.isin(links.element, codes))
            if mine.size:
                ref, cause = links.ref[mine], links.cause[mine]
                first, place = once(*same(ref), cause)
                number[mine] = place + sum(map(len, told))
                said = tell(ref[first])
                told.append(said if THREAD in codes else _joined(said, doing.gather(cause[first])))
        return pl.concat([pl.Series(t.alias("what")) for t in told]), number


def _rows(links: Links, which: slice | IntArray) -> Links:
    return Links(*(getattr(links, f)[which] for f in Links.__slots__))


def describe_links(model: Model, chains: IntArray) -> pl.DataFrame:
    """The events of the chains with the given numbers, in words: rank, gap, chain (number of the link), what."""
    every = model.blame.links
    low, high = np.searchsorted(every.chain, chains), np.searchsorted(every.chain, chains, side="right")
    none = np.zeros(0, dtype=np.int64)
    links = _rows(every, np.concatenate([none, *(np.arange(a, b) for a, b in zip(low, high, strict=True))]))
    first = np.array(model.blame.first_gap, dtype=np.int64)
    position = np.searchsorted(first, links.chain, side="right") - 1
    ranks = np.array(model.trace.ranks, dtype=np.int32)
    what, number = Words(model).of(links)
    return pl.DataFrame(
        {"rank": ranks[position], "gap": links.chain - first[position], "chain": links.link.astype(np.int64), "what": what.gather(number)}
    )  # fmt: skip


def describe_events(words: Words, stretches: pl.DataFrame) -> pl.DataFrame:
    """`stretches`, the ATTRIBUTION of one rank, with `first_event` and `last_event` (Categorical), the events that bound
    each in words: the link before it in the chain ends it, the link after it starts it; at the ends of a gap, the work on
    the stage that ended or starts there; where a link is cut (at a span of the host, at an edge of the window), that link
    itself."""
    if stretches.height == 0:
        return stretches.with_columns(pl.lit(None, pl.Categorical()).alias(c) for c in ("first_event", "last_event"))
    model = words.model
    position = model.trace.ranks.index(stretches.item(0, "rank"))
    ends = [*model.blame.first_gap, np.iinfo(np.int64).max]
    low, high = np.searchsorted(model.blame.links.chain, ends[position : position + 2])
    links = _rows(model.blame.links, slice(int(low), int(high)))
    what, number = words.of(links)
    gap, link = stretches.get_column("gap").to_numpy(), stretches.get_column("chain").to_numpy()
    chain = np.where(gap >= 0, gap + ends[position], -1)
    begin, end = np.searchsorted(links.chain, chain), np.searchsorted(links.chain, chain, side="right")
    number = np.append(number, -1)  # of what is not known

    def linked(by: int) -> IntArray:
        row = begin + link + by  # links are numbered without a gap
        return number[np.where((row >= begin) & (row < end), row, -1)]

    act = model.blame.graph.activity
    mine = act.of_rank(position)
    by_end = np.argsort(act.end[mine], kind="stable")
    start_ns, end_ns = (stretches.get_column(c).to_numpy() for c in ("ts_ns", "end_ns"))
    said: list[pl.Series] = [what]
    told: list[IntArray] = []
    for bound, times, order, at in (
        (linked(1), act.end[mine][by_end], mine.start + by_end, start_ns),
        (linked(-1), act.start[mine], np.arange(mine.start, mine.stop), end_ns),
    ):
        rows = np.flatnonzero(bound < 0)
        index = np.searchsorted(times, at[rows])
        there = np.append(times, -1)[index] == at[rows]
        texts, place = words.once_in_forwards(order[index[there]])
        bound[rows[there]] = place + sum(map(len, said))
        said.append(texts.alias("what"))
        told.append(np.where(bound < 0, linked(0), bound))
    every = few_words(pl.concat(said))
    return stretches.with_columns(
        every.gather(_known(number, number >= 0)).alias(name)
        for name, number in zip(("first_event", "last_event"), told, strict=True)
    )


def _known(index: IntArray, known: NDArray[np.bool_]) -> pl.Series:
    """`index` with null for what is not known: gathering by it gives null there."""
    return pl.Series(np.where(known, index, 0)).set(pl.Series(~known), None)


def describe_chain(model: Model, rank: int, gap: int) -> list[Mapping[str, object]]:
    """The attribution of one gap of a rank, last nanosecond first, each stretch with its event in words."""
    number = np.array([model.blame.first_gap[model.trace.ranks.index(rank)] + gap], dtype=np.int64)
    rows = (
        model.blame.compact.filter((pl.col("rank") == rank) & (pl.col("gap") == gap))
        .join(describe_links(model, number), on=["rank", "gap", "chain"], how="left")
        .sort("ts_ns", descending=True)
    )
    told: list[Mapping[str, object]] = [*rows.select(
        "ts_ns", (pl.col("end_ns") - pl.col("ts_ns")).alias("ns"), "cause", "root_rank", "detail", "crossed_token_return",
        pl.col("what").fill_null(""),
    ).to_dicts()]  # fmt: skip
    return told

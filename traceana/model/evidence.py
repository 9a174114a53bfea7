"""The links of a chain in words: which event waited for which, with rank, micro-batch and nanoseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

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

    def activities(self, index: IntArray) -> pl.Series:
        """`kernel on rank 0`."""
        act = self._graph.activity
        rank = act.rank[index]
        number = np.zeros(index.size, np.int32)
        for r in np.flatnonzero(np.bincount(rank)).tolist():
            mine = rank == r
            number[mine] = self._numbers(r)[act.row[index[mine]]]
        return _joined(pl.Series(self._names, dtype=pl.String()).gather(number), " on ", self._rank.gather(rank))

    def in_forwards(self, index: IntArray) -> pl.Series:
        """As `activities`, with the visit of the forward it is part of."""
        forward = pl.Series(self._graph.activity.forward[index])
        visits = pl.Series(self._graph.forward_visit).cast(pl.String())
        known = pl.select(pl.when(forward >= 0).then(forward)).to_series()
        inside = _joined(" (visit ", visits.gather(known), ")")
        return _joined(self.activities(index), inside.fill_null(""))

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

    def of(self, links: Links) -> pl.Series:
        """The event of each link."""
        trace = self.model.trace
        doing = pl.Series([f" {_WORDS[c]}" if c in _WORDS else "" for c in CAUSES]).gather(links.cause)
        kinds: tuple[tuple[tuple[int, ...], Callable[[IntArray], pl.Series]], ...] = (
            ((ACTIVITY, START), self.in_forwards), ((FORWARD,), self._forwards), ((THREAD,), self._threads), ((SYNC,), self._syncs),
            ((MESSAGE,), lambda index: self._messages(trace.messages, index, "NCCL")),
            ((CONTROL,), lambda index: self._messages(trace.controls, index, "gloo")),
        )  # fmt: skip
        mine = np.flatnonzero(links.element == END)
        where, told = [mine], [pl.Series(REASONS).gather(links.reason[mine])]
        for codes, tell in kinds:
            mine = np.flatnonzero(np.isin(links.element, codes))
            if mine.size:
                where.append(mine)
                said = tell(links.ref[mine])
                told.append(said if THREAD in codes else _joined(said, doing.gather(mine)))
        place = np.empty(links.chain.size, np.int64)
        place[np.concatenate(where)] = np.arange(links.chain.size)
        return pl.concat([pl.Series(t.alias("what")) for t in told]).gather(place)


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
    return pl.DataFrame(
        {"rank": ranks[position], "gap": links.chain - first[position], "chain": links.link.astype(np.int64), "what": Words(model).of(links)}
    )  # fmt: skip


def describe_events(words: Words, stretches: pl.DataFrame) -> pl.DataFrame:
    """`stretches`, the ATTRIBUTION of one rank, with `first_event` and `last_event`, the events that bound each in words:
    the link before it in the chain ends it, the link after it starts it; at the ends of a gap, the work on the stage
    that ended or starts there; where a link is cut (at a span of the host, at an edge of the window), that link itself."""
    if stretches.height == 0:
        return stretches.with_columns(pl.lit(None, pl.String).alias(c) for c in ("first_event", "last_event"))
    model = words.model
    position = model.trace.ranks.index(stretches.item(0, "rank"))
    ends = [*model.blame.first_gap, np.iinfo(np.int64).max]
    low, high = np.searchsorted(model.blame.links.chain, ends[position : position + 2])
    links = _rows(model.blame.links, slice(int(low), int(high)))
    what = words.of(links)
    gap, link = stretches.get_column("gap").to_numpy(), stretches.get_column("chain").to_numpy()
    chain = np.where(gap >= 0, gap + ends[position], -1)
    begin, end = np.searchsorted(links.chain, chain), np.searchsorted(links.chain, chain, side="right")

    def linked(by: int) -> pl.Series:
        row = begin + link + by  # links are numbered without a gap
        return what.gather(_known(row, (row >= begin) & (row < end)))

    started, ended = linked(1), linked(-1)
    here = linked(0)
    act = model.blame.graph.activity
    mine = act.of_rank(position)
    by_end = np.argsort(act.end[mine], kind="stable")
    columns: list[pl.Series] = []
    for name, linked_to, times, order, at in (
        ("first_event", started, act.end[mine][by_end], mine.start + by_end, stretches.get_column("ts_ns").to_numpy()),
        (
            "last_event",
            ended,
            act.start[mine],
            np.arange(mine.start, mine.stop),
            stretches.get_column("end_ns").to_numpy(),
        ),
    ):
        rows = np.flatnonzero(linked_to.is_null())
        index = np.searchsorted(times, at[rows])
        there = np.append(times, -1)[index] == at[rows]
        said = words.in_forwards(order[index[there]])
        place = np.full(at.size, -1)
        place[rows[there]] = np.arange(said.len())
        columns.append(
            pl.select(pl.coalesce(linked_to, said.gather(_known(place, place >= 0)), here)).to_series().alias(name)
        )
    return stretches.with_columns(columns)


def _known(index: IntArray, known: NDArray[np.bool_]) -> pl.Series:
    """`index` with null for what is not known: gathering by it gives null there."""
    return pl.Series(np.where(known, index, 0)).set(pl.Series(~known), None)


def describe_chain(model: Model, rank: int, gap: int) -> list[Mapping[str, object]]:
    """The attribution of one gap of a rank, last nanosecond first, each stretch with its event in words."""
    number = np.array([model.blame.first_gap[model.trace.ranks.index(rank)] + gap], dtype=np.int64)
    rows = (
        model.blame.attribution.filter((pl.col("rank") == rank) & (pl.col("gap") == gap))
        .join(describe_links(model, number), on=["rank", "gap", "chain"], how="left")
        .sort("ts_ns", descending=True)
    )
    told: list[Mapping[str, object]] = [*rows.select(
        "ts_ns", (pl.col("end_ns") - pl.col("ts_ns")).alias("ns"), "cause", "root_rank", "detail", "crossed_token_return",
        pl.col("what").fill_null(""),
    ).to_dicts()]  # fmt: skip
    return told

"""The links of a chain in words: which event waited for which, with rank, micro-batch and nanoseconds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from traceana.intervals import IntArray
from traceana.model.chain import ACTIVITY, CAUSES, CONTROL, END, FORWARD, MESSAGE, REASONS, START, SYNC, THREAD
from traceana.model.model import Model

__all__ = ["describe_chain", "describe_edges", "describe_links"]

_WORDS = {
    "upstream_compute": "computes", "downstream_backpressure": "computes and takes nothing yet",
    "p2p_transfer_wait": "moves the data", "control_message": "is in flight", "host_sync": "wakes up late",
    "launch_latency": "is launched and has not started", "stream_dependency": "waits for another stream",
}  # fmt: skip


def _short(name: str) -> str:
    """A kernel name without its template arguments, at most 60 characters."""
    head = name.removeprefix("void ").split("<", 1)[0].split("(", 1)[0] if not name.startswith("void (") else name[5:]
    return (head or name)[:60]


def _texts(values: list[str]) -> np.ndarray:
    return np.array(values, dtype=object)


class _Words:
    """What links refer to, in words, for arrays of them."""

    def __init__(self, model: Model) -> None:
        self.model, self.graph = model, model.blame.graph
        self.rank = _texts([f"rank {r}" for r in self.graph.ranks])

    def activities(self, index: IntArray) -> np.ndarray:
        """`kernel on rank 0`."""
        act = self.graph.activity
        out = np.full(index.size, "", dtype=object)
        for i, table in enumerate(self.model.trace.capture.ranks):
            mine = np.flatnonzero(act.rank[index] == i)
            names = table.device.get_column("name")[act.row[index[mine]]].cast(pl.String)
            short = {n: _short(n) for n in names.unique().to_list()}
            out[mine] = _texts(names.replace_strict(short, return_dtype=pl.String).to_list())
        said: np.ndarray = out + " on " + self.rank[act.rank[index]]
        return said

    def in_forwards(self, index: IntArray) -> np.ndarray:
        """As `activities`, with the visit of the forward it is part of."""
        forward = self.graph.activity.forward[index]
        visit = np.append(self.graph.forward_visit, -1)[forward].astype(str).astype(object)
        said: np.ndarray = self.activities(index) + np.where(forward >= 0, " (visit " + visit + ")", "")
        return said

    def forwards(self, index: IntArray) -> np.ndarray:
        """`forward of visit 3 on rank 0`."""
        visit = self.graph.forward_visit[index].astype(str).astype(object)
        said: np.ndarray = "forward of visit " + visit + " on " + self.rank[self.graph.forward_rank[index]]
        return said

    def messages(self, table: pl.DataFrame, index: IntArray, library: str) -> np.ndarray:
        """`NCCL proxy message 0->1 of visit 3`."""
        said = table[index].select(
            pl.format("{} {} message {}->{} of visit {}", pl.lit(library), "kind", "src", "dst", pl.col("visit").fill_null(-1))
        )  # fmt: skip
        return _texts(said.to_series().to_list())

    def threads(self, index: IntArray) -> np.ndarray:
        """`scheduler of rank 0`."""
        said: np.ndarray = "scheduler of " + self.rank[self.graph.thread_rank[index]]
        return said

    def syncs(self, index: IntArray) -> np.ndarray:
        """`host of rank 0 after kernel on rank 0`."""
        activity = self.graph.stop.ref[index]
        said: np.ndarray = (
            "host of " + self.rank[self.graph.activity.rank[activity]] + " after " + self.activities(activity)
        )
        return said


def describe_links(model: Model, chains: IntArray | None = None) -> pl.DataFrame:
    """The events of all chains, or of those with the given numbers, in words: rank, gap, chain (number of the link), what."""
    links, trace = model.blame.links, model.trace
    if chains is None:
        rows = np.arange(links.chain.size)
    else:
        low, high = np.searchsorted(links.chain, chains), np.searchsorted(links.chain, chains, side="right")
        rows = np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(a, b) for a, b in zip(low, high, strict=True))])
    element, ref, words = links.element[rows], links.ref[rows], _Words(model)
    what = _texts(list(REASONS))[links.reason[rows]]
    kinds = (
        ((ACTIVITY, START), words.in_forwards), ((FORWARD,), words.forwards), ((THREAD,), words.threads), ((SYNC,), words.syncs),
        ((MESSAGE,), lambda index: words.messages(trace.messages, index, "NCCL")),
        ((CONTROL,), lambda index: words.messages(trace.controls, index, "gloo")),
    )  # fmt: skip
    for codes, tell in kinds:
        mine = np.flatnonzero(np.isin(element, codes))
        if mine.size:
            what[mine] = tell(ref[mine])
    doing = _texts([f" {_WORDS[c]}" if c in _WORDS else "" for c in CAUSES])[links.cause[rows]]
    what = np.where((element != END) & (element != THREAD), what + doing, what)
    first = np.array(model.blame.first_gap, dtype=np.int64)
    position = np.searchsorted(first, links.chain[rows], side="right") - 1
    ranks = np.array(trace.ranks, dtype=np.int32)
    return pl.DataFrame(
        {
            "rank": ranks[position], "gap": links.chain[rows] - first[position], "chain": links.link[rows], "what": what.tolist(),
        },
        schema={"rank": pl.Int32, "gap": pl.Int64, "chain": pl.Int64, "what": pl.String},
    )  # fmt: skip


def describe_edges(model: Model, stretches: pl.DataFrame) -> pl.DataFrame:
    """For each of `stretches` (rank, ts_ns, end_ns) the activity of that rank which ended when it starts (`ended`) and
    the one which starts when it ends (`started`), in words; null where none does."""
    act, words = model.blame.graph.activity, _Words(model)
    ranks = np.array(model.trace.ranks, dtype=np.int64)
    rank = np.searchsorted(ranks, stretches.get_column("rank").to_numpy())
    columns: list[pl.Series] = []
    for name, times, at in (
        ("ended", act.end, stretches.get_column("ts_ns")), ("started", act.start, stretches.get_column("end_ns")),
    ):  # fmt: skip
        order = np.lexsort((times, act.rank))
        base = int(times.min()) if times.size else 0
        key = (act.rank[order] << 44) + (times[order] - base)
        want = (rank << 44) + np.clip(at.to_numpy() - base, 0, (1 << 44) - 1)
        index = np.searchsorted(key, want, side="left")
        there = np.flatnonzero(np.append(key, -1)[np.minimum(index, key.size)] == want)
        found = np.full(want.size, None, dtype=object)
        found[there] = words.in_forwards(order[index[there]])
        columns.append(pl.Series(name, found.tolist(), dtype=pl.String))
    return pl.DataFrame(columns)


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

"""The links of a chain in words: which event waited for which, with rank, micro-batch and nanoseconds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from traceana.model.chain import ACTIVITY, CAUSES, CONTROL, END, FORWARD, MESSAGE, REASONS, START, SYNC, THREAD
from traceana.model.model import Model

__all__ = ["describe_chain", "describe_links"]

_WORDS = {
    "upstream_compute": "computes", "downstream_backpressure": "computes and takes nothing yet",
    "p2p_transfer_wait": "moves the data", "control_message": "is in flight", "host_sync": "wakes up late",
    "launch_latency": "is launched and has not started", "stream_dependency": "waits for another stream",
}  # fmt: skip


def _short(name: str) -> str:
    """A kernel name without its template arguments, at most 60 characters."""
    head = name.removeprefix("void ").split("<", 1)[0].split("(", 1)[0] if not name.startswith("void (") else name[5:]
    return (head or name)[:60]


def _activity(model: Model, index: int) -> str:
    graph = model.blame.graph
    rank = int(graph.activity.rank[index])
    name = model.trace.capture.ranks[rank].device.get_column("name")[int(graph.activity.row[index])]
    return f"{_short(str(name))} on rank {graph.ranks[rank]}"


def _forward(model: Model, index: int) -> str:
    graph = model.blame.graph
    return f"forward of visit {int(graph.forward_visit[index])} on rank {graph.ranks[int(graph.forward_rank[index])]}"


def _what(model: Model, element: int, ref: int) -> str:
    graph, trace = model.blame.graph, model.trace
    if element in (ACTIVITY, START):
        forward = int(graph.activity.forward[ref])
        return _activity(model, ref) + (f" (visit {int(graph.forward_visit[forward])})" if forward >= 0 else "")
    if element == FORWARD:
        return _forward(model, ref)
    if element == MESSAGE:
        m = trace.messages.row(ref, named=True)
        return f"NCCL {m['kind']} message {m['src']}->{m['dst']} of visit {m['visit']}"
    if element == CONTROL:
        c = trace.controls.row(ref, named=True)
        return f"gloo {c['kind']} message {c['src']}->{c['dst']} of visit {c['visit']}"
    if element == THREAD:
        return f"scheduler of rank {graph.ranks[int(graph.thread_rank[ref])]}"
    if element == SYNC:
        activity = int(graph.stop.ref[ref])
        return f"host of rank {graph.ranks[int(graph.activity.rank[activity])]} after {_activity(model, activity)}"
    return "end of the chain"


def describe_chain(model: Model, rank: int, gap: int) -> list[Mapping[str, object]]:
    """The attribution of one gap of a rank, last nanosecond first, each stretch with its event in words."""
    rows = model.blame.attribution.filter((pl.col("rank") == rank) & (pl.col("gap") == gap)).sort(
        "ts_ns", descending=True
    )
    links = _links_of(model, rank, gap)
    out: list[Mapping[str, object]] = [
        {
            "ts_ns": row["ts_ns"],
            "ns": row["end_ns"] - row["ts_ns"],
            "cause": row["cause"],
            "root_rank": row["root_rank"],
            "detail": row["detail"],
            "crossed_token_return": row["crossed_token_return"],
            "what": links.get(int(row["chain"]), ""),
        }
        for row in rows.iter_rows(named=True)
    ]
    return out


def _links_of(model: Model, rank: int, gap: int) -> dict[int, str]:
    """Link number -> words, for one gap of a rank."""
    links = model.blame.links
    chain = model.blame.first_gap[model.trace.ranks.index(rank)] + gap
    lo, hi = np.searchsorted(links.chain, [chain, chain + 1])
    out: dict[int, str] = {}
    for k in range(int(lo), int(hi)):
        element, reason = int(links.element[k]), int(links.reason[k])
        cause = CAUSES[int(links.cause[k])]
        text = REASONS[reason] if element == END else _what(model, element, int(links.ref[k]))
        if element != END and element != THREAD and cause in _WORDS:
            text += f" {_WORDS[cause]}"
        out[int(links.link[k])] = text
    return out


def describe_links(model: Model, gaps: pl.DataFrame) -> pl.DataFrame:
    """The events of the chains of `gaps` (rank, gap) in words: rank, gap, chain (number of the link), what."""
    out: list[tuple[int, int, int, str]] = []
    for rank, gap in gaps.select("rank", "gap").iter_rows():
        out += [(rank, gap, k, what) for k, what in _links_of(model, rank, gap).items()]
    kinds = {"rank": pl.Int32, "gap": pl.Int64, "chain": pl.Int64, "what": pl.String}
    return pl.DataFrame(out, schema=kinds, orient="row")

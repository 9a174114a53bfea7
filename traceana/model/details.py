"""Pieces of bubbles as rows of ATTRIBUTION, their details in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceana import schema
from traceana.arrays import distinct, once
from traceana.categories import in_numbers
from traceana.intervals import IntArray
from traceana.model.chain import CAUSES, CODE, FORWARD, REASONS, THREAD
from traceana.model.forward_parts import PARTS
from traceana.model.graph import Graph
from traceana.model.pieces import Pieces
from traceana.model.states import DeviceStates
from traceana.model.trace import Trace

__all__ = ["Known", "attribution_rows", "different_words"]

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


@dataclass(frozen=True, slots=True)
class Known:
    """What the details of a piece are looked up in. `head` is the waiting activity of each chain, `first` the first
    chain of each rank, by position, and their number at the end. `words` are the different details of the phases of
    each rank, by position, and which of them each phase has."""

    trace: Trace
    states: Mapping[int, DeviceStates]
    phases: Sequence[pl.DataFrame]
    graph: Graph
    head: IntArray
    first: IntArray
    words: Sequence[tuple[Sequence[str | None], IntArray]]


def different_words(words: pl.Series) -> tuple[Sequence[str | None], IntArray]:
    """The different ones of categorical `words`, and for each of these its place there."""
    first, place = once(words.to_physical().cast(pl.Int64).fill_null(-1).to_numpy())
    return words.gather(first).to_list(), place


def attribution_rows(p: Pieces, known: Known) -> pl.DataFrame:
    """Pieces as ATTRIBUTION rows; details in words."""
    trace, graph = known.trace, known.graph
    n = p.lo.size
    texts: list[str | None] = [None]
    detail = np.zeros(n, dtype=np.int64)  # which of the texts

    def say(rows: np.ndarray, words: Sequence[str | None], which: IntArray | int) -> None:
        detail[rows] = which
        detail[rows] += len(texts)
        texts.extend(words)

    hosts = np.flatnonzero((p.phase >= 0) & (p.element == THREAD))
    for i in distinct(p.root[hosts]).tolist():
        rows = hosts[p.root[hosts] == i]
        if i >= 0:
            words, place = known.words[i]
            say(rows, words, place[p.phase[rows]])
    split = np.flatnonzero((p.element == FORWARD) & (p.phase >= 0))
    say(split, PARTS, p.phase[split])
    for i in distinct(p.root[hosts]).tolist():
        rows = hosts[(p.root[hosts] == i) & (p.cause[hosts] == CODE["no_work"])]
        if rows.size and i >= 0:
            visits = known.phases[i].get_column("visit").to_numpy()[p.phase[rows]]
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
            say(rows, known.states[trace.ranks[i]].labels.get_column("detail").to_list(), p.ref[rows])
    say(p.element == -3, ["the clocks cannot tell"], 0)
    visit = np.full(n, -1, dtype=np.int64)
    has = p.gap >= 0
    forward = graph.activity.forward[known.head[np.maximum(p.gap, 0)]] if known.head.size else np.full(n, -1)
    in_forward = has & (forward >= 0)
    if graph.forward_visit.size:
        visit[in_forward] = graph.forward_visit[forward[in_forward]]
    ranks = np.array(trace.ranks, dtype=np.int64)
    roots = np.append(ranks, -1)[p.root]
    gap = np.where(has, p.gap - known.first[p.rank], -1)
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
    return in_numbers(schema.ATTRIBUTION.frame(frame))

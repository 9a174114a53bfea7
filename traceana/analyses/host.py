"""Hosts: how long each scheduler span takes a visit on each stage, less the waits inside it, and the forwards by mode."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceana.categories import spelled_out
from traceana.intervals import Intervals, intersect_pairs, union
from traceana.model.chain import held_commits
from traceana.model.graph import STOP_COMMIT, STOP_RECEIVE
from traceana.model.model import Model
from traceana.result import Result

__all__ = ["NAME", "run"]

NAME = "host"


def run(model: Model) -> Result:
    """Facts `host_spans` ({rank, span, count, mean_ns, p50_ns}: host time of a span per visit that has it, gloo receives
    and GPU syncs inside taken out) and `forward_modes` ({rank, mode, forwards, total_ns, p50_ns})."""
    spans: list[dict[str, object]] = []
    for position, rank in enumerate(model.trace.ranks):
        phases = model.blame.phases[position]
        if phases.height == 0:
            continue
        w = model.trace.window
        own = spelled_out(phases).filter(
            (pl.col("ts_ns") >= w.start_ns)
            & (pl.col("end_ns") <= w.end_ns)
            & pl.col("cause").is_in(["host_schedule", "host_launch"])
        )
        at = Intervals(own.get_column("ts_ns").to_numpy(), own.get_column("end_ns").to_numpy())
        waits = _waits(model, position)
        index, _, over = intersect_pairs(at, waits)
        lost = np.zeros(at.start.size, dtype=np.int64)
        np.add.at(lost, index, over.end - over.start)
        per = (
            own.with_columns((pl.col("end_ns") - pl.col("ts_ns") - pl.Series(lost)).alias("ns"))
            .group_by("detail", "visit")
            .agg(pl.col("ns").sum())
            .group_by("detail")
            .agg(
                pl.len().alias("count"),
                (pl.col("ns").sum() // pl.len()).alias("mean_ns"),
                pl.col("ns").quantile(0.5, "lower").cast(pl.Int64).alias("p50_ns"),
            )
            .sort("mean_ns", "detail", descending=[True, False])
        )
        for row in per.rename({"detail": "span"}).to_dicts():
            about: dict[str, object] = {"rank": rank, **row}
            spans.append(about)
    length = pl.col("end_ns") - pl.col("ts_ns")
    modes = (
        model.window_forwards()
        .group_by("rank", "mode")
        .agg(
            pl.len().alias("forwards"),
            length.sum().alias("total_ns"),
            length.quantile(0.5, "lower").cast(pl.Int64).alias("p50_ns"),
        )
        .sort("rank", "mode", nulls_last=True)
    )
    return Result(NAME, {}, {"host_spans": spans, "forward_modes": modes.to_dicts()})


def _waits(model: Model, position: int) -> Intervals:
    """When the scheduler's thread of a rank was blocked."""
    graph = model.blame.graph
    stop = graph.stop
    mine = stop.thread == graph.main[position]
    start, end = stop.start[mine].copy(), stop.end[mine].copy()
    kind, ref, before = stop.kind[mine], stop.ref[mine], stop.before[mine]
    receive = kind == STOP_RECEIVE
    sent = graph.control_send[ref * receive] if graph.control_send.size else np.zeros(ref.size, dtype=np.int64)
    end = np.where(receive & (sent <= start), start, end)
    start = np.where(kind == STOP_COMMIT, before, start)
    commit = np.flatnonzero(kind == STOP_COMMIT)
    free = commit[~held_commits(graph, np.flatnonzero(mine)[commit])]
    end[free] = start[free]
    return union(start, end)

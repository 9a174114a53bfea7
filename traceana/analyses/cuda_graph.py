"""CUDA graphs: for which forwards, and what launching costs."""

from __future__ import annotations

import polars as pl

from traceana.categories import matching
from traceana.model.model import Model
from traceana.result import Result
from traceana.tables import RankTables

__all__ = ["NAME", "run"]

NAME = "cuda_graph"


def run(model: Model) -> Result:
    """Fact `cuda_graph`: per rank the forwards in the window, how many of them were graph launches, the host time in
    launch calls of a forward (median), the launches of a forward, by mode, the sizes the server captured, `captures`:
    stream captures that begin in the window, and of the activities in it how many a call in the trace launched
    (`launched`), and how many of these a graph launch did (`by_graphs`)."""
    facts = model.facts.get("cuda_graph")
    sizes = facts.get("captured_sizes") if isinstance(facts, dict) else None
    forwards = model.window_forwards()
    ranks: list[dict[str, object]] = []
    w = model.trace.window
    for rank, tables in zip(model.trace.ranks, model.trace.capture.ranks, strict=True):
        begins = tables.calls.filter(
            pl.col("ts_ns").is_between(w.start_ns, w.end_ns, closed="left")
            & matching(tables.calls.get_column("name"), "StreamBeginCapture")
        )
        launched, by_graphs = _launched(model, rank, tables)
        mine = forwards.filter(pl.col("rank") == rank)
        median = mine.get_column("launch_ns").drop_nulls().quantile(0.5, "lower")
        modes = (
            mine.group_by("mode")
            .agg(
                pl.len().alias("forwards"),
                (pl.col("graphs") > 0).sum().alias("graphed"),
                pl.col("launch_ns").quantile(0.5, "lower").cast(pl.Int64).alias("launch_ns_p50"),
                pl.col("kernels").quantile(0.5, "lower").cast(pl.Int64).alias("kernels_p50"),
            )
            .sort("mode", nulls_last=True)
        )
        ranks.append(
            {
                "rank": rank,
                "forwards": mine.height,
                "graphed": mine.filter(pl.col("graphs") > 0).height,
                "launch_ns_p50": None if median is None else int(median),
                "captured_sizes": sizes,
                "captures": begins.height,
                "launched": launched,
                "by_graphs": by_graphs,
                "by_mode": modes.to_dicts(),
            }
        )
    return Result(NAME, {}, {"cuda_graph": ranks})


def _launched(model: Model, rank: int, tables: RankTables) -> tuple[int, int]:
    """Activities in the window that a launch call in the trace launched, and those of them that a graph launch did."""
    w = model.trace.window
    there = tables.device.get_column("ts_ns").is_between(w.start_ns, w.end_ns, closed="left")
    calls = model.trace.launches[rank].get_column("call_name").filter(there).drop_nulls()
    return int(matching(calls, "Launch").sum()), int(matching(calls, "GraphLaunch").sum())

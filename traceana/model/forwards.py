"""Forwards: the device work of one micro-batch on one stage, from the first to the last activity issued inside
`run_batch`."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceana import schema
from traceana.categories import matching
from traceana.intervals import Intervals, within
from traceana.matching.spans import main_thread
from traceana.tables import RankTables

__all__ = ["find_forwards", "forward_of_activities"]


def forward_of_activities(rank: RankTables, visits: pl.DataFrame, launches: pl.DataFrame) -> np.ndarray:
    """For each row of `rank.device` the visit whose run_batch issued it, or -1. Pipeline sends and receives are no part
    of a forward, nor is what another thread launched."""
    runs = visits.filter(pl.col("run_ts_ns").is_not_null()).with_columns(
        pl.coalesce("run_end_ns", "end_ns").alias("stop")
    )
    if runs.height == 0:
        return np.full(rank.device.height, -1, dtype=np.int64)
    spans = Intervals(runs.get_column("run_ts_ns").to_numpy(), runs.get_column("stop").to_numpy())
    issued = launches.get_column("call_ts_ns").fill_null(-1).to_numpy()
    index = within(issued, spans)
    p2p = rank.device.get_column("collective").is_in(["send", "recv"]).fill_null(False).to_numpy()
    tid = main_thread(rank)
    other = (launches.get_column("call_tid") != tid).fill_null(True).to_numpy()
    ordinal = np.append(runs.get_column("visit").to_numpy(), -1)
    return np.where(p2p | other, -1, ordinal[index])


def find_forwards(rank: RankTables, visits: pl.DataFrame, launches: pl.DataFrame) -> pl.DataFrame:
    """FORWARDS of one rank in order. `busy_ns` is the union of its kernels, copies and fills (its own, not another
    forward's); `launch_ns` sums the calls that launched them, a graph launch once."""
    member = forward_of_activities(rank, visits, launches)
    frame = (
        pl.concat([rank.device.select("ts_ns", "end_ns"), launches], how="horizontal")
        .with_columns(pl.Series("visit", member))
        .filter(pl.col("visit") >= 0)
    )
    if frame.height == 0:
        return schema.FORWARDS.empty()
    # Union per forward: sorted by start, an activity adds what lies beyond the furthest end so far.
    frame = frame.sort("visit", "ts_ns", "end_ns").with_columns(
        pl.col("end_ns").cum_max().shift(1).over("visit").alias("reach")
    )
    gain = (pl.col("end_ns") - pl.max_horizontal("ts_ns", pl.col("reach").fill_null(0))).clip(lower_bound=0)
    totals = frame.group_by("visit").agg(
        pl.col("ts_ns").min(),
        pl.col("end_ns").max(),
        gain.sum().alias("busy_ns"),
        pl.len().cast(pl.Int32).alias("kernels"),
    )
    calls = frame.filter(pl.col("call_row").is_not_null()).unique(["visit", "call_row"])
    calls = calls.with_columns(matching(calls.get_column("call_name"), "GraphLaunch").alias("graphs"))
    priced = calls.group_by("visit").agg(
        (pl.col("call_end_ns") - pl.col("call_ts_ns")).sum().alias("launch_ns"),
        pl.col("graphs").sum().cast(pl.Int32),
    )
    about = visits.select("rank", "visit", "slot", "mode", "batch_size", "tokens")
    out = totals.join(priced, on="visit", how="left").join(about, on="visit", how="left").sort("visit")
    return schema.FORWARDS.frame(out.with_columns(pl.col("graphs").fill_null(0)))

"""Per-stage times of one micro-batch step: GPU time, serial host time, hop costs. The bound and the simulator use them."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceana.categories import matching
from traceana.matching.spans import main_thread
from traceana.model.chain import held_commits
from traceana.model.forwards import forward_of_activities
from traceana.model.graph import STOP_COMMIT, STOP_RECEIVE, STOP_SYNC
from traceana.model.model import Model

__all__ = ["forward_gpu_ns", "hop_costs", "visit_waits"]


def forward_gpu_ns(model: Model, rank: int) -> pl.DataFrame:
    """Per forward of a rank: visit and `gpu_ns`, its busy time with the gaps inside CUDA graphs filled: kernels that
    share a graph launch's correlation count from the first one's start to the last one's end."""
    trace = model.trace
    table = next(r for r in trace.capture.ranks if r.info.rank == rank)
    visits = trace.visits.filter(pl.col("rank") == rank)
    launch = trace.launches[rank]
    frame = (
        pl.concat([table.device.select("ts_ns", "end_ns", "correlation"), launch.select("call_name")], how="horizontal")
        .with_columns(pl.Series("visit", forward_of_activities(table, visits, launch)))
        .filter(pl.col("visit") >= 0)
    )
    graph = matching(frame.get_column("call_name"), "GraphLaunch")
    whole = frame.filter(graph).group_by("visit", "correlation").agg(pl.col("ts_ns").min(), pl.col("end_ns").max())
    spans = pl.concat(
        [whole.select("visit", "ts_ns", "end_ns"), frame.filter(~graph).select("visit", "ts_ns", "end_ns")]
    )
    spans = spans.sort("visit", "ts_ns", "end_ns").with_columns(
        pl.col("end_ns").cum_max().shift(1).over("visit").fill_null(0).alias("reach")
    )
    gain = (pl.col("end_ns") - pl.max_horizontal("ts_ns", "reach")).clip(lower_bound=0)
    return spans.group_by("visit").agg(gain.sum().alias("gpu_ns")).sort("visit")


def visit_waits(model: Model, rank: int) -> pl.DataFrame:
    """Per visit of a rank: visit, `visit_ns`, `wait_ns` (its host blocked: in a receive whose message had not been sent,
    in a sync until the GPU work awaited ended, in the commit of a send until the peer posted), `host_ns` the rest."""
    graph = model.blame.graph
    visits = model.trace.visits.filter(pl.col("rank") == rank).sort("visit")
    position = model.trace.ranks.index(rank)
    tid = main_thread(model.trace.capture.ranks[position])
    stop = graph.stop
    pick = stop.thread == graph.main[position] if tid is not None else np.zeros(stop.thread.size, dtype=np.bool_)
    rows = np.flatnonzero(pick)
    kind, ref, start, end = stop.kind[rows], stop.ref[rows], stop.start[rows], stop.end[rows]
    wait = np.zeros(rows.size, dtype=np.int64)
    receive = kind == STOP_RECEIVE
    late = graph.control_send[ref[receive]] > start[receive]
    wait[receive] = np.where(late, end[receive] - start[receive], 0)
    sync = kind == STOP_SYNC
    wait[sync] = graph.activity.end[ref[sync]] - start[sync]
    commit = kind == STOP_COMMIT
    wait[commit] = np.where(held_commits(graph, rows[commit]), end[commit] - stop.before[rows[commit]], 0)
    at = np.where(commit, np.maximum(start, stop.before[rows]), start)
    begin = visits.get_column("ts_ns").to_numpy()
    total = np.zeros(begin.size, dtype=np.int64)
    if begin.size:  # a rank without a visit has no place for what its thread waited for
        np.add.at(total, np.clip(np.searchsorted(begin, at, side="right") - 1, 0, begin.size - 1), wait)
    return visits.select(
        "visit", "slot", "complete", "mode", "batch_size", (pl.col("end_ns") - pl.col("ts_ns")).alias("visit_ns")
    ).with_columns(pl.Series("wait_ns", total)).with_columns(
        (pl.col("visit_ns") - pl.col("wait_ns")).clip(lower_bound=0).alias("host_ns")
    )  # fmt: skip


def hop_costs(model: Model, gpu: dict[int, pl.DataFrame], slots: int) -> pl.DataFrame:
    """Per stage and micro-batch the cost of the hop to the next stage: stage, visit (of the first stage's forward),
    `hop_ns` (from the end of this stage's forward to the end of the next one's, less that one's GPU time and its
    queueing behind the forward before it; host included) and `queue_ns`. The last stage's hop is the token return."""
    heads = model.stage_heads()
    frames: list[pl.DataFrame] = []
    for stage, rank in enumerate(heads):
        following = heads[(stage + 1) % len(heads)]
        shift = 0 if stage + 1 < len(heads) else slots
        mine = model.trace.forwards.filter(pl.col("rank") == rank).select("visit", pl.col("end_ns").alias("done_ns"))
        theirs = (
            model.trace.forwards.filter(pl.col("rank") == following)
            .sort("ts_ns")
            .with_columns(pl.col("end_ns").shift(1).alias("previous_ns"))
            .join(gpu[following], on="visit", how="inner")
            .select(
                (pl.col("visit") - shift).alias("visit"), pl.col("end_ns").alias("next_ns"), "previous_ns", "gpu_ns"
            )
        )
        joined = mine.join(theirs, on="visit", how="inner").drop_nulls()
        queue = (pl.col("previous_ns") - pl.col("done_ns")).clip(lower_bound=0)
        frames.append(
            joined.select(
                pl.lit(stage).alias("stage"),
                "visit",
                (pl.col("next_ns") - pl.col("done_ns") - pl.col("gpu_ns") - queue).alias("hop_ns"),
                queue.alias("queue_ns"),
            )
        )
    return (
        pl.concat(frames)
        if frames
        else pl.DataFrame(schema={"stage": pl.Int32, "visit": pl.Int64, "hop_ns": pl.Int64, "queue_ns": pl.Int64})
    )

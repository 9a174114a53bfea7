"""What the scheduler's thread of a rank is doing at every instant: a partition of its time into phases."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceana.arrays import distinct
from traceana.categories import matching
from traceana.intervals import IntArray, Intervals, within
from traceana.matching.spans import main_thread
from traceana.tables import RankTables

__all__ = ["HOST_LAUNCH", "HOST_SCHEDULE", "NO_WORK", "PROFILER", "UNKNOWN", "host_phases", "span_numbers"]

HOST_SCHEDULE, HOST_LAUNCH, NO_WORK, PROFILER, UNKNOWN = (
    "host_schedule",
    "host_launch",
    "no_work",
    "profiler",
    "unknown",
)

# Spans that say how, not what for: they do not name a phase. gloo sends also outlive their call, so they do not nest.
# Nor do the ranges of libraries (nsys: NCCL's, and CUB's `cub::DeviceScan`), which lie inside SGLang's.
_NOT_PHASES = (
    r"^(traceana\.slot\[|gloo:|nccl:|nccl[A-Z]|step\[|##|ProfilerStep|PyTorch Profiler|cuda|cublas|cudnn|[A-Za-z_]+::"
    r"|Optimizer\.)"
)
GLUE = "between spans"

_SCHEMA = {"ts_ns": pl.Int64, "end_ns": pl.Int64, "cause": pl.String, "detail": pl.String, "visit": pl.Int64}


def innermost(start: IntArray, end: IntArray, at: IntArray) -> IntArray:
    """Index of the innermost of properly nested spans (sorted by start, longer first) open at each time, or -1."""
    if start.size == 0:
        return np.full(at.shape, -1, dtype=np.int64)
    parent = np.arange(start.size) - 1
    # Climb until the candidate encloses the span; the number of rounds is the depth of the nesting.
    while True:
        out = (parent >= 0) & (end[np.maximum(parent, 0)] < end)
        if not out.any():
            break
        parent[out] = parent[parent[out]]
    index = np.searchsorted(start, at, side="right") - 1
    while True:
        out = (index >= 0) & (end[np.maximum(index, 0)] <= at)
        if not out.any():
            return index.astype(np.int64)
        index[out] = parent[index[out]]


def host_phases(rank: RankTables, visits: pl.DataFrame) -> pl.DataFrame:
    """Phases of the scheduler's thread in order, without gap from its first to its last event: ts_ns, end_ns, cause
    (host_schedule, host_launch, no_work, profiler), detail, visit.

    Inside `run_batch` the host launches; elsewhere it schedules, and `detail` is the innermost span without the
    `scheduler.` prefix; in a visit without a batch there is no work; profiler overhead records win over all of it.
    Without scheduler spans the frame is empty: what the host does cannot be known.
    """
    if visits.height == 0:
        return pl.DataFrame(schema=_SCHEMA)
    tid = main_thread(rank)
    own = rank.annotations.filter(pl.col("tid") == tid)
    spans = own.filter(~matching(own.get_column("name"), _NOT_PHASES)).sort("ts_ns", "end_ns", descending=[False, True])
    start, end = spans.get_column("ts_ns").to_numpy(), spans.get_column("end_ns").to_numpy()
    graph = rank.calls.filter((pl.col("tid") == tid) & matching(rank.calls.get_column("name"), "GraphLaunch"))
    over = rank.overheads
    visit_start, visit_end = visits.get_column("ts_ns").to_numpy(), visits.get_column("end_ns").to_numpy()
    marks = [start, end, visit_start, visit_end]
    for frame in (graph, over):
        marks += [frame.get_column("ts_ns").to_numpy(), frame.get_column("end_ns").to_numpy()]
    cuts = distinct(np.concatenate(marks))
    cuts = cuts[(cuts >= visit_start[0]) & (cuts <= visit_end[-1])]
    at = cuts[:-1]
    inner = innermost(start, end, at)
    names = spans.get_column("name").cast(pl.String).str.strip_prefix("scheduler.").to_list()
    table = np.array([*names, GLUE], dtype=object)
    detail = table[inner]
    runs = visits.filter(pl.col("run_ts_ns").is_not_null()).with_columns(
        pl.coalesce("run_end_ns", "end_ns").alias("stop")
    )
    run_start, run_end = runs.get_column("run_ts_ns").to_numpy(), runs.get_column("stop").to_numpy()
    run = np.searchsorted(run_start, at, side="right") - 1
    launching = (run >= 0) & (at < np.append(run_end, 0)[run])
    visit = np.clip(np.searchsorted(visit_start, at, side="right") - 1, 0, visit_start.size - 1)
    # Only whole visits are known to be empty: a cut one may have held a batch outside the trace.
    empty = (visits.get_column("run_ts_ns").is_null() & visits.get_column("complete")).to_numpy()[visit]
    cause = np.full(at.size, HOST_SCHEDULE, dtype=object)
    cause[launching] = HOST_LAUNCH
    cause[empty] = NO_WORK
    in_graph = _covered(at, graph.get_column("ts_ns").to_numpy(), graph.get_column("end_ns").to_numpy())
    detail[launching & in_graph] = "graph launch"
    profiling = _covered(at, over.get_column("ts_ns").to_numpy(), over.get_column("end_ns").to_numpy())
    cause[profiling] = PROFILER
    rows = pl.DataFrame(
        {
            "ts_ns": at, "end_ns": cuts[1:], "cause": cause.tolist(), "detail": detail.tolist(),
            "visit": visits.get_column("visit").to_numpy()[visit],
        },
        schema=_SCHEMA,
    )  # fmt: skip
    new = (pl.struct("cause", "detail", "visit") != pl.struct("cause", "detail", "visit").shift(1)).fill_null(True)
    return (
        rows.with_columns(new.cum_sum().alias("run"))
        .group_by("run", maintain_order=True)
        .agg(pl.col("ts_ns").first(), pl.col("end_ns").last(), pl.col("cause", "detail", "visit").first())
        .drop("run")
    )


def span_numbers(phases: pl.DataFrame, at: IntArray) -> IntArray:
    """A number for the scheduler's span at each time, equal for spans of one name; -1 where none is known."""
    index = within(at, Intervals(phases.get_column("ts_ns").to_numpy(), phases.get_column("end_ns").to_numpy()))
    kinds = phases.get_column("detail").cast(pl.Categorical).to_physical().to_numpy().astype(np.int64)
    return np.append(kinds, -1)[index]


def _covered(at: IntArray, start: IntArray, end: IntArray) -> np.ndarray:
    """Whether each time lies in one of the intervals, which may overlap."""
    if start.size == 0:
        return np.zeros(at.size, dtype=np.bool_)
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(end[order])
    index = np.searchsorted(start[order], at, side="right") - 1
    return (index >= 0) & (at < reach[np.maximum(index, 0)])

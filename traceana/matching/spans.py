"""The scheduler's thread of a rank, and its spans by name."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceana.intervals import Intervals
from traceana.tables import RankTables

__all__ = ["ANCHORS", "main_thread", "span_set"]

# First that occurs wins: the pipeline loop's own span, else the one every scheduler loop has.
ANCHORS = ("recv_requests", "scheduler.recv_requests")


def main_thread(rank: RankTables) -> int | None:
    """The thread that schedules: the one with the most `recv_requests` spans, else with the most annotations."""
    names = rank.annotations.filter(pl.col("name").is_in(ANCHORS))
    frame = names if names.height else rank.annotations
    if frame.height == 0:
        frame = rank.calls
    if frame.height == 0:
        return None
    counts = frame.group_by("tid").len().sort(["len", "tid"], descending=[True, False])
    return int(counts.get_column("tid")[0])


def span_set(annotations: pl.DataFrame, name: str) -> Intervals:
    """The spans of one name as a disjoint sorted set; of nested spans of the same name the outer one stays."""
    rows = annotations.filter(pl.col("name") == name).sort("ts_ns", "end_ns", descending=[False, True])
    start = rows.get_column("ts_ns").to_numpy()
    end = rows.get_column("end_ns").to_numpy()
    if start.size > 1:
        reach = np.maximum.accumulate(end)
        outer = np.concatenate(([True], start[1:] >= reach[:-1]))
        start, end = start[outer], end[outer]
    return Intervals(start, end)

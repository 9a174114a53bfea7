"""Move tables from each rank's own clock to trace time: the clock of the reference rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from traceana.clock.model import ClockModel, Correction
from traceana.tables import RankTables

__all__ = ["apply_clock", "shift_controls", "shift_messages", "shift_rows"]


def _moved(series: pl.Series, by: Correction) -> pl.Series:
    if series.null_count():
        known = series.is_not_null()
        values = series.fill_null(0).to_numpy()
        moved = pl.Series(series.name, values - by.offset(values), dtype=pl.Int64)
        return moved.to_frame().select(pl.when(known).then(pl.col(series.name)).alias(series.name)).to_series()
    values = series.to_numpy()
    return pl.Series(series.name, values - by.offset(values), dtype=pl.Int64)


def apply_clock(rank: RankTables, model: ClockModel) -> RankTables:
    """The tables of `rank` on trace time (integer ns). Order is kept; durations too, unless the clock drifts."""
    me = rank.info.rank
    cpu, gpu = model.cpu[me], model.gpu[me]

    def move(name: str, frame: pl.DataFrame) -> pl.DataFrame:
        by = gpu if name in ("device", "gpu_annotations") else cpu
        return frame.with_columns(_moved(frame.get_column(c), by) for c in ("ts_ns", "end_ns"))

    return rank.mapped(move)


def shift_rows(
    frame: pl.DataFrame, rank_column: str, columns: Sequence[str], clocks: Mapping[int, Correction]
) -> pl.DataFrame:
    """`columns` of every row moved by the clock of the rank in `rank_column` (`model.cpu` or `model.gpu`)."""
    if frame.height == 0:
        return frame
    rank = frame.get_column(rank_column).to_numpy()
    order = np.argsort(rank, kind="stable")
    starts = np.flatnonzero(np.concatenate(([True], np.diff(rank[order]) != 0)))
    out: list[pl.Series] = []
    for name in columns:
        series = frame.get_column(name)
        values = series.fill_null(0).to_numpy().copy()
        for lo, hi in zip(starts.tolist(), [*starts[1:].tolist(), rank.size], strict=True):
            rows = order[lo:hi]
            values[rows] -= clocks[int(rank[rows[0]])].offset(values[rows])
        moved = pl.Series(name, values, dtype=pl.Int64)
        if series.null_count():
            moved = moved.to_frame().select(pl.when(series.is_not_null()).then(pl.col(name)).alias(name)).to_series()
        out.append(moved)
    return frame.with_columns(out)


def shift_messages(messages: pl.DataFrame, model: ClockModel) -> pl.DataFrame:
    """MESSAGES on trace time."""
    sent = shift_rows(messages, "src", ["send_ts_ns", "send_end_ns"], model.gpu)
    return shift_rows(sent, "dst", ["recv_ts_ns", "recv_end_ns"], model.gpu)


def shift_controls(controls: pl.DataFrame, model: ClockModel) -> pl.DataFrame:
    """CONTROLS on trace time."""
    sent = shift_rows(controls, "src", ["send_ts_ns", "send_end_ns"], model.cpu)
    return shift_rows(sent, "dst", ["recv_ts_ns", "recv_end_ns"], model.cpu)

"""Launch calls joined to the device activities they issued, by correlation id."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceana.intervals import IntArray
from traceana.tables import RankTables

__all__ = ["LAUNCHING", "launches"]

# Calls that put work on a stream. Kineto gives every call a correlation id, also the ones that launch nothing; an
# activity's id names the call that launched it, so the name is only needed to count launches and to price them.
LAUNCHING = r"^(cuda|cu|hip)(Launch|Graph(Launch)|Memcpy|Memset|LaunchKernel|LaunchCooperative)"
_OF = {"call_ts_ns": "ts_ns", "call_end_ns": "end_ns", "call_name": "name", "call_tid": "tid"}


def launches(rank: RankTables) -> pl.DataFrame:
    """One row per row of `rank.device`, in the same order: `call_row` (row in `rank.calls`), `call_ts_ns`,
    `call_end_ns`, `call_name`, `call_tid`; null where no call in the trace launched it.

    One `cudaGraphLaunch` launches many kernels: all share its correlation id. Where a correlation id occurs on two
    calls (a defect the reader counts), the first call in time is taken.
    """
    device = rank.device.get_column("correlation")
    calls = rank.calls.get_column("correlation")
    row = _first_of(calls, device)
    index = pl.Series("call_row", row)
    if (row < 0).any():
        index = index.set(pl.Series(row < 0), None)
    if not calls.len():
        return pl.DataFrame(
            {"call_row": index, **{name: rank.calls.get_column(of).clear(row.size) for name, of in _OF.items()}}
        )
    return rank.calls.select(pl.col(of).gather(index).alias(name) for name, of in _OF.items()).insert_column(0, index)


def _first_of(calls: pl.Series, device: pl.Series) -> IntArray:
    """The row of the first call with the correlation id of each activity, -1 where there is none."""
    rows = np.flatnonzero(calls.is_not_null().to_numpy())
    ids = calls.drop_nulls().to_numpy()
    order = np.argsort(ids, kind="stable")
    rows, ids = rows[order], ids[order]
    wanted = device.fill_null(0).to_numpy()
    at = np.minimum(np.searchsorted(ids, wanted), max(ids.size - 1, 0))
    if not ids.size:
        return np.full(wanted.size, -1, dtype=np.int64)
    return np.where((ids[at] == wanted) & device.is_not_null().to_numpy(), rows[at], -1)

"""Launch calls joined to the device activities they issued, by correlation id."""

from __future__ import annotations

import polars as pl

from traceana.tables import RankTables

__all__ = ["LAUNCHING", "launches"]

# Calls that put work on a stream. Kineto gives every call a correlation id, also the ones that launch nothing; an
# activity's id names the call that launched it, so the name is only needed to count launches and to price them.
LAUNCHING = r"^(cuda|cu|hip)(Launch|Graph(Launch)|Memcpy|Memset|LaunchKernel|LaunchCooperative)"


def launches(rank: RankTables) -> pl.DataFrame:
    """One row per row of `rank.device`, in the same order: `call_row` (row in `rank.calls`), `call_ts_ns`,
    `call_end_ns`, `call_name`, `call_tid`; null where no call in the trace launched it.

    One `cudaGraphLaunch` launches many kernels: all share its correlation id. Where a correlation id occurs on two
    calls (a defect the reader counts), the first call in time is taken.
    """
    calls = (
        rank.calls.lazy()
        .with_row_index("call_row")
        .filter(pl.col("correlation").is_not_null())
        .select(
            pl.col("call_row").cast(pl.Int64),
            pl.col("correlation"),
            pl.col("ts_ns").alias("call_ts_ns"),
            pl.col("end_ns").alias("call_end_ns"),
            pl.col("name").alias("call_name"),
            pl.col("tid").alias("call_tid"),
        )
        .unique("correlation", keep="first", maintain_order=True)
    )
    return (
        rank.device.lazy()
        .select("correlation")
        .join(calls, on="correlation", how="left", maintain_order="left")
        .drop("correlation")
        .collect()
    )

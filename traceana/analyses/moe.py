"""MoE: its time by kernel and stage, and how it spreads over the micro-batches."""

from __future__ import annotations

import polars as pl

from traceana.model.model import Model, quantiles_ns
from traceana.result import Result

__all__ = ["NAME", "run"]

NAME = "moe"


def run(model: Model) -> Result:
    """Fact `moe`: per rank total time, share of busy, kernels, and `per_forward_ns`: the quantiles of a forward's MoE
    time, whose spread is what uneven routing costs. Kernel times are sums of durations clipped to the window; where
    kernels overlap they exceed the busy time of the class."""
    trace = model.trace
    lo, hi = trace.window.start_ns, trace.window.end_ns
    names = [n for n, c in trace.kernel_class.items() if c == "moe"]
    ranks: list[dict[str, object]] = []
    for rank in trace.capture.ranks:
        me = rank.info.rank
        rows = (
            rank.device.filter(pl.col("name").is_in(names))
            .filter((pl.col("ts_ns") < hi) & (pl.col("end_ns") > lo))
            .with_columns((pl.col("end_ns").clip(lo, hi) - pl.col("ts_ns").clip(lo, hi)).alias("ns"))
        )
        kernels = (
            rows.group_by(pl.col("name").cast(pl.String))
            .agg(
                pl.len().alias("count"),
                pl.col("ns").sum().alias("total_ns"),
                pl.col("ns").quantile(0.5, "lower").cast(pl.Int64).alias("p50_ns"),
                pl.col("ns").quantile(0.99, "lower").cast(pl.Int64).alias("p99_ns"),
            )
            .sort("total_ns", "name", descending=[True, False])
        )
        busy = model.states[me].compact.filter(pl.col("state") == "busy")
        length = pl.col("end_ns") - pl.col("ts_ns")
        total, owned = busy.select(
            length.sum().alias("all"), length.filter(pl.col("kernel_class") == "moe").sum().alias("moe")
        ).row(0)
        forwards = trace.forwards.filter(
            (pl.col("rank") == me) & (pl.col("ts_ns") >= lo) & (pl.col("end_ns") <= hi)
        ).sort("ts_ns")
        per = rows.sort("ts_ns").join_asof(
            forwards.select(pl.col("ts_ns").alias("begin_ns"), pl.col("end_ns").alias("stop_ns"), "visit"),
            left_on="ts_ns", right_on="begin_ns", strategy="backward",
        ).filter(pl.col("ts_ns") < pl.col("stop_ns")).group_by("visit").agg(pl.col("ns").sum())  # fmt: skip
        ranks.append(
            {
                "rank": me,
                "total_ns": int(owned or 0),
                "share_of_busy": (owned or 0) / total if total else None,
                "kernels": kernels.to_dicts(),
                "per_forward_ns": quantiles_ns(per.get_column("ns"), with_count=True),
            }
        )
    return Result(NAME, {}, {"moe": ranks})

"""What part of a communication kernel moves data and what part waits for the peer.

A receive waits until its send has started. A send is no rendezvous: below the channel's credit it ends before the
receive starts, and then each side's own kernel is transfer. It waits only where it lasts longer than its size needs
(the floor: a low quantile of matched durations) while the receive had not started. An in-stage collective moves data
from its last arrival on. See docs/concepts/attribution.md, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

__all__ = ["collective_parts", "message_floors", "message_parts"]

_FLOOR_QUANTILE = 0.1

PARTS = {"rank": pl.Int32, "row": pl.Int64, "ts_ns": pl.Int64, "end_ns": pl.Int64, "transfer_ns": pl.Int64,
         "ambiguous_ns": pl.Int64, "split": pl.String}  # fmt: skip


def _low(name: str) -> pl.Expr:
    return pl.col(name).quantile(_FLOOR_QUANTILE, "lower").cast(pl.Int64)


def _spread(name: str) -> pl.Expr:
    return pl.col(name).max() - pl.col(name).min()


def message_floors(messages: pl.DataFrame) -> pl.DataFrame:
    """Per (src, dst, bytes): `send_floor_ns` and `recv_floor_ns`, the low quantile of how long the two kernels surely
    moved data."""
    if messages.height == 0:
        return pl.DataFrame(
            schema={
                "src": pl.Int32,
                "dst": pl.Int32,
                "bytes": pl.Int64,
                "send_floor_ns": pl.Int64,
                "recv_floor_ns": pl.Int64,
            }
        )
    keys = ["src", "dst", "bytes"]
    whole = (pl.col("send_end_ns") - pl.col("send_ts_ns")).alias("whole")
    rest = (pl.col("send_end_ns") - pl.col("recv_ts_ns")).alias("rest")
    # A send that its receive finds under way may have been held until then, or may just be slow. Sends that met no
    # receive on the way tell; without any, what varies less tells: the whole kernel, or what follows the receive.
    met = pl.col("recv_ts_ns").is_between(pl.col("send_ts_ns"), pl.col("send_end_ns"), closed="none").alias("met")
    sends = (
        messages.with_columns(whole, rest, met)
        .group_by(keys)
        .agg(
            pl.col("whole").filter(~pl.col("met")).quantile(_FLOOR_QUANTILE, "lower").cast(pl.Int64).alias("clean"),
            pl.when(_spread("rest") <= _spread("whole")).then(_low("rest")).otherwise(_low("whole")).alias("guess"),
        )
        .with_columns(pl.coalesce("clean", "guess").alias("send_floor_ns"))
        .drop("clean", "guess")
    )
    moving = pl.col("recv_end_ns") - pl.max_horizontal("recv_ts_ns", "send_ts_ns")
    receives = (
        messages.with_columns(moving.clip(lower_bound=0).alias("d"))
        .group_by(keys)
        .agg(_low("d").alias("recv_floor_ns"))
    )
    return sends.join(receives, on=keys, how="left", nulls_equal=True).sort(keys)


def message_parts(messages: pl.DataFrame, uncertainty_ns: Mapping[int, int | None]) -> pl.DataFrame:
    """One row per kernel of a message: rank, row, ts_ns, end_ns, `transfer_ns` (the last nanoseconds of the kernel
    that move data), `ambiguous_ns` (nanoseconds just before or inside them that the clock cannot place), `split`
    (clock, floor or eager).

    Where the clocks of the two ranks are known less well than the transfer is long, the clock-free split is taken
    (the last min(duration, floor)), and what the two splits place differently is ambiguous.
    """
    if messages.height == 0:
        return pl.DataFrame(schema=PARTS)
    unknown = 1 << 62
    slack = {r: (unknown if u is None else u) for r, u in uncertainty_ns.items()}
    frame = messages.join(
        message_floors(messages), on=["src", "dst", "bytes"], how="left", nulls_equal=True
    ).with_columns(
        (
            pl.col("src").replace_strict(slack, default=unknown, return_dtype=pl.Int64)
            + pl.col("dst").replace_strict(slack, default=unknown, return_dtype=pl.Int64)
        )
        .clip(upper_bound=unknown)
        .alias("slack")
    )
    dur = pl.col("recv_end_ns") - pl.col("recv_ts_ns")
    eager = pl.col("send_end_ns") + pl.col("slack").clip(upper_bound=unknown) <= pl.col("recv_ts_ns")
    by_clock = (pl.col("recv_end_ns") - pl.max_horizontal("recv_ts_ns", "send_ts_ns")).clip(0, None)
    by_clock = pl.min_horizontal(by_clock, dur)
    by_floor = pl.min_horizontal(dur, pl.col("recv_floor_ns"))
    # With the receive waiting for a whole slack before the send came, or the send long done, the order is certain.
    certain = (pl.col("slack") <= by_clock) | eager
    receives = frame.select(
        pl.col("dst").alias("rank"),
        pl.col("recv_row").alias("row"),
        pl.col("recv_ts_ns").alias("ts_ns"),
        pl.col("recv_end_ns").alias("end_ns"),
        pl.when(eager).then(dur).when(certain).then(by_clock).otherwise(by_floor).cast(pl.Int64).alias("transfer_ns"),
        pl.when(certain).then(0).otherwise((by_clock - by_floor).abs()).cast(pl.Int64).alias("ambiguous_ns"),
        pl.when(eager)
        .then(pl.lit("eager"))
        .when(certain)
        .then(pl.lit("clock"))
        .otherwise(pl.lit("floor"))
        .alias("split"),
    )
    length = pl.col("send_end_ns") - pl.col("send_ts_ns")
    excess = (length - pl.col("send_floor_ns")).clip(lower_bound=0)
    late = (pl.min_horizontal("recv_ts_ns", "send_end_ns") - pl.col("send_ts_ns")).clip(lower_bound=0)
    blocked = pl.col("recv_ts_ns") < pl.col("send_end_ns")
    waits = pl.when(blocked).then(pl.min_horizontal(excess, late)).otherwise(0)
    sends = frame.select(
        pl.col("src").alias("rank"),
        pl.col("send_row").alias("row"),
        pl.col("send_ts_ns").alias("ts_ns"),
        pl.col("send_end_ns").alias("end_ns"),
        (length - waits).cast(pl.Int64).alias("transfer_ns"),
        pl.lit(0, dtype=pl.Int64).alias("ambiguous_ns"),
        pl.when(waits > 0).then(pl.lit("clock")).otherwise(pl.lit("eager")).alias("split"),
    )
    return pl.concat([receives, sends])


def collective_parts(collectives: pl.DataFrame) -> pl.DataFrame:
    """One row per kernel of a matched collective: rank, row, ts_ns, end_ns, `transfer_ns` (from the last arrival on),
    `last_rank` (who arrived last)."""
    if collectives.height == 0:
        return pl.DataFrame(
            schema={**{k: PARTS[k] for k in ("rank", "row", "ts_ns", "end_ns", "transfer_ns")}, "last_rank": pl.Int32}
        )
    group = ["group", "collective", "instance"]
    last = (
        collectives.sort("ts_ns", "rank")
        .group_by(group, maintain_order=True)
        .agg(pl.col("ts_ns").last().alias("last_ts_ns"), pl.col("rank").last().alias("last_rank"))
    )
    moved = (pl.col("end_ns") - pl.max_horizontal("ts_ns", "last_ts_ns")).clip(lower_bound=0)
    return collectives.join(last, on=group, how="left").select(
        "rank",
        "row",
        "ts_ns",
        "end_ns",
        pl.min_horizontal(moved, pl.col("end_ns") - pl.col("ts_ns")).alias("transfer_ns"),
        "last_rank",
    )

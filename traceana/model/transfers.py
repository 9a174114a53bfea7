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

_UNKNOWN = 1 << 60

PARTS = {"rank": pl.Int32, "row": pl.Int64, "ts_ns": pl.Int64, "end_ns": pl.Int64, "transfer_ns": pl.Int64,
         "sure_ns": pl.Int64, "ambiguous_ns": pl.Int64, "split": pl.String}  # fmt: skip


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


def _slack(uncertainty_ns: Mapping[int, int | None], *columns: str) -> pl.Expr:
    """How far the clocks of the ranks in `columns` may be off against each other: the sum of theirs."""
    slack = {r: (_UNKNOWN if u is None else min(u, _UNKNOWN)) for r, u in uncertainty_ns.items()}
    each = [pl.col(c).replace_strict(slack, default=_UNKNOWN, return_dtype=pl.Int64) for c in columns]
    return pl.sum_horizontal(each).clip(upper_bound=_UNKNOWN)


def message_parts(messages: pl.DataFrame, uncertainty_ns: Mapping[int, int | None]) -> pl.DataFrame:
    """One row per kernel of a message: rank, row, ts_ns, end_ns, `transfer_ns` (the last nanoseconds of the kernel that
    move data, at the clocks as estimated), `sure_ns` (those that do whatever the clocks are), `ambiguous_ns` (those just
    before them that the clocks cannot place), `split` (clock, floor or eager).

    A receive waits until its send has started, which its own clock knows to within the two clocks' uncertainty. Where
    that is not known at all, the clock-free split is taken (the last min(duration, floor)), and what the two splits
    place differently is ambiguous.
    """
    if messages.height == 0:
        return pl.DataFrame(schema=PARTS)
    frame = messages.join(
        message_floors(messages), on=["src", "dst", "bytes"], how="left", nulls_equal=True
    ).with_columns(_slack(uncertainty_ns, "src", "dst").alias("slack"))
    return pl.concat([_receives(frame), _sends(frame)])


def _receives(frame: pl.DataFrame) -> pl.DataFrame:
    dur = pl.col("recv_end_ns") - pl.col("recv_ts_ns")
    eager = pl.col("send_end_ns") + pl.col("slack") <= pl.col("recv_ts_ns")
    lag = pl.col("send_ts_ns") - pl.col("recv_ts_ns")
    # How long the kernel may have waited: as estimated, at least and at most.
    waited = pl.min_horizontal(lag.clip(lower_bound=0), dur)
    least = pl.min_horizontal((lag - pl.col("slack")).clip(lower_bound=0), dur)
    most = pl.min_horizontal((lag + pl.col("slack")).clip(lower_bound=0), dur)
    by_floor = pl.min_horizontal(dur, pl.col("recv_floor_ns"))
    known = pl.col("slack") < _UNKNOWN
    by_clock = dur - waited
    pick = pl.when(eager)
    return frame.select(
        pl.col("dst").alias("rank"),
        pl.col("recv_row").alias("row"),
        pl.col("recv_ts_ns").alias("ts_ns"),
        pl.col("recv_end_ns").alias("end_ns"),
        pick.then(dur).when(known & (pl.col("slack") <= by_clock)).then(by_clock).otherwise(by_floor).cast(pl.Int64).alias("transfer_ns"),
        pick.then(dur).when(known).then(dur - most).otherwise(by_floor).cast(pl.Int64).alias("sure_ns"),
        pick.then(0).when(known).then(most - least).otherwise((by_clock - by_floor).abs()).cast(pl.Int64).alias("ambiguous_ns"),
        pick.then(pl.lit("eager")).when(known).then(pl.lit("clock")).otherwise(pl.lit("floor")).alias("split"),
    )  # fmt: skip


def _sends(frame: pl.DataFrame) -> pl.DataFrame:
    length = pl.col("send_end_ns") - pl.col("send_ts_ns")
    excess = (length - pl.col("send_floor_ns")).clip(lower_bound=0)
    late = pl.col("recv_ts_ns") - pl.col("send_ts_ns")

    def held(off: pl.Expr) -> pl.Expr:
        """How long it waited if the receive began `off` later than it seems; one that ended before never did."""
        waits = pl.min_horizontal(excess, (late + off).clip(lower_bound=0))
        return pl.when(late + off < length).then(waits).otherwise(0)

    slack = pl.col("slack")
    waits, bounds = held(pl.lit(0)), (held(-slack), held(pl.lit(0)), held(slack))
    # Between the bounds the wait first grows with the receive's start, then drops to none as the send ends before it.
    top = (
        pl.when((late - slack < length) & (late + slack >= length)).then(pl.min_horizontal(excess, length)).otherwise(0)
    )
    least, most = pl.min_horizontal(*bounds), pl.max_horizontal(*bounds, top)
    return frame.select(
        pl.col("src").alias("rank"),
        pl.col("send_row").alias("row"),
        pl.col("send_ts_ns").alias("ts_ns"),
        pl.col("send_end_ns").alias("end_ns"),
        (length - waits).cast(pl.Int64).alias("transfer_ns"),
        (length - most).cast(pl.Int64).alias("sure_ns"),
        (most - least).cast(pl.Int64).alias("ambiguous_ns"),
        pl.when(waits > 0).then(pl.lit("clock")).otherwise(pl.lit("eager")).alias("split"),
    )


COLLECTIVE_PARTS = {"rank": pl.Int32, "row": pl.Int64, "ts_ns": pl.Int64, "end_ns": pl.Int64, "sure_ns": pl.Int64,
                    "ambiguous_ns": pl.Int64, "last_rank": pl.Int32}  # fmt: skip


def collective_parts(collectives: pl.DataFrame, uncertainty_ns: Mapping[int, int | None]) -> pl.DataFrame:
    """One row per kernel of a matched collective: rank, row, ts_ns, end_ns, `sure_ns` (its last nanoseconds, which move
    data), `ambiguous_ns` (those just before them that the clocks cannot place), `last_rank` (who arrived last; null
    where that cannot be told).

    Data move from the last arrival on. The clocks tell it, and so does the shortest kernel of the collective without
    any clock, since all of them end together: it is the last rank's, and moves data as long as it runs. Where the
    clocks are not known exactly, what the two place differently is ambiguous.
    """
    if collectives.height == 0:
        return pl.DataFrame(schema=COLLECTIVE_PARTS)
    group = ["group", "collective", "instance"]
    dur = pl.col("end_ns") - pl.col("ts_ns")
    last = (
        collectives.with_columns(_slack(uncertainty_ns, "rank").alias("slack"))
        .sort("ts_ns", "rank")
        .group_by(group, maintain_order=True)
        .agg(
            pl.col("ts_ns").last().alias("last_ts_ns"),
            pl.col("rank").last().alias("by_clock"),
            dur.min().alias("shortest_ns"),
            pl.col("rank").sort_by(dur, "rank", descending=[False, True]).first().alias("by_length"),
            pl.col("slack").max(),
        )
    )
    moved = pl.min_horizontal((pl.col("end_ns") - pl.col("last_ts_ns")).clip(lower_bound=0), dur)
    exact = pl.col("slack") == 0
    return collectives.join(last, on=group, how="left").select(
        "rank",
        "row",
        "ts_ns",
        "end_ns",
        pl.when(exact).then(moved).otherwise(pl.min_horizontal(moved, "shortest_ns")).alias("sure_ns"),
        pl.when(exact).then(0).otherwise((moved - pl.col("shortest_ns")).abs()).cast(pl.Int64).alias("ambiguous_ns"),
        pl.when(exact | (pl.col("by_clock") == pl.col("by_length"))).then("by_clock").alias("last_rank"),
    )

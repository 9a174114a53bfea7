"""Arrows of the merged timeline: which slice of which track points to which. Ends of one arrow share a 64-bit id.

An id is `kind << 60 | rank << 40 | n`, so it is unique in the file: n counts rows of the table (of the rank) where the
arrow starts. Columns that hold ids are named `flow:...` and are UInt64, null or 0 where there is no arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import polars as pl

from traceana.arrays import IntArray, numbered
from traceana.tables.capture import RankInfo

__all__ = [
    "FORWARD_FLOWS",
    "Flow",
    "link_chains",
    "link_forwards",
    "link_launches",
    "link_messages",
    "pipeline_flows",
    "with_arrows",
]

U64 = pl.UInt64()


class Flow:
    """Kinds of arrows."""

    LAUNCH = 1  # call -> first activity that it launched
    FORWARD = 2  # forward on a stage -> forward of the same visit on the next stage
    TOKENS = 3  # forward on the last stage -> the slot's next forward on the first stage
    MESSAGE = 4  # NCCL send -> the receive that it pairs with
    CHAIN = 5  # activity of the stage that caused a bubble -> the stretch of the bubble
    PIPELINE = 4  # added to FORWARD and TOKENS for the same arrows in the view across ranks


FORWARD_FLOWS = ("flow:from_stage", "flow:to_stage", "flow:from_tokens", "flow:to_tokens")


def _id(kind: int, rank: pl.Expr, n: pl.Expr) -> pl.Expr:
    return pl.lit(kind << 60, U64) | (rank.cast(U64) * pl.lit(1 << 40, U64)) | n.cast(U64)


def link_launches(device: pl.DataFrame, calls: pl.DataFrame, rank: int) -> tuple[pl.Series, pl.Series]:
    """`flow:launch` of every device activity and every call of one rank. Of the activities that share a call (the
    kernels of a CUDA graph) the first one has the arrow. n is the row of the activity."""
    known = [np.flatnonzero(t.get_column("correlation").is_not_null().to_numpy()) for t in (device, calls)]
    values = [t.get_column("correlation").drop_nulls().to_numpy() for t in (device, calls)]
    different, place = numbered(np.concatenate(values))
    first = np.full((2, len(different)), -1)
    for side, (rows, where) in enumerate(zip(known, np.split(place, [len(known[0])]), strict=True)):
        first[side, where[::-1]] = rows[::-1]
    activity, call = first[:, (first >= 0).all(axis=0)]
    ids = pl.select(_id(Flow.LAUNCH, pl.lit(rank), pl.lit(pl.Series(activity)))).to_series().alias("flow:launch")
    return _at(device.height, activity, ids), _at(calls.height, call, ids)


def _at(height: int, rows: IntArray, ids: pl.Series) -> pl.Series:
    """A column with `ids` in `rows` and no arrow (0) elsewhere."""
    values = np.zeros(height, np.uint64)
    values[rows] = ids.to_numpy()
    return pl.Series(ids.name, values)


def link_forwards(
    forwards: pl.DataFrame, visits: pl.DataFrame, infos: Sequence[RankInfo], stages: Mapping[int, int]
) -> pl.DataFrame:
    """FORWARDS with `flow:from_stage`, `flow:to_stage` (the same visit on the neighbouring stages of the same tensor
    and data parallel lane), `flow:from_tokens` and `flow:to_tokens` (last stage to the slot's next visit on the first).

    `stages` is the pipeline stage of each rank; ranks without one get no arrows, and neither does a capture of one
    stage. n is the row of the forward in `forwards`.
    """
    place = pl.DataFrame(
        {
            "rank": [i.rank for i in infos],
            "stage": [stages.get(i.rank) for i in infos],
            "lane": [f"{i.tp_rank}/{i.dp_rank}/{i.ep_rank}" for i in infos],
        },
        schema={"rank": pl.Int32, "stage": pl.Int64, "lane": pl.String},
    )
    last = max(stages.values(), default=0)
    rows = forwards.with_row_index("n").join(place, on="rank", how="left", maintain_order="left")
    if last == 0:
        return rows.with_columns(pl.lit(None, U64).alias(name) for name in FORWARD_FLOWS).drop("n", "stage", "lane")
    slots = _slots(visits) or _slots(forwards)
    one = rows.filter(pl.col("stage").is_not_null()).unique(["rank", "visit"], keep="first", maintain_order=True)
    source = one.select("n", "lane", "stage", "visit", "rank", "slot")
    target = one.select(pl.col("n").alias("to"), "lane", "stage", "visit", "slot")
    ahead = source.with_columns(pl.col("stage") + 1).join(target, on=["lane", "stage", "visit"])
    back = (
        source.filter(pl.col("stage") == last, pl.col("slot").is_not_null())
        .with_columns(pl.lit(0, pl.Int64).alias("stage"), pl.col("visit") + (slots or 0))
        .join(target, on=["lane", "stage", "visit", "slot"])
        if slots
        else source.head(0).with_columns(pl.lit(0, pl.UInt32).alias("to"))
    )
    for name, kind, pairs in (("stage", Flow.FORWARD, ahead), ("tokens", Flow.TOKENS, back)):
        ids = pairs.select("n", "to", _id(kind, pl.col("rank"), pl.col("n")).alias("id"))
        out = ids.select("n", pl.col("id").alias(f"flow:to_{name}"))
        into = ids.select(pl.col("to").alias("n"), pl.col("id").alias(f"flow:from_{name}"))
        rows = rows.join(out, on="n", how="left", maintain_order="left")
        rows = rows.join(into, on="n", how="left", maintain_order="left")
    return rows.drop("n", "stage", "lane")


def pipeline_flows(linked: pl.DataFrame) -> list[pl.Series]:
    """The arrows of `link_forwards` once more, with ids of their own, for copies of the same slices."""
    return linked.select(pl.col(FORWARD_FLOWS) + pl.lit(Flow.PIPELINE << 60, U64)).get_columns()


def _slots(frame: pl.DataFrame) -> int | None:
    """Slots of the scheduler's loop, from the highest slot that occurs."""
    highest = frame.get_column("slot").max() if frame.height else None
    return highest + 1 if isinstance(highest, int) else None


def link_messages(messages: pl.DataFrame) -> pl.DataFrame:
    """MESSAGES with `flow:message`; n is the row in `messages`."""
    rows = messages.with_row_index("n")
    return rows.with_columns(_id(Flow.MESSAGE, pl.col("src"), pl.col("n")).alias("flow:message")).drop("n")


def link_chains(chains: pl.DataFrame, spans: Callable[[int], pl.DataFrame]) -> dict[int, pl.DataFrame]:
    """For each rank with arrows: slice (number of a top-level slice of its Attribution track), and one `flow:chain_K` and
    one `flow_end:chain_K` column for each arrow that a slice can take part in.

    `spans` gives the slices of a rank in order (ts_ns, end_ns, gap). An arrow joins the slice of the root rank that is
    open when a stretch of `chains` (ATTRIBUTION, with a root on another rank) starts, and that stretch. The arrow ends
    where the stretch ends, so that its direction does not hang on a tie of two starts. n is the row in `chains`.
    """
    wanted = chains.with_row_index("n").filter(
        pl.col("root_rank").is_not_null() & (pl.col("root_rank") != pl.col("rank"))
    )
    if wanted.height == 0:
        return {}
    ranks = sorted({*wanted.get_column("rank").to_list(), *wanted.get_column("root_rank").to_list()})
    slices = pl.concat(
        spans(rank).select("ts_ns", "end_ns", "gap", pl.lit(rank, pl.Int32).alias("rank")).with_row_index("slice")
        for rank in ranks
    )
    here = wanted.select("n", "rank", "root_rank", "ts_ns", "end_ns").join(
        slices.filter(pl.col("gap").is_not_null()), on=["rank", "ts_ns", "end_ns"]
    )
    there = (
        here.sort("ts_ns", "n")
        .join_asof(
            slices.select(
                pl.col("rank").alias("root_rank"), "ts_ns", pl.col("end_ns").alias("root_end_ns"),
                pl.col("slice").alias("root_slice"),
            ).sort("ts_ns"),
            on="ts_ns", by="root_rank", strategy="backward", check_sortedness=False,
        )
        .filter(pl.col("ts_ns") < pl.col("root_end_ns"))
        .with_columns(_id(Flow.CHAIN, pl.col("rank"), pl.col("n")).alias("id"))
    )  # fmt: skip
    arrows: dict[int, pl.DataFrame] = {}
    for rank, side, where in (("root_rank", "root_slice", "flow"), ("rank", "slice", "flow_end")):
        ends = there.select(pl.col(rank).alias("rank"), pl.col(side).alias("slice"), "id").sort("rank", "slice", "id")
        ends = ends.with_columns(pl.int_range(pl.len()).over("rank", "slice").alias("k"))
        for (at, k), group in ends.partition_by("rank", "k", as_dict=True, maintain_order=True).items():
            named = group.select("slice", pl.col("id").alias(f"{where}:chain_{k}"))
            known = arrows.get(at)
            arrows[at] = named if known is None else known.join(named, on="slice", how="full", coalesce=True)
    return arrows


def with_arrows(arrows: pl.DataFrame, runs: pl.DataFrame, idle: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The two kinds of top-level slices of the Attribution track of a rank, each in order of time, with the columns that
    `link_chains` gives for the rank."""
    ts = np.concatenate([runs.get_column("ts_ns").to_numpy(), idle.get_column("ts_ns").to_numpy()])
    row = np.argsort(ts, kind="stable")[arrows.get_column("slice").to_numpy()]
    ends = [_at(len(ts), row[c.is_not_null().to_numpy()], c.drop_nulls()) for c in arrows.drop("slice")]
    return runs.hstack([c.head(runs.height) for c in ends]), idle.hstack([c.tail(idle.height) for c in ends])

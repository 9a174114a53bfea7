"""Which way an NCCL kernel of an nsys export sends: from the NCCL calls (NVTX ranges) that launched it.

Every point-to-point kernel is called ncclDevKernel_SendRecv. It is launched inside `ncclGroupEnd` for the sends and
receives since the outermost `ncclGroupStart`, or inside `ncclSend` or `ncclRecv` itself where no group is open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import polars as pl

from traceana.sources.losses import Loss, loss

__all__ = ["Launched", "communication"]

_TOLD = {
    "row": pl.UInt32(), "collective": pl.String(), "src_rank": pl.Int32(), "dst_rank": pl.Int32(),
    "in_elements": pl.Int64(), "out_elements": pl.Int64(), "dtype": pl.String(),
}  # fmt: skip
# What the hook says around an NCCL message, in place of the op that torch.profiler records there.
MESSAGE = (
    r"^traceana\.message\[(?P<collective>send|recv) peer=(?P<peer>[0-9]{1,6}) elements=(?P<elements>[0-9]{1,15}) "
    r"dtype=(?P<dtype>[A-Za-z0-9_]{1,40})\]$"
)
# Names of torch.profiler's `Collective name`, by the word in the kernel's name.
_COLLECTIVES = {
    "AllReduce": "allreduce",
    "AllGather": "_allgather_base",
    "ReduceScatter": "_reduce_scatter_base",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
}
_KERNEL = r"^nccl(?:Dev)?Kernel_([A-Za-z]+)"


class Launched(NamedTuple):
    """A process (globalPid) and a GPU of it."""

    process: int
    device: int


def communication(
    device: pl.DataFrame, calls: pl.DataFrame, ranges: pl.DataFrame, ranks: Mapping[Launched, int]
) -> tuple[pl.DataFrame, list[Loss]]:
    """row, collective, src_rank, dst_rank, elements and dtype of the NCCL kernels among `device`, and what could not be told.

    A kernel that both sends and receives (an all-to-all, a batched exchange) is `sendrecv` and names no peer. The peer
    is the other process of the communicator where the payload names it and just two use it, or the other of two ranks. What
    the capture's hook says of a message (size and type too) goes before all of it.
    """
    word = pl.col("name").str.extract(_KERNEL)
    kernels = device.filter(pl.col("kind") == "kernel").with_columns(word=word).drop_nulls("word")
    if not kernels.height:
        return pl.DataFrame(schema=_TOLD), []
    launches = kernels.filter(pl.col("word") == "SendRecv").join(
        calls.select("process", "correlation", "thread", pl.col("ts_ns").alias("at_ns")).unique(
            ["process", "correlation"]
        ),
        on=["process", "correlation"],
        how="left",
    )
    marks = _marks(ranges)
    told = _said(launches, marks)
    recorded = _recorded(launches, marks)
    rest = launches.filter(recorded).join(told, on="row", how="anti")
    told = pl.concat([told, _directions(rest, ranges, ranks)], how="diagonal")
    losses: list[Loss] = []
    unknown = told.get_column("collective").null_count()
    if unknown:
        detail = "point-to-point kernels that no NCCL call in the export explains (record with `-t cuda,nvtx`)"
        losses.append(loss("nsys_p2p_direction_unknown", "warning", unknown, detail))
    peerless = told.filter(
        pl.col("collective").is_in(["send", "recv"]), pl.col("src_rank").is_null(), pl.col("dst_rank").is_null()
    )
    if peerless.height:
        detail = f"sends and receives among {len(ranks)} ranks without a peer (export with --include-json=true)"
        losses.append(loss("nsys_p2p_peer_unknown", "warning", peerless.height, detail))
    others = kernels.filter(pl.col("word") != "SendRecv").select(
        "row", collective=pl.col("word").replace_strict(_COLLECTIVES, default=None, return_dtype=pl.String())
    )
    # torch's word for messages that an op does not name one by one.
    edge = launches.filter(~recorded).select("row", collective=pl.lit("coalesced"))
    return pl.concat([told, others, edge], how="diagonal"), losses


def _marks(ranges: pl.DataFrame) -> pl.DataFrame:
    """The hook's ranges around messages: process, thread, from_ns, to_ns and what each says."""
    text = pl.col("name").str.extract_groups(MESSAGE).struct
    return ranges.filter(pl.col("name").str.contains(MESSAGE)).select(
        "process", "thread", pl.col("ts_ns").alias("from_ns"), pl.col("end_ns").alias("to_ns"),
        text.field("collective"), text.field("peer").cast(pl.Int32), text.field("elements").cast(pl.Int64),
        text.field("dtype"),
    )  # fmt: skip


def _recorded(launches: pl.DataFrame, marks: pl.DataFrame) -> pl.Series:
    """Which of the launches are messages of the recording. nsys begins on all ranks of a node at once, the hook with each
    rank's own start of the profile: what a rank that marks its messages launched before its first mark, or after its
    last, is in no span, and would take the place of the message of its kind that is."""
    said = marks.group_by("process").agg(first_ns=pl.col("from_ns").min(), last_ns=pl.col("to_ns").max())
    inside = pl.col("at_ns").is_between("first_ns", "last_ns").fill_null(True)
    return launches.join(said, on="process", how="left", maintain_order="left").select(inside).to_series()


def _said(launches: pl.DataFrame, marks: pl.DataFrame) -> pl.DataFrame:
    """What the hook says of those launches that lie in one of its ranges, as _TOLD."""
    held = launches.drop_nulls("at_ns").sort("at_ns").join_asof(
        marks.drop("process").sort("from_ns"), left_on="at_ns", right_on="from_ns", by="thread", strategy="backward",
        check_sortedness=False,
    ).filter(pl.col("at_ns") < pl.col("to_ns"))  # fmt: skip
    sends, receives = pl.col("collective") == "send", pl.col("collective") == "recv"
    return held.select(
        "row", "collective",
        pl.when(receives).then("peer").alias("src_rank"), pl.when(sends).then("peer").alias("dst_rank"),
        pl.when(sends).then("elements").alias("in_elements"), pl.when(receives).then("elements").alias("out_elements"),
        "dtype",
    ).cast(pl.Schema(_TOLD))  # fmt: skip


def _directions(launches: pl.DataFrame, ranges: pl.DataFrame, ranks: Mapping[Launched, int]) -> pl.DataFrame:
    """What each launch of `launches` does: row, collective, src_rank, dst_rank."""
    groups = _groups(ranges.filter(pl.col("name").is_in(["ncclSend", "ncclRecv", "ncclGroupStart", "ncclGroupEnd"])))
    held = (
        launches.drop_nulls("at_ns")
        .sort("at_ns")
        .join_asof(
            groups.sort("ts_ns").rename({"ts_ns": "group_ts_ns", "end_ns": "group_end_ns"}),
            left_on="at_ns",
            right_on="group_ts_ns",
            by="thread",
            strategy="backward",
            check_sortedness=False,
        )
    )
    held = held.filter(pl.col("at_ns") < pl.col("group_end_ns"))
    sends, receives = pl.col("sends") > 0, pl.col("receives") > 0
    collective = pl.when(sends & receives).then(pl.lit("sendrecv")).when(sends).then(pl.lit("send"))
    held = held.with_columns(
        collective=collective.when(receives).then(pl.lit("recv")),
    )
    known = {"process": pl.Int64(), "device": pl.Int64(), "me": pl.Int32()}
    me = pl.DataFrame([(*launched, rank) for launched, rank in ranks.items()], schema=known, orient="row")
    held = held.join(me, on=["process", "device"], how="left")
    held = held.with_columns(peer=_peer(held, list(ranks.values())))
    one_way = {"send": "dst_rank", "recv": "src_rank"}
    told = held.select(
        "row",
        "collective",
        *(pl.when(pl.col("collective") == way).then("peer").alias(side) for way, side in one_way.items()),
    )
    return launches.select("row").join(told, on="row", how="left")


def _groups(nccl: pl.DataFrame) -> pl.DataFrame:
    """One row per range in which NCCL launches: thread, ts_ns, end_ns, and how many sends and receives it launches. The
    communicator is that of the first of them, where the export has payloads."""
    name = pl.col("name")
    step = pl.when(name == "ncclGroupStart").then(1).when(name == "ncclGroupEnd").then(-1).otherwise(0)
    nccl = nccl.sort("ts_ns", maintain_order=True).with_columns(depth=step.cum_sum().over("thread"))
    # Where recording began inside a group, its end takes the depth below 0: that is the ground from there on.
    ground = pl.min_horizontal(pl.col("depth").cum_min().over("thread"), 0)
    message = name.is_in(["ncclSend", "ncclRecv"])
    nccl = nccl.with_columns(
        closes=(name == "ncclGroupEnd") & (pl.col("depth") <= ground),
        alone=message & (pl.col("depth") <= ground),
        comm=pl.col("payload").str.extract(r'(?i)"NCCL communicator ID"\s*:\s*"?([0-9a-fx-]+)'),
    )
    # A group is the outermost end and the messages since the one before; a message alone is a group of its own.
    nccl = nccl.with_columns(group=(pl.col("closes").cum_sum() - pl.col("closes").cast(pl.Int64())).over("thread"))
    row = pl.int_range(pl.len())
    nccl = nccl.with_columns(group=pl.when("alone").then(-1 - row).otherwise("group"))
    launching = pl.col("closes") | pl.col("alone")
    return (
        nccl.group_by("thread", "group", maintain_order=True)
        .agg(
            pl.col("ts_ns").filter(launching).last(),
            pl.col("end_ns").filter(launching).last(),
            (name == "ncclSend").sum().alias("sends"),
            (name == "ncclRecv").sum().alias("receives"),
            pl.col("comm").filter(message).drop_nulls().first(),
            pl.col("process").first().alias("group_process"),
        )
        .drop_nulls("ts_ns")
        .drop("group")
    )


def _peer(held: pl.DataFrame, ranks: Sequence[int]) -> pl.Expr:
    """The other end, as a rank: the other of two ranks, or the other user of the communicator where there are two."""
    if len(ranks) == 2:
        return pl.lit(sum(ranks), pl.Int32()) - pl.col("me")
    users = held.drop_nulls("comm").group_by("comm").agg(pl.col("me").unique().sort().alias("users"))
    pairs = {comm: sum(who) for comm, who in users.iter_rows() if len(who) == 2 and None not in who}
    return pl.col("comm").replace_strict(pairs, default=None, return_dtype=pl.Int32()) - pl.col("me")

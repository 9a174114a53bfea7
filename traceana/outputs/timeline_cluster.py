"""Views across ranks, on top of the merged timeline: the pipeline, what is in flight, busy stages, the boards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import polars as pl

from traceana.outputs.perfetto_packets import PacketSequence, counter_track, root_track, track
from traceana.outputs.timeline_rank import micro_batch_slices
from traceana.tables.capture import RankInfo

__all__ = ["ClusterFrames", "in_flight_steps", "write_cluster"]

_MARGIN_NS = 1_000_000_000  # samples of the boards this far outside the window are shown
_GAUGES = (
    ("GPU power", "power_w", 1.0, "W"),
    ("GPU power limit", "power_limit_w", 1.0, "W"),
    ("GPU utilisation as NVML reports it", "utilisation", 100.0, "%"),
    ("SM clock", "sm_clock_mhz", 1.0, "MHz"),
)


@dataclass(frozen=True, slots=True)
class ClusterFrames:
    """What the views across ranks show; frames as in `traceana.schema`, `in_flight` as in `in_flight_steps`,
    `attribution` from `attribution_slices`."""

    forwards: pl.DataFrame
    attribution: pl.DataFrame
    states: pl.DataFrame
    gpu_samples: pl.DataFrame
    in_flight: pl.DataFrame
    span: tuple[int, int]
    window: tuple[int, int] | None


def in_flight_steps(
    forwards: pl.DataFrame,
    visits: pl.DataFrame,
    messages: pl.DataFrame,
    stages: Mapping[int, int],
    span: tuple[int, int],
) -> pl.DataFrame:
    """Micro-batches in flight as steps (ts_ns, count): those whose forward on the first stage has started and whose
    tokens the first stage has not taken again. Empty where there is no pipeline or the slots are unknown.

    The tokens are taken by the last token message that reaches the first stage before it visits the slot again, at the
    latest by that visit.
    """
    empty = pl.DataFrame(schema={"ts_ns": pl.Int64, "count": pl.Int64})
    first = [rank for rank, stage in stages.items() if stage == 0]
    highest = visits.filter(pl.col("rank").is_in(first)).get_column("slot").max() if visits.height else None
    if max(stages.values(), default=0) == 0 or not isinstance(highest, int):
        return empty
    begun = forwards.filter(pl.col("rank").is_in(first)).unique(["rank", "visit"], keep="first", maintain_order=True)
    again = visits.select("rank", (pl.col("visit") - (highest + 1)).alias("visit"), pl.col("ts_ns").alias("again_ns"))
    taken = (
        messages.filter(pl.col("kind") == "output")
        .select(pl.col("dst").alias("rank"), pl.col("recv_end_ns").alias("taken_ns"))
        .sort("taken_ns")
    )
    begun = (
        begun.select("rank", "visit", "ts_ns")
        .join(again, on=["rank", "visit"], how="left")
        .with_columns(pl.col("again_ns").fill_null(span[1]))
        .sort("again_ns")
        .join_asof(taken, left_on="again_ns", right_on="taken_ns", by="rank", check_sortedness=False)
    )
    stop = pl.when(pl.col("taken_ns") > pl.col("ts_ns")).then(pl.col("taken_ns")).otherwise(pl.col("again_ns"))
    return _steps(begun.select("ts_ns", stop.alias("end_ns")))


def _steps(spans: pl.DataFrame) -> pl.DataFrame:
    """How many of the spans are open, as steps (ts_ns, count), one where it changes."""
    edges = pl.concat(
        [
            spans.select("ts_ns", pl.lit(1, pl.Int64).alias("change")),
            spans.select(pl.col("end_ns").alias("ts_ns"), pl.lit(-1, pl.Int64).alias("change")),
        ]
    )
    steps = edges.group_by("ts_ns").agg(pl.col("change").sum()).filter(pl.col("change") != 0).sort("ts_ns")
    return steps.select("ts_ns", pl.col("change").cum_sum().alias("count"))


def write_cluster(
    packets: PacketSequence, frames: ClusterFrames, infos: list[RankInfo], name: Mapping[int, str]
) -> None:
    """Writes the group `Cluster`."""
    uuids = iter(range(1, 1 << 20))
    top, pipeline = next(uuids), next(uuids)
    packets.describe(
        root_track(),
        track(top, "Cluster", rank=0, explicit=True, description="Views across ranks, made by traceana"),
    )
    if frames.window is not None:
        uuid = next(uuids)
        # `traceana.outputs.open_ui.window_of` reads this back.
        about = f"The stretch that all figures are about: {frames.window[0]}..{frames.window[1]} ns"
        packets.describe(track(uuid, "Window", parent=top, rank=0, description=about))
        slices = pl.DataFrame(
            {
                "ts_ns": [frames.window[0]],
                "end_ns": [frames.window[1]],
                "name": [packets.names.id("window of all figures")],
            }
        )
        packets.slices(slices, lambda _: uuid)
    if frames.forwards.height:
        about = "Forwards of every stage (a colour is a micro-batch), and why it idles"
        packets.describe(track(pipeline, "Pipeline", parent=top, rank=1, explicit=True, description=about))
        for place, info in enumerate(infos):
            rows = frames.forwards.filter(pl.col("rank") == info.rank)
            if rows.height:
                lanes = _lanes(packets, uuids.__next__, name[info.rank], pipeline, place)
                idle = _idle(rows, frames.attribution.filter(pl.col("rank") == info.rank))
                both = [micro_batch_slices(packets, rows), _bubble_slices(packets, idle)]
                packets.slices(pl.concat(both, how="diagonal"), lanes)
    _counter(packets, next(uuids), "Micro-batches in flight", top, 2, frames.in_flight)
    busy = frames.states.filter(pl.col("state") == "busy").select("ts_ns", "end_ns")
    if busy.height:
        _counter(packets, next(uuids), "Stages busy", top, 3, _steps(busy))
    _boards(packets, uuids.__next__, top, frames, name)


def _idle(forwards: pl.DataFrame, attribution: pl.DataFrame) -> pl.DataFrame:
    """The bubbles of a rank, less the many short ones between the kernels of a forward."""
    spans = forwards.select("ts_ns", pl.col("end_ns").alias("forward_end_ns")).sort("ts_ns")
    bubbles = attribution.filter(pl.col("category") == "bubble").sort("ts_ns")
    inside = pl.col("ts_ns") < pl.col("forward_end_ns").fill_null(0)
    joined = bubbles.join_asof(spans, on="ts_ns", strategy="backward")
    return joined.filter(~(inside & (pl.col("cause") == "launch_latency").fill_null(True)))


def _bubble_slices(packets: PacketSequence, bubbles: pl.DataFrame) -> pl.DataFrame:
    names = bubbles.get_column("name").str.strip_prefix("bubble: ")
    return bubbles.select(
        "ts_ns", "end_ns", packets.names.column(names),
        pl.lit(packets.categories.id("bubble"), pl.Int64).alias("category"), "correlation",
        pl.col("visit").alias("int:micro_batch"),
    )  # fmt: skip


def _lanes(packets: PacketSequence, new: Callable[[], int], title: str, parent: int, rank: int) -> Callable[[int], int]:
    def lane_track(_: int) -> int:
        uuid = new()
        packets.describe(track(uuid, title, parent=parent, rank=rank))
        return uuid

    return lane_track


def _counter(packets: PacketSequence, uuid: int, title: str, parent: int, rank: int, steps: pl.DataFrame) -> None:
    if steps.height:
        packets.describe(counter_track(uuid, title, parent=parent, rank=rank))
        packets.counter(uuid, steps.get_column("ts_ns").to_numpy(), steps.get_column("count").to_numpy())


def _boards(
    packets: PacketSequence, new: Callable[[], int], top: int, frames: ClusterFrames, name: Mapping[int, str]
) -> None:
    low, high = frames.window or frames.span
    near = frames.gpu_samples.filter(pl.col("ts_ns").is_between(low - _MARGIN_NS, high + _MARGIN_NS)).sort("ts_ns")
    boards = near.select("rank", "gpu").unique().sort("rank", "gpu", nulls_last=True).rows()
    for place, (title, column, scale, unit) in enumerate(_GAUGES):
        known = near.filter(pl.col(column).is_not_null())
        if known.height == 0:
            continue
        group = new()
        packets.describe(track(group, title, parent=top, rank=4 + place, explicit=True))
        for order, (rank, gpu) in enumerate(boards):
            rows = known.filter(pl.col("rank").eq_missing(pl.lit(rank, pl.Int32)) & (pl.col("gpu") == gpu))
            if rows.height:
                uuid = new()
                label = f"gpu {gpu}" if rank is None else f"{name.get(rank, f'rank {rank}')} · gpu {gpu}"
                packets.describe(counter_track(uuid, label, parent=group, rank=order, unit=unit, axis=column))
                values = (rows.get_column(column) * scale).to_numpy()
                packets.counter(uuid, rows.get_column("ts_ns").to_numpy(), values)

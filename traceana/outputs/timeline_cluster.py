"""Views across ranks, on top of the merged timeline: the pipeline, what is in flight, busy stages, the boards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import polars as pl

from traceana.outputs.perfetto_packets import PacketSequence, counter_track, root_track, track
from traceana.outputs.perfetto_text import Texts
from traceana.outputs.timeline_colours import colour_of
from traceana.outputs.timeline_links import pipeline_flows
from traceana.outputs.timeline_slices import bubble_names, bubbles, micro_batch_slices
from traceana.tables.by_rank import ByRank
from traceana.tables.capture import RankInfo

__all__ = ["ClusterFrames", "write_cluster"]

_MARGIN_NS = 1_000_000_000  # samples of the boards this far outside the window are shown
_GAUGES = (
    ("GPU power", "power_w", 1.0, "W"),
    ("GPU power limit", "power_limit_w", 1.0, "W"),
    ("GPU utilisation as NVML reports it", "utilisation", 100.0, "%"),
    ("SM clock", "sm_clock_mhz", 1.0, "MHz"),
)


@dataclass(frozen=True, slots=True)
class ClusterFrames:
    """What the views across ranks show: by rank, `forwards` with the arrows of `link_forwards`, STATES and ATTRIBUTION;
    GPU_SAMPLES; `in_flight` and `stages_busy` as steps (ts_ns, count); the `span` that samples of the
    boards are shown for, and the analysed window (ns)."""

    forwards: ByRank
    states: ByRank
    attribution: ByRank
    gpu_samples: pl.DataFrame
    in_flight: pl.DataFrame | None
    stages_busy: pl.DataFrame | None
    span: tuple[int, int]
    window: tuple[int, int] | None


def write_cluster(
    packets: PacketSequence, frames: ClusterFrames, infos: list[RankInfo], name: Mapping[int, str]
) -> None:
    """Writes the group `Cluster`."""
    uuids = iter(range(1, 1 << 20))
    top, pipeline = next(uuids), next(uuids)
    # `traceana.outputs.open_ui.facts_of` reads the ranks and the window back from these descriptions.
    ranks = ",".join(str(i.rank) for i in infos)
    about = f"Views across ranks, made by traceana; ranks: {ranks}"
    packets.describe(root_track(), track(top, "Cluster", rank=0, explicit=True, description=about))
    if frames.window is not None:
        uuid = next(uuids)
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
    if frames.forwards:
        about = "Forwards of every stage (a colour is a micro-batch), and why it idles"
        packets.describe(track(pipeline, "Pipeline", parent=top, rank=1, explicit=True, description=about))
        for place, info in enumerate(infos):
            rows = frames.forwards[info.rank]
            if rows.height:
                lanes = _lanes(packets, uuids.__next__, name[info.rank], pipeline, place)
                both = [micro_batch_slices(packets, rows).with_columns(pipeline_flows(rows))]
                if info.rank in frames.states:
                    idle = bubbles(frames.states[info.rank], frames.attribution[info.rank])
                    both.append(_bubble_slices(packets, _idle(rows, idle), name))
                packets.slices(both, lanes)
    _counter(packets, next(uuids), "Micro-batches in flight", top, 2, frames.in_flight)
    _counter(packets, next(uuids), "Stages busy", top, 3, frames.stages_busy)
    _boards(packets, uuids.__next__, top, frames, name)


def _idle(forwards: pl.DataFrame, idle: pl.DataFrame) -> pl.DataFrame:
    """The bubbles of a rank, less the many short ones between the kernels of a forward."""
    spans = forwards.select("ts_ns", pl.col("end_ns").alias("forward_end_ns")).sort("ts_ns")
    inside = pl.col("ts_ns") < pl.col("forward_end_ns").fill_null(0)
    joined = idle.sort("ts_ns", maintain_order=True).join_asof(spans, on="ts_ns", strategy="backward")
    return joined.filter(~(inside & (pl.col("cause") == "launch_latency").fill_null(True)))


def _bubble_slices(packets: PacketSequence, rows: pl.DataFrame, name: Mapping[int, str]) -> pl.DataFrame:
    cause, detail = Texts.of(rows.get_column("cause")), Texts.of(rows.get_column("detail"))
    return rows.select(
        "ts_ns", "end_ns", packets.names.column(bubble_names(rows, cause, detail, name)).alias("name"),
        pl.lit(packets.categories.id("bubble"), pl.Int64).alias("category"), colour_of(cause),
        pl.col("visit").alias("int:micro_batch"),
    )  # fmt: skip


def _lanes(packets: PacketSequence, new: Callable[[], int], title: str, parent: int, rank: int) -> Callable[[int], int]:
    def lane_track(_: int) -> int:
        uuid = new()
        packets.describe(track(uuid, title, parent=parent, rank=rank))
        return uuid

    return lane_track


def _counter(
    packets: PacketSequence, uuid: int, title: str, parent: int, rank: int, steps: pl.DataFrame | None
) -> None:
    if steps is not None and (steps.get_column("count") != 0).any():
        packets.describe(counter_track(uuid, title, parent=parent, rank=rank))
        packets.counter(uuid, steps.get_column("ts_ns").to_numpy(), steps.get_column("count").to_numpy())


def _boards(
    packets: PacketSequence, new: Callable[[], int], top: int, frames: ClusterFrames, name: Mapping[int, str]
) -> None:
    low, high = frames.span
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

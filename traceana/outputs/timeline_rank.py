"""The tracks of one rank in the merged timeline.

rank 0 · stage 0            process (pid = rank + 1; its real pid is a label)
  Attribution               busy (its kernel classes below it), transfer, and every bubble by cause
  Micro-batches             forwards on the GPU, coloured by micro-batch
  Slots                     passes of the scheduler over its slots, empty ones included
  GPU streams               one track a stream
  P2P messages              one track a direction, kind and peer
  threads                   annotations, ops and calls
  Profiler overhead
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import polars as pl

from traceana.outputs.kernel_names import short_kernel_name
from traceana.outputs.perfetto_packets import Interned, PacketSequence, process_track, thread_track, track
from traceana.outputs.timeline_colours import colour_of
from traceana.outputs.timeline_links import FORWARD_FLOWS, link_launches
from traceana.outputs.timeline_slices import micro_batch_slices, stream_purposes
from traceana.tables.capture import RankTables

__all__ = ["Args", "RankFrames", "RankLabels", "write_rank"]

Args = Literal["none", "key", "full"]

# What a kernel or copy shows when selected; `full` adds the rest of the device table.
_KEY = ("correlation", "bytes", "in_elements")
_KEY_TEXT = ("collective", "dtype")
_FULL = ("external_id", "src_rank", "dst_rank", "out_elements", "group_size", "seq")
_FULL_TEXT = ("group", "group_desc")


@dataclass(frozen=True, slots=True)
class RankLabels:
    """How a rank is called on its own group and on other ranks' slices, and what its group says of it."""

    title: str
    name: Mapping[int, str]
    labels: tuple[str, ...]
    description: str


@dataclass(frozen=True, slots=True)
class RankFrames:
    """The rows of one rank: `attribution` from `attribution_slices`, `forwards` and the messages `sent` and `received`
    with their arrows, and `classes`, the busy rows of STATES, shown below the runs of busy."""

    visits: pl.DataFrame
    forwards: pl.DataFrame
    sent: pl.DataFrame
    received: pl.DataFrame
    attribution: pl.DataFrame
    classes: pl.DataFrame


def write_rank(
    packets: PacketSequence,
    tables: RankTables,
    frames: RankFrames,
    labels: RankLabels,
    kernel_class: Mapping[str, str],
    args: Args,
) -> None:
    """Writes all tracks of one rank."""
    _RankWriter(packets, tables, labels, args).write(frames, kernel_class)


class _RankWriter:
    def __init__(self, packets: PacketSequence, tables: RankTables, labels: RankLabels, args: Args) -> None:
        self._packets = packets
        self._tables = tables
        self._labels = labels
        self._args = args
        self._rank = tables.info.rank
        self._pid = self._rank + 1
        self._next_uuid = self._pid << 20
        self._process = self._uuid()

    def _uuid(self) -> int:
        self._next_uuid += 1
        return self._next_uuid

    def _track(self, name: str, parent: int, rank: int, *, explicit: bool = False, description: str = "") -> int:
        uuid = self._uuid()
        self._packets.describe(track(uuid, name, parent=parent, rank=rank, explicit=explicit, description=description))
        return uuid

    def _lanes(self, name: str, parent: int, rank: int, description: str = "") -> Callable[[int], int]:
        """Lanes of one visual track: tracks of the same name and parent, which Perfetto draws as one."""
        return lambda lane: self._track(name, parent, rank, description=description if lane == 0 else "")

    def write(self, frames: RankFrames, kernel_class: Mapping[str, str]) -> None:
        labels = self._labels
        self._packets.describe(
            process_track(
                self._process, self._pid, labels.title, rank=10 + self._rank, labels=labels.labels,
                description=labels.description,
            )
        )  # fmt: skip
        launched, launching = (None, None)
        if self._args != "none":
            launched, launching = link_launches(self._tables.device, self._tables.calls, self._rank)
        self._attribution(frames.attribution, frames.classes)
        self._micro_batches(frames.forwards)
        self._slots(frames.visits)
        self._streams(launched, kernel_class)
        self._messages(frames.sent, frames.received)
        self._threads(launching)
        self._overheads()

    def _slices(
        self, frame: pl.DataFrame, name: str | pl.Series, category: str | pl.Series, *keep: str
    ) -> pl.DataFrame:
        """Start, end, interned name and category (one for all rows, or a column of texts), and the columns `keep`."""

        def ids(pool: Interned, texts: str | pl.Series) -> pl.Expr | pl.Series:
            return pl.lit(pool.id(texts), pl.Int64) if isinstance(texts, str) else pool.column(texts)

        return frame.select("ts_ns", "end_ns", *keep).with_columns(
            ids(self._packets.names, name).alias("name"), ids(self._packets.categories, category).alias("category")
        )

    def _texts(self, frame: pl.DataFrame, *columns: str) -> list[pl.Series]:
        return [self._packets.texts.column(frame.get_column(c)).alias(f"text:{c}") for c in columns]

    def _attribution(self, rows: pl.DataFrame, classes: pl.DataFrame) -> None:
        if rows.height == 0:
            return
        flows = [c for c in rows.columns if c.startswith("flow")]
        top = self._slices(rows, rows.get_column("name"), rows.get_column("category"), "correlation", *flows)
        arguments = rows.select(
            pl.col("root_rank").cast(pl.Int64).alias("int:root_rank"),
            pl.col("visit").alias("int:micro_batch"),
            pl.col("crossed_token_return").alias("bool:crossed_token_return"),
            pl.col("gap").alias("int:gap"),
            pl.col("chain").alias("int:chain"),
            (pl.col("end_ns") - pl.col("ts_ns")).alias("int:ns"),
        )
        top = top.with_columns(arguments.get_columns())
        top = top.with_columns(self._texts(rows, "cause", "detail", "first_event", "last_event"))
        below = self._slices(classes, classes.get_column("kernel_class"), "busy").with_columns(
            classes.select(colour_of("kernel_class").alias("correlation")).to_series()
        )
        both = pl.concat([top, below], how="diagonal")
        self._packets.slices(
            both, self._lanes("Attribution", self._process, 0, "What the stage's GPU did, and what it waited for")
        )

    def _micro_batches(self, forwards: pl.DataFrame) -> None:
        if forwards.height == 0:
            return
        frame = micro_batch_slices(self._packets, forwards)
        frame = frame.with_columns(forwards.select(FORWARD_FLOWS).get_columns())
        self._packets.slices(frame, self._lanes("Micro-batches", self._process, 1, "Forwards on the stage's GPU"))

    def _slots(self, visits: pl.DataFrame) -> None:
        if visits.height == 0:
            return
        slot = pl.when(pl.col("slot").is_null()).then(pl.lit("visit")).otherwise(pl.format("slot {}", "slot"))
        batch = pl.when(pl.col("mode").is_null()).then(pl.lit(" · empty")).otherwise(pl.format(" · mb {}", "visit"))
        frame = self._slices(visits, visits.select(slot + batch).to_series(), "slot").with_columns(
            visits.select(
                pl.col("visit").alias("int:visit"),
                pl.col("complete").alias("bool:complete"),
                pl.when(pl.col("mode").is_not_null()).then(pl.col("visit") + 1).alias("correlation"),
            ).get_columns(),
        )
        frame = frame.with_columns(self._texts(visits, "step"))
        description = "Passes of the scheduler over its slots, from one recv_requests to the next"
        self._packets.slices(frame, self._lanes("Slots", self._process, 2, description))

    def _streams(self, launched: pl.Series | None, kernel_class: Mapping[str, str]) -> None:
        device, spans = self._tables.device, self._tables.gpu_annotations
        if device.height == 0 and spans.height == 0:
            return
        group = self._track("GPU streams", self._process, 3, explicit=True)
        frame = self._activities(device, launched, kernel_class)
        above = self._slices(spans, spans.get_column("name"), "annotation", "device", "stream")
        several = pl.concat([device.get_column("device"), spans.get_column("device")]).n_unique() > 1
        for place, (gpu, stream, what) in enumerate(stream_purposes(device, spans)):
            name = f"gpu {gpu} · " if several else ""
            here = pl.col("device").eq_missing(pl.lit(gpu, pl.Int32)) & (pl.col("stream") == stream)
            rows = frame.filter(here)
            outer = above.filter(here)
            both = pl.concat([outer, rows], how="diagonal") if outer.height else rows
            self._packets.slices(
                both.drop("device", "stream"), self._lanes(f"{name}stream {stream} · {what}", group, place)
            )

    def _activities(
        self, device: pl.DataFrame, launched: pl.Series | None, kernel_class: Mapping[str, str]
    ) -> pl.DataFrame:
        packets, names = self._packets, device.get_column("name")
        frame = device.select("ts_ns", "end_ns", "device", "stream").with_columns(
            packets.names.column(names, short_kernel_name),
            packets.categories.column(
                names, lambda n: kernel_class.get(n, "memory" if n[:3] == "Mem" else "kernel")
            ).alias("category"),
        )
        peer = (
            pl.when(pl.col("dst_rank").is_not_null())
            .then(pl.format("send → {}", self._peer("dst_rank")))
            .when(pl.col("src_rank").is_not_null())
            .then(pl.format("recv ← {}", self._peer("src_rank")))
        )
        titles = packets.names.column(device.select(peer.alias("name")).get_column("name"))
        frame = frame.with_columns(pl.when(titles > 0).then(titles).otherwise(pl.col("name")).alias("name"))
        if self._args == "none":
            return frame
        full = self._args == "full"
        numbers = (*_KEY, *(_FULL if full else ()))
        texts = (*_KEY_TEXT, *(_FULL_TEXT if full else ()))
        frame = frame.with_columns(
            device.select(pl.col(c).cast(pl.Int64).alias(f"int:{c}") for c in numbers).get_columns()
        )
        frame = frame.with_columns(self._texts(device, *texts))
        whole = packets.texts.column(names, lambda n: n if short_kernel_name(n) != n else None)
        frame = frame.with_columns(whole.alias("text:kernel"))
        return frame if launched is None else frame.with_columns(launched.alias("flow:launch"))

    def _peer(self, column: str) -> pl.Expr:
        named = pl.col(column).replace_strict(dict(self._labels.name), default=None, return_dtype=pl.String)
        return named.fill_null(pl.format("rank {}", column))

    def _messages(self, sent: pl.DataFrame, received: pl.DataFrame) -> None:
        if sent.height + received.height == 0:
            return
        group = self._track("P2P messages", self._process, 4, explicit=True)
        place = 0
        for side, mine, other, arrow in (("send", sent, "dst", "→"), ("recv", received, "src", "←")):
            streams = mine.partition_by("kind", other, as_dict=True, maintain_order=True)
            for (kind, peer), rows in sorted(streams.items(), key=lambda item: (item[0][0] != "proxy", item[0])):
                title = f"{side} {kind} {arrow} {self._labels.name.get(peer, f'rank {peer}')}"
                self._packets.slices(self._message_slices(rows, side, title), self._lanes(title, group, place))
                place += 1

    def _message_slices(self, rows: pl.DataFrame, side: str, title: str) -> pl.DataFrame:
        """Spans of the kernels, and in each one an instant that bears the arrow: sent when the send kernel starts,
        received when the receive kernel ends. Between the kernels themselves an arrow would point backwards."""
        other = "recv" if side == "send" else "send"
        rows = rows.rename({f"{side}_ts_ns": "ts_ns", f"{side}_end_ns": "end_ns"})
        spans = self._slices(rows, title, "p2p").with_columns(
            rows.select(
                pl.col("bytes").alias("int:bytes"),
                pl.col("ordinal").alias("int:ordinal"),
                pl.col("visit").alias("int:micro_batch"),
                (pl.col(f"{other}_ts_ns") - pl.col("ts_ns")).alias("int:peer_starts_later_by_ns"),
                (pl.col(f"{other}_end_ns") - pl.col("end_ns")).alias("int:peer_ends_later_by_ns"),
                pl.when(pl.col("kind") == "proxy").then(pl.col("visit") + 1).alias("correlation"),
            ).get_columns()
        )
        spans = spans.with_columns(self._texts(rows, "dtype"))
        at = "ts_ns" if side == "send" else "end_ns"
        ends = rows.select(pl.col(at).alias("ts_ns"), pl.col(at).alias("end_ns"), "flow:message")
        marks = self._slices(ends, "sent" if side == "send" else "received", "p2p", "flow:message")
        return pl.concat([spans, marks], how="diagonal")

    def _threads(self, launching: pl.Series | None) -> None:
        annotations, ops, calls = self._tables.annotations, self._tables.ops, self._tables.calls
        unfinished = pl.when(~pl.col("finished")).then(pl.lit(False)).alias("bool:finished")
        spans = self._slices(annotations, annotations.get_column("name"), "annotation", "pid", "tid").with_columns(
            annotations.select(unfinished).get_columns()
        )
        own = annotations.get_column("name").cast(pl.String).str.starts_with("gloo:")
        inner = self._slices(ops, ops.get_column("name"), "op", "pid", "tid")
        leaf = self._slices(calls, calls.get_column("name"), "call", "pid", "tid")
        if self._args != "none":
            leaf = leaf.with_columns(calls.get_column("correlation").alias("int:correlation"))
        if launching is not None:
            leaf = leaf.with_columns(launching.alias("flow:launch"))
        if self._args == "full":
            spans = spans.with_columns(annotations.get_column("external_id").alias("int:external_id"))
            inner = inner.with_columns(ops.get_column("external_id").alias("int:external_id"))
            leaf = leaf.with_columns(calls.get_column("external_id").alias("int:external_id"))
        parts = (spans.filter(~own), inner, leaf)
        control = spans.filter(own)
        counts = pl.concat([p.select("pid", "tid") for p in parts]).group_by("pid", "tid").len()
        real = self._tables.info.pid
        main = (pl.col("tid") == real) & (pl.col("pid") == real) if real is not None else pl.lit(False)
        ordered = counts.with_columns(main.alias("main")).sort("main", "len", "tid", descending=[True, True, False])
        for place, (pid, tid, _, is_main) in enumerate(ordered.iter_rows()):
            here = (pl.col("pid") == pid) & (pl.col("tid") == tid)
            name = "main thread" if is_main else "thread"
            thread = self._uuid()
            # Perfetto takes thread id 0 for the process itself.
            self._packets.describe(
                thread_track(thread, self._pid, tid if tid > 0 else (1 << 30) + place, name, rank=place)
            )
            mine = parts if ordered.height == 1 else [p.filter(here) for p in parts]
            rows = pl.concat([p for p in mine if p.height], how="diagonal")
            self._packets.slices(rows.drop("pid", "tid"), self._thread_lanes(thread))
        self._controls(control)

    def _controls(self, spans: pl.DataFrame) -> None:
        """gloo spans end long after the calls inside which they start, so they stand apart from the threads."""
        threads = spans.select("pid", "tid").unique(maintain_order=True)
        for pid, tid in threads.iter_rows():
            name = "Control messages (gloo)" + (f" · thread {tid}" if threads.height > 1 else "")
            rows = spans.filter((pl.col("pid") == pid) & (pl.col("tid") == tid)).drop("pid", "tid")
            self._packets.slices(rows, self._lanes(name, self._process, 5))

    def _thread_lanes(self, thread: int) -> Callable[[int], int]:
        extra = self._lanes("overlapping spans", thread, 1)
        return lambda lane: extra(lane) if lane else thread

    def _overheads(self) -> None:
        overheads = self._tables.overheads
        if overheads.height:
            frame = self._slices(overheads, overheads.get_column("name"), "profiler")
            self._packets.slices(frame, self._lanes("Profiler overhead", self._process, 6))

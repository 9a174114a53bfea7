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

import numpy as np
import polars as pl

from traceana.outputs.kernel_names import short_kernel_name
from traceana.outputs.perfetto_packets import PacketSequence, process_track, thread_track, track
from traceana.outputs.perfetto_text import Interned, Texts
from traceana.outputs.timeline_colours import colour_of
from traceana.outputs.timeline_links import FORWARD_FLOWS, link_launches
from traceana.outputs.timeline_slices import bubble_names, micro_batch_slices, stream_purposes
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
    """The rows of one rank: `forwards` and the messages `sent` and `received` with their arrows; the `runs` of busy and
    transfer (`device_runs`) and the `bubbles` by cause, with the ends of their arrows; and `classes`, the busy rows of
    STATES, shown below the runs of busy."""

    visits: pl.DataFrame
    forwards: pl.DataFrame
    sent: pl.DataFrame
    received: pl.DataFrame
    runs: pl.DataFrame
    bubbles: pl.DataFrame
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
        # Before the first event: Perfetto takes a thread that is described later for that of all events before it.
        threads = self._thread_tracks()
        launched, launching = (None, None)
        if self._args != "none":
            launched, launching = link_launches(self._tables.device, self._tables.calls, self._rank)
        self._attribution(frames.runs, frames.bubbles, frames.classes)
        self._micro_batches(frames.forwards)
        self._slots(frames.visits)
        self._streams(launched, kernel_class)
        self._messages(frames.sent, frames.received)
        self._threads(threads, launching)
        self._overheads()

    def _slices(
        self, frame: pl.DataFrame, name: str | pl.Series | Texts, category: str | pl.Series | Texts, *more: pl.Series
    ) -> pl.DataFrame:
        """Start, end, interned name and category (one for all rows, or a column of texts), and the columns `more`."""

        def ids(pool: Interned, texts: str | pl.Series | Texts) -> pl.Series:
            if isinstance(texts, str):
                return pl.Series(np.full(frame.height, pool.id(texts), np.int64))
            return pool.column(texts)

        packets = self._packets
        named = ids(packets.names, name).alias("name"), ids(packets.categories, category).alias("category")
        return pl.DataFrame([frame.get_column("ts_ns"), frame.get_column("end_ns"), *named, *more])

    def _texts(self, frame: pl.DataFrame, *columns: str) -> list[pl.Series]:
        return [self._text(c, frame.get_column(c)) for c in columns]

    def _text(self, key: str, values: pl.Series | Texts) -> pl.Series:
        return self._packets.texts.column(values).alias(f"text:{key}")

    def _attribution(self, runs: pl.DataFrame, bubbles: pl.DataFrame, classes: pl.DataFrame) -> None:
        state, kind = Texts.of(runs.get_column("state")), Texts.of(classes.get_column("kernel_class"))
        cause, detail = Texts.of(bubbles.get_column("cause")), Texts.of(bubbles.get_column("detail"))
        named = bubble_names(bubbles, cause, detail, self._labels.name, "bubble: ")
        numbers = bubbles.select(
            pl.col("root_rank").cast(pl.Int64).alias("int:root_rank"),
            pl.col("crossed_token_return").alias("bool:crossed_token_return"),
            pl.col("gap").alias("int:gap"),
            pl.col("chain").alias("int:chain"),
        )
        because = [self._text("cause", cause), self._text("detail", detail)]
        because += self._texts(bubbles, "first_event", "last_event")
        slices = [
            self._slices(runs, state, state, colour_of(state), *_span_facts(runs)),
            self._slices(
                bubbles, named, "bubble", colour_of(cause), *_span_facts(bubbles), *numbers.get_columns(), *because
            ),
            self._slices(classes, kind, "busy", colour_of(kind)),
        ]
        self._packets.slices(
            slices, self._lanes("Attribution", self._process, 0, "What the stage's GPU did, and what it waited for")
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
        more = visits.select(
            pl.col("visit").alias("int:visit"),
            pl.col("complete").alias("bool:complete"),
            pl.when(pl.col("mode").is_not_null()).then(pl.col("visit") + 1).alias("correlation"),
        )
        name = visits.select(slot + batch).to_series()
        frame = self._slices(visits, name, "slot", *more.get_columns(), *self._texts(visits, "step"))
        description = "Passes of the scheduler over its slots, from one recv_requests to the next"
        self._packets.slices(frame, self._lanes("Slots", self._process, 2, description))

    def _streams(self, launched: pl.Series | None, kernel_class: Mapping[str, str]) -> None:
        device, spans = self._tables.device, self._tables.gpu_annotations
        if device.height == 0 and spans.height == 0:
            return
        group = self._track("GPU streams", self._process, 3, explicit=True)
        frame = self._activities(device, launched, kernel_class)
        above = self._slices(spans, spans.get_column("name"), "annotation", *spans.select("device", "stream"))
        several = pl.concat([device.get_column("device"), spans.get_column("device")]).n_unique() > 1
        for place, (gpu, stream, what) in enumerate(stream_purposes(device, spans)):
            name = f"gpu {gpu} · " if several else ""
            here = pl.col("device").eq_missing(pl.lit(gpu, pl.Int32)) & (pl.col("stream") == stream)
            both = [above.filter(here), frame.filter(here)]
            self._packets.slices(both, self._lanes(f"{name}stream {stream} · {what}", group, place))

    def _activities(
        self, device: pl.DataFrame, launched: pl.Series | None, kernel_class: Mapping[str, str]
    ) -> pl.DataFrame:
        packets, names = self._packets, Texts.of(device.get_column("name"))
        peer = (
            pl.when(pl.col("dst_rank").is_not_null())
            .then(pl.format("send → {}", self._peer("dst_rank")))
            .when(pl.col("src_rank").is_not_null())
            .then(pl.format("recv ← {}", self._peer("src_rank")))
        )
        called = packets.names.column(names, short_kernel_name).to_numpy()
        titles = packets.names.column(device.select(peer).to_series()).to_numpy()
        columns = [
            *device.select("ts_ns", "end_ns", "device", "stream"),
            pl.Series("name", np.where(titles > 0, titles, called)),
            packets.categories.column(
                names, lambda n: kernel_class.get(n, "memory" if n[:3] == "Mem" else "kernel")
            ).alias("category"),
        ]
        if self._args == "none":
            return pl.DataFrame(columns)
        full = self._args == "full"
        numbers = (*_KEY, *(_FULL if full else ()))
        columns += device.select(pl.col(c).cast(pl.Int64).alias(f"int:{c}") for c in numbers).get_columns()
        columns += self._texts(device, *_KEY_TEXT, *(_FULL_TEXT if full else ()))
        whole = packets.texts.column(names, lambda n: n if short_kernel_name(n) != n else None)
        columns.append(whole.alias("text:kernel"))
        if launched is not None:
            columns.append(launched)
        return pl.DataFrame(columns)

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

    def _message_slices(self, rows: pl.DataFrame, side: str, title: str) -> list[pl.DataFrame]:
        """Spans of the kernels, and in each one an instant that bears the arrow: sent when the send kernel starts,
        received when the receive kernel ends. Between the kernels themselves an arrow would point backwards."""
        other = "recv" if side == "send" else "send"
        rows = rows.rename({f"{side}_ts_ns": "ts_ns", f"{side}_end_ns": "end_ns"})
        more = rows.select(
            pl.col("bytes").alias("int:bytes"),
            pl.col("ordinal").alias("int:ordinal"),
            pl.col("visit").alias("int:micro_batch"),
            (pl.col(f"{other}_ts_ns") - pl.col("ts_ns")).alias("int:peer_starts_later_by_ns"),
            (pl.col(f"{other}_end_ns") - pl.col("end_ns")).alias("int:peer_ends_later_by_ns"),
            pl.when(pl.col("kind") == "proxy").then(pl.col("visit") + 1).alias("correlation"),
        )
        spans = self._slices(rows, title, "p2p", *more.get_columns(), *self._texts(rows, "dtype"))
        at = rows.get_column("ts_ns" if side == "send" else "end_ns")
        ends = pl.DataFrame([at.alias("ts_ns"), at.alias("end_ns")])
        mark = "sent" if side == "send" else "received"
        return [spans, self._slices(ends, mark, "p2p", rows.get_column("flow:message"))]

    def _thread_tracks(self) -> list[tuple[int, pl.Expr | None]]:
        """The tracks of threads, the main one first: uuid, and which rows are its own (None: all are)."""
        tables = self._tables
        parts = (tables.annotations.filter(~_is_control()), tables.ops, tables.calls)
        counts = pl.concat([p.select("pid", "tid") for p in parts]).group_by("pid", "tid").len()
        real = tables.info.pid
        main = (pl.col("tid") == real) & (pl.col("pid") == real) if real is not None else pl.lit(False)
        ordered = counts.with_columns(main.alias("main")).sort("main", "len", "tid", descending=[True, True, False])
        tracks: list[tuple[int, pl.Expr | None]] = []
        for place, (pid, tid, _, is_main) in enumerate(ordered.iter_rows()):
            name = "main thread" if is_main else "thread"
            thread = self._uuid()
            # Perfetto takes thread id 0 for the process itself.
            self._packets.describe(
                thread_track(thread, self._pid, tid if tid > 0 else (1 << 30) + place, name, rank=place)
            )
            here = (pl.col("pid") == pid) & (pl.col("tid") == tid)
            tracks.append((thread, here if ordered.height > 1 else None))
        return tracks

    def _threads(self, tracks: list[tuple[int, pl.Expr | None]], launching: pl.Series | None) -> None:
        annotations, ops, calls = self._tables.annotations, self._tables.ops, self._tables.calls
        own = annotations.select(_is_control()).to_series()
        unfinished = pl.when(~pl.col("finished")).then(pl.lit(False)).alias("bool:finished")
        leads = [] if launching is None else [calls.get_column("correlation").alias("int:correlation"), launching]
        also = [pl.col("external_id").alias("int:external_id")] if self._args == "full" else []
        spans, inner, leaf = (
            self._slices(frame, frame.get_column("name"), category, *frame.select("pid", "tid", *also), *more)
            for frame, category, more in (
                (annotations, "annotation", annotations.select(unfinished).get_columns()),
                (ops, "op", []),
                (calls, "call", leads),
            )
        )
        parts = [spans.filter(~own), inner, leaf]
        for thread, here in tracks:
            rows = parts if here is None else [p.filter(here) for p in parts]
            self._packets.slices(rows, self._thread_lanes(thread))
        self._controls(spans.filter(own))

    def _controls(self, spans: pl.DataFrame) -> None:
        """gloo spans end long after the calls inside which they start, so they stand apart from the threads."""
        threads = spans.select("pid", "tid").unique(maintain_order=True)
        for pid, tid in threads.iter_rows():
            name = "Control messages (gloo)" + (f" · thread {tid}" if threads.height > 1 else "")
            rows = spans.filter((pl.col("pid") == pid) & (pl.col("tid") == tid))
            self._packets.slices(rows, self._lanes(name, self._process, 5))

    def _thread_lanes(self, thread: int) -> Callable[[int], int]:
        extra = self._lanes("overlapping spans", thread, 1)
        return lambda lane: extra(lane) if lane else thread

    def _overheads(self) -> None:
        overheads = self._tables.overheads
        if overheads.height:
            frame = self._slices(overheads, overheads.get_column("name"), "profiler")
            self._packets.slices(frame, self._lanes("Profiler overhead", self._process, 6))


def _is_control() -> pl.Expr:
    return pl.col("name").cast(pl.String).str.starts_with("gloo:")


def _span_facts(rows: pl.DataFrame) -> list[pl.Series]:
    """What all top-level slices of the Attribution track carry: micro-batch, length, and arrows."""
    length = (rows.get_column("end_ns") - rows.get_column("ts_ns")).alias("int:ns")
    flows = [column for column in rows if column.name.startswith("flow")]
    return [rows.get_column("visit").alias("int:micro_batch"), length, *flows]

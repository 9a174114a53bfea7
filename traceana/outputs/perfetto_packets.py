"""Perfetto's native trace format, written in columns: descriptors, interned strings, slices and counter samples.

A trace is a run of `TracePacket` messages. Everything here belongs to one *packet sequence* (`PacketSequence`) with
its own interned strings, so sequences can be made apart and put one after another. Only field numbers of the public
protobuf messages are used. Times are integer nanoseconds on one clock.

Slices come as polars frames, one row a slice:

    ts_ns, end_ns     Int64, ns
    name, category    Int64, ids from `PacketSequence.names` and `.categories`; category 0 means none
    correlation       Int64, optional; slices of one correlation share a colour; 0 or null means none
    int:KEY           Int64, optional argument KEY; null where the slice lacks it
    bool:KEY          Boolean, likewise
    text:KEY          Int64, likewise, an id from `PacketSequence.texts`; 0 or null where the slice lacks it
    flow:KEY          UInt64, optional end of an arrow at the slice's start; 0 or null means none. Of the two ends with
                      one id, the earlier one is where the arrow starts
    flow_end:KEY      UInt64, likewise at the slice's end (not for slices of zero length, which have no end)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceana.outputs.perfetto_columns import Columns, encode_counter, encode_slices
from traceana.outputs.perfetto_lanes import arrange
from traceana.outputs.perfetto_rows import Clock, Part, width_of
from traceana.outputs.perfetto_text import Interned, bytes_field, int_field, varint

__all__ = [
    "EXPLICIT",
    "PacketSequence",
    "counter_track",
    "process_track",
    "root_track",
    "thread_track",
    "track",
]

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

EXPLICIT = 3  # TrackDescriptor.ChildTracksOrdering: by sibling_order_rank
_MERGE_NONE = 2
_CLEARED, _NEEDED = 1, 2  # SequenceFlags: forget interned strings and defaults; this packet refers to them
_BOOTTIME, _OWN_CLOCK = 6, 64  # clocks: that of the trace, and the one that counts from the sequence's origin
_BEFORE_NS = 1 << 34  # how long before the first events that is: what is within it of them takes five bytes


def _common(uuid: int, parent: int, rank: int | None, description: str) -> bytes:
    body = int_field(1, uuid)
    if parent:
        body += int_field(5, parent)
    if rank is not None:
        body += int_field(12, rank)
    return body + (bytes_field(14, description) if description else b"")


def root_track() -> bytes:
    """The trace itself, as a track: asks for processes and threads in the order of their ranks (Perfetto >= 57)."""
    return int_field(1, 0) + int_field(19, 1) + int_field(20, 1) + int_field(11, EXPLICIT)


def track(
    uuid: int, name: str, *, parent: int = 0, rank: int | None = None, explicit: bool = False, description: str = ""
) -> bytes:
    """A track descriptor; `rank` is its place among its siblings where the parent is `explicit` about order."""
    order = int_field(11, EXPLICIT) if explicit else b""
    return _common(uuid, parent, rank, description) + bytes_field(2, name) + order


def process_track(
    uuid: int, pid: int, name: str, *, rank: int, labels: Sequence[str] = (), description: str = ""
) -> bytes:
    """A process descriptor: the group that the tracks of one rank hang under; `pid` is not 0 (the idle process)."""
    process = (
        int_field(1, pid) + bytes_field(6, name) + int_field(3, rank) + b"".join(bytes_field(8, x) for x in labels)
    )
    return _common(uuid, 0, rank, description) + bytes_field(3, process) + int_field(11, EXPLICIT)


def thread_track(uuid: int, pid: int, tid: int, name: str, *, rank: int) -> bytes:
    """A thread descriptor; the thread belongs to the process descriptor of the same `pid`."""
    thread = int_field(1, pid) + int_field(2, tid) + bytes_field(5, name) + int_field(3, rank)
    return _common(uuid, 0, rank, "") + bytes_field(4, thread)


def counter_track(uuid: int, name: str, *, parent: int, rank: int, unit: str = "", axis: str = "") -> bytes:
    """A counter track; counters of one parent and `axis` share a scale."""
    counter = (bytes_field(6, unit) if unit else b"") + (bytes_field(7, axis) if axis else b"")
    return _common(uuid, parent, rank, "") + bytes_field(2, name) + bytes_field(8, counter) + int_field(15, _MERGE_NONE)


def _optional(frame: pl.DataFrame, name: str) -> tuple[I64, Mask | None]:
    """A column's values with 0 for null, and which rows have one (None: all). An id of 0 is none."""
    column = frame.get_column(name)
    nulls = column.null_count()
    values = (column.fill_null(strategy="zero") if nulls else column).to_numpy()
    values = values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64, copy=False)
    if not name.startswith(("int:", "bool:")):
        present = values != 0
        return values, None if present.all() else present
    return values, column.is_not_null().to_numpy() if nulls else None


class PacketSequence:
    """Packets of one sequence, handed to `write` as they are made. `number` is its id: not 0, unique in the file."""

    def __init__(self, write: Callable[[bytes | memoryview], object], number: int) -> None:
        self._write = write
        self._number = int_field(10, number)
        self._origin = 0  # what times are counted from
        self._fresh = True
        self._track = 0
        self.names = Interned(2)
        self.categories = Interned(1)
        self.texts = Interned(29)
        self._keys = Interned(3)
        self.slices_written = 0
        self.slices_in_lanes = 0
        self.slices_refused = 0
        self.samples_written = 0

    def packet(self, body: bytes) -> None:
        """Writes one packet as it is."""
        self._write(bytes_field(1, body + self._number))

    def describe(self, *descriptors: bytes) -> None:
        """Writes track descriptors."""
        for descriptor in descriptors:
            self.packet(bytes_field(60, descriptor))

    def _start(self, track: int, first: int, last: int) -> Clock:
        """Writes what the next events refer to: strings, and what they leave out, their track and their clock. They are
        between the two times (ns); gives how to write those."""
        fresh = b"".join(pool.take() for pool in (self.names, self.categories, self.texts, self._keys))
        body = bytes_field(12, fresh) if fresh else b""
        if self._fresh:
            self._origin = max(0, first - _BEFORE_NS)
        if self._fresh or track != self._track:
            self._track = track
            defaults = bytes_field(11, int_field(11, track))
            body += bytes_field(59, defaults + (int_field(58, _OWN_CLOCK) if self._origin else b""))
        if body:
            self.packet(int_field(13, _CLEARED | _NEEDED if self._fresh else _NEEDED) + body)
        if self._fresh and self._origin:
            readings = ((_BOOTTIME, self._origin), (_OWN_CLOCK, 0))
            snapshot = b"".join(bytes_field(1, int_field(1, clock) + int_field(2, ns)) for clock, ns in readings)
            self.packet(bytes_field(6, snapshot))
        self._fresh = False
        tail = self._number + int_field(13, _NEEDED)
        if self._origin and first < self._origin:
            return Clock(0, width_of(np.array([last])), tail + int_field(58, _BOOTTIME))
        return Clock(self._origin, width_of(np.array([last - self._origin])), tail)

    def _argument(self, frame: pl.DataFrame, name: str) -> Part | None:
        kind, _, key = name.partition(":")
        if (
            kind not in ("int", "bool", "text", "flow", "flow_end")
            or frame.get_column(name).null_count() == frame.height
        ):
            return None
        values, present = _optional(frame, name)
        if present is not None and not present.any():
            return None
        if kind.startswith("flow"):
            return Part(varint(47 << 3 | 1), values, 8, fixed=True, present=present, on_end=kind == "flow_end")
        width = 1 if kind == "bool" else width_of(values)
        field = {"int": 4, "bool": 2, "text": 17}[kind]
        body = int_field(1, self._keys.id(key)) + varint(field << 3)
        return Part(varint(4 << 3 | 2) + varint(len(body) + width) + body, values, width, present=present)

    def _columns(self, frame: pl.DataFrame) -> Columns:
        parts: list[Part] = []
        for name, tag in (("name", 10 << 3), ("category", 3 << 3), ("correlation", 52 << 3)):
            if name in frame.columns:
                values, present = _optional(frame, name)
                if present is None or present.any():
                    parts.append(Part.of(varint(tag), values, present))
        parts += [p for p in (self._argument(frame, c) for c in frame.columns) if p is not None]
        return Columns(frame.get_column("ts_ns").to_numpy(), frame.get_column("end_ns").to_numpy(), parts)

    def slices(self, frames: pl.DataFrame | Sequence[pl.DataFrame], lane_track: Callable[[int], int]) -> None:
        """Writes the slices of one visual track, in any order. Frames differ in the kinds of arguments of their slices;
        of slices with equal times, those of the first frame are outside. `lane_track` gives the uuid of a lane's track
        (lane 0 is the track itself) and is called once a lane, in order; it may write descriptors. Slices that end
        before they start are counted in `slices_refused` instead."""
        given = [frames] if isinstance(frames, pl.DataFrame) else frames
        sound = [s for s in (_sound(frame) for frame in given) if s.height]
        written = sum(s.height for s in sound)
        self.slices_refused += sum(frame.height for frame in given) - written
        if not sound:
            return
        columns = [self._columns(frame) for frame in sound]
        ts, end, merged = _merged(columns)
        order, lane = arrange(ts, end)
        uuids = [lane_track(k) for k in range(int(lane.max()) + 1)]
        clock = self._start(uuids[0], int(ts[0]), int(end.max()))
        tracks = np.array(uuids, np.int64)[lane] if len(uuids) > 1 else None
        for block in encode_slices(columns, merged, order, tracks, clock):
            self._write(block)
        self.slices_written += written
        self.slices_in_lanes += int(np.count_nonzero(lane))

    def counter(self, uuid: int, ts: I64, values: NDArray[np.int64] | NDArray[np.float64]) -> None:
        """Writes the samples of one counter track, shape (n,) each, ts in ns ascending."""
        if len(ts) == 0:
            return
        fixed = values.dtype == np.float64
        bits = values.view(np.int64)
        head = varint(44 << 3 | 1) if fixed else varint(30 << 3)
        part = Part(head, bits, 8 if fixed else width_of(bits), fixed=fixed)
        clock = self._start(uuid, int(ts[0]), int(ts[-1]))
        for block in encode_counter(ts, part, clock):
            self._write(block)
        self.samples_written += len(ts)


def _sound(frame: pl.DataFrame) -> pl.DataFrame:
    """The slices that end after they start, in order of their start, longer first on ties."""
    ts, end = frame.get_column("ts_ns").to_numpy(), frame.get_column("end_ns").to_numpy()
    sound = (end >= ts) & (ts >= 0)
    if not sound.all():
        return _sound(frame.filter(pl.Series(sound)))
    later = ts[1:] > ts[:-1]
    if bool((later | ((ts[1:] == ts[:-1]) & (end[1:] <= end[:-1]))).all()):
        return frame
    return frame.sort(["ts_ns", "end_ns"], descending=[False, True], maintain_order=True)


def _merged(columns: Sequence[Columns]) -> tuple[I64, I64, I64 | None]:
    """Start and end of the slices of all of `columns` in order, and the order (None: as they are)."""
    if len(columns) == 1:
        return columns[0].ts, columns[0].end, None
    ts, end = np.concatenate([c.ts for c in columns]), np.concatenate([c.end for c in columns])
    order = np.argsort(ts, kind="stable")
    ts, end = ts[order], end[order]
    same = ts[1:] == ts[:-1]
    tied = np.flatnonzero(np.append(same, False) | np.concatenate(([False], same)))
    if len(tied):
        longest = np.lexsort((-end[tied], ts[tied]))
        order[tied], end[tied] = order[tied][longest], end[tied][longest]
    return ts, end, order

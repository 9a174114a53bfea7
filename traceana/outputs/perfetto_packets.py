"""Perfetto's native trace format, written in columns: descriptors, interned strings, slices and counter samples.

A trace is a run of `TracePacket` messages. Everything here belongs to one *packet sequence* (`PacketSequence`) with
its own interned strings, so sequences can be made apart and put one after another. Only field numbers of the public
protobuf messages are used. Times are integer nanoseconds on one clock.

Slices come as a polars frame, one row a slice:

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

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from traceana.outputs.perfetto_columns import BEGIN, COUNTER, INSTANT, Part, encode, width_of
from traceana.outputs.perfetto_lanes import arrange

__all__ = [
    "EXPLICIT",
    "Interned",
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
_CLEARED, _NEEDED = 1, 2  # SequenceFlags: forget interned strings; this packet refers to them


def _varint(n: int) -> bytes:
    n &= (1 << 64) - 1
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def _int(field: int, n: int) -> bytes:
    return _varint(field << 3) + _varint(n)


def _bytes(field: int, data: bytes | str) -> bytes:
    raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
    return _varint(field << 3 | 2) + _varint(len(raw)) + raw


def _common(uuid: int, parent: int, rank: int | None, description: str) -> bytes:
    body = _int(1, uuid)
    if parent:
        body += _int(5, parent)
    if rank is not None:
        body += _int(12, rank)
    return body + (_bytes(14, description) if description else b"")


def root_track() -> bytes:
    """The trace itself, as a track: asks for processes and threads in the order of their ranks (Perfetto >= 57)."""
    return _int(1, 0) + _int(19, 1) + _int(20, 1) + _int(11, EXPLICIT)


def track(
    uuid: int, name: str, *, parent: int = 0, rank: int | None = None, explicit: bool = False, description: str = ""
) -> bytes:
    """A track descriptor; `rank` is its place among its siblings where the parent is `explicit` about order."""
    order = _int(11, EXPLICIT) if explicit else b""
    return _common(uuid, parent, rank, description) + _bytes(2, name) + order


def process_track(
    uuid: int, pid: int, name: str, *, rank: int, labels: Sequence[str] = (), description: str = ""
) -> bytes:
    """A process descriptor: the group that the tracks of one rank hang under; `pid` is not 0 (the idle process)."""
    process = _int(1, pid) + _bytes(6, name) + _int(3, rank) + b"".join(_bytes(8, x) for x in labels)
    return _common(uuid, 0, rank, description) + _bytes(3, process) + _int(11, EXPLICIT)


def thread_track(uuid: int, pid: int, tid: int, name: str, *, rank: int) -> bytes:
    """A thread descriptor; the thread belongs to the process descriptor of the same `pid`."""
    thread = _int(1, pid) + _int(2, tid) + _bytes(5, name) + _int(3, rank)
    return _common(uuid, 0, rank, "") + _bytes(4, thread)


def counter_track(uuid: int, name: str, *, parent: int, rank: int, unit: str = "", axis: str = "") -> bytes:
    """A counter track; counters of one parent and `axis` share a scale."""
    counter = (_bytes(6, unit) if unit else b"") + (_bytes(7, axis) if axis else b"")
    return _common(uuid, parent, rank, "") + _bytes(2, name) + _bytes(8, counter) + _int(15, _MERGE_NONE)


class Interned:
    """Strings of one kind that packets refer to by id (from 1 on)."""

    def __init__(self, field: int) -> None:
        self._field = field
        self._ids: dict[str, int] = {}
        self._fresh = bytearray()

    def id(self, text: str) -> int:
        """The id of `text`, new if it is."""
        number = self._ids.get(text)
        if number is None:
            number = self._ids[text] = len(self._ids) + 1
            self._fresh += _bytes(self._field, _int(1, number) + _bytes(2, text))
        return number

    def column(self, values: pl.Series, change: Callable[[str], str | None] | None = None) -> pl.Series:
        """Ids of a Categorical or String column as Int64; 0 where it is null or `change` gives None."""
        nulls = values.null_count()
        if nulls == values.len():
            return pl.Series(values.name, np.zeros(values.len(), np.int64))
        if values.dtype == pl.String:
            encoded: Any = values.to_arrow(compat_level=pl.CompatLevel.oldest()).dictionary_encode()
            texts: list[str] = encoded.dictionary.to_pylist()  # by first row, so that equal columns give equal ids
            used = np.arange(len(texts))
            codes = encoded.indices
            plain = (codes.fill_null(0) if nulls else codes).to_numpy(False)
        else:  # codes depend on what was read before
            codes = values.to_physical()
            plain = (codes.fill_null(0) if nulls else codes).to_numpy()
            rows = np.flatnonzero(values.is_not_null().to_numpy()) if nulls else np.arange(len(plain))
            first = np.full(int(plain.max()) + 1, -1, np.int64)
            first[plain[rows[::-1]]] = rows[::-1]
            used = np.flatnonzero(first >= 0)
            used = used[np.argsort(first[used])]
            texts = values.gather(first[used]).cast(pl.String()).to_list()
        ids = np.zeros(int(used.max()) + 1, np.int64)
        for code, text in zip(used.tolist(), texts, strict=True):
            changed = text if change is None else change(text)
            ids[code] = 0 if changed is None else self.id(changed)
        numbers = ids[plain]
        if nulls:
            numbers[values.is_null().to_numpy()] = 0
        return pl.Series(values.name, numbers)

    def take(self) -> bytes:
        """The InternedData entries made since the last call."""
        fresh = bytes(self._fresh)
        self._fresh.clear()
        return fresh


def _optional(frame: pl.DataFrame, name: str) -> tuple[I64, Mask | None]:
    """A column's values with 0 for null, and which rows have one (None: all). An id of 0 is none."""
    # Through Arrow: a polars expression for each column would cost more than a small trace's encoding.
    column: pa.Array[Any] = frame.get_column(name).to_arrow()
    nulls = column.null_count
    values = (column.fill_null(False if pa.types.is_boolean(column.type) else 0) if nulls else column).to_numpy(False)
    values = values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64, copy=False)
    if not name.startswith(("int:", "bool:")):
        present = values != 0
        return values, None if present.all() else present
    return values, column.is_valid().to_numpy(False) if nulls else None


class PacketSequence:
    """Packets of one sequence, handed to `write` as they are made. `number` is its id: not 0, unique in the file."""

    def __init__(self, write: Callable[[bytes], object], number: int) -> None:
        self._write = write
        self._number = _int(10, number)
        self._fresh = True
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
        self._write(_bytes(1, body + self._number))

    def describe(self, *descriptors: bytes) -> None:
        """Writes track descriptors."""
        for descriptor in descriptors:
            self.packet(_bytes(60, descriptor))

    def _flush_interned(self) -> None:
        fresh = b"".join(pool.take() for pool in (self.names, self.categories, self.texts, self._keys))
        if fresh or self._fresh:
            flags = _CLEARED | _NEEDED if self._fresh else _NEEDED
            self.packet(_int(13, flags) + _bytes(12, fresh))
            self._fresh = False

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
            return Part(_varint(47 << 3 | 1), values, 8, fixed=True, present=present, on_end=kind == "flow_end")
        width = 1 if kind == "bool" else width_of(values)
        field = {"int": 4, "bool": 2, "text": 17}[kind]
        body = _int(1, self._keys.id(key)) + _varint(field << 3)
        return Part(_varint(4 << 3 | 2) + _varint(len(body) + width) + body, values, width, present=present)

    def slices(self, frame: pl.DataFrame, lane_track: Callable[[int], int]) -> None:
        """Writes the slices of one visual track, in any order. `lane_track` gives the uuid of a lane's track (lane 0 is
        the track itself) and is called once a lane, in order; it may write descriptors. Slices that end before they
        start are counted in `slices_refused` instead."""
        sound = (pl.col("end_ns") >= pl.col("ts_ns")) & (pl.col("ts_ns") >= 0)
        given, frame = frame.height, frame if frame.select(sound.all()).item() else frame.filter(sound)
        self.slices_refused += given - frame.height
        if frame.height == 0:
            return
        if not _sorted(frame):
            frame = frame.sort(["ts_ns", "end_ns"], descending=[False, True], maintain_order=True)
        ts, end = frame.get_column("ts_ns").to_numpy(), frame.get_column("end_ns").to_numpy()
        order, lane = arrange(ts, end)
        uuids = np.array([lane_track(k) for k in range(int(lane.max()) + 1)], np.int64)
        names = frame.get_column("name").to_numpy()
        parts = [Part(_varint(10 << 3), names, width_of(names))]
        for name, tag in (("category", 3 << 3), ("correlation", 52 << 3)):
            if name in frame.columns:
                values, present = _optional(frame, name)
                if present is None or present.any():
                    parts.append(Part(_varint(tag), values, width_of(values), present=present))
        parts += [p for p in (self._argument(frame, c) for c in frame.columns) if p is not None]
        kind = np.where(end > ts, BEGIN, INSTANT).astype(np.uint8)
        self._events(encode(order, kind, ts, end, uuids[lane], parts, self._tail()))
        self.slices_written += frame.height
        self.slices_in_lanes += int(np.count_nonzero(lane))

    def counter(self, uuid: int, ts: I64, values: NDArray[np.int64] | NDArray[np.float64]) -> None:
        """Writes the samples of one counter track, shape (n,) each, ts in ns ascending."""
        fixed = values.dtype == np.float64
        bits = values.view(np.int64)
        head = _varint(44 << 3 | 1) if fixed else _varint(30 << 3)
        part = Part(head, bits, 8 if fixed else width_of(bits), fixed=fixed)
        n = len(ts)
        kind = np.full(n, COUNTER, np.uint8)
        self._events(encode(np.arange(n), kind, ts, ts, np.full(n, uuid), [part], self._tail()))
        self.samples_written += n

    def _tail(self) -> bytes:
        return self._number + _int(13, _NEEDED)

    def _events(self, blocks: Iterable[bytes]) -> None:
        self._flush_interned()
        for block in blocks:
            self._write(block)


def _sorted(frame: pl.DataFrame) -> bool:
    ts, end = frame.get_column("ts_ns").to_numpy(), frame.get_column("end_ns").to_numpy()
    later = ts[1:] > ts[:-1]
    return bool((later | ((ts[1:] == ts[:-1]) & (end[1:] <= end[:-1]))).all())

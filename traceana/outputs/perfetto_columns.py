"""Track events as bytes, many at a time: numpy columns in, Perfetto packets out, no Python per event.

Events that carry the same fields have the same number of bytes, because integers become varints padded to the widest
value of their column (decoders accept empty groups). So each such group is one byte matrix; Arrow then gathers the rows
of all groups into writing order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

__all__ = ["BEGIN", "COUNTER", "INSTANT", "Part", "encode", "width_of"]

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Mask = NDArray[np.bool_]
if TYPE_CHECKING:
    Packets = pa.Array[Any]

BEGIN, _END, INSTANT, COUNTER = 1, 2, 3, 4  # TrackEvent.Type
_ROWS = 1 << 15  # events encoded at once: their bytes stay in the cache


@dataclass(frozen=True, slots=True)
class Part:
    """One field of a track event: constant bytes, then a value of `width` bytes, a padded varint or (`fixed`) 8 bytes.

    `values` has one entry a slice; `present` is None where every slice has the field. `on_end` puts it on the event
    that ends the slice instead of the one that begins it.
    """

    head: bytes
    values: I64
    width: int
    fixed: bool = False
    present: Mask | None = None
    on_end: bool = False

    def write(self, rows: U8, at: int, which: I64) -> None:
        """Puts the values of the slices `which` into the columns from `at` on."""
        if self.fixed:
            bits = self.values[which].astype("<i8", copy=False).view(np.uint8).reshape(-1, 8)
            rows[:, at : at + 8] = bits
        else:
            _put_varint(rows, at, self.values[which], self.width)


def width_of(values: I64) -> int:
    """Bytes that hold every value as a varint. Negative numbers take ten."""
    if len(values) == 0:
        return 1
    if int(values.min()) < 0:
        return 10
    return max(1, (int(values.max()).bit_length() + 6) // 7)


def _put_varint(rows: U8, at: int, values: I64, width: int) -> None:
    """Writes each value as a varint of exactly `width` bytes into the columns from `at` on."""
    if width == 1:
        rows[:, at] = values
        return
    if width == 2:
        rows[:, at] = values & 0x7F | 0x80
        rows[:, at + 1] = values >> 7
        return
    v = values.view(np.uint64)
    # Spread 56 bits over 8 bytes of 7 bits each, in three steps instead of eight.
    x = (v & np.uint64(0x0FFFFFFF)) | ((v & np.uint64(0xFFFFFFF0000000)) << np.uint64(4))
    x = (x & np.uint64(0x00003FFF00003FFF)) | ((x & np.uint64(0x0FFFC0000FFFC000)) << np.uint64(2))
    x = (x & np.uint64(0x007F007F007F007F)) | ((x & np.uint64(0x3F803F803F803F80)) << np.uint64(1))
    more = (1 << (8 * min(width - 1, 8))) - 1  # the continuation bit of every byte but the last
    x |= np.uint64(0x8080808080808080 & more)
    low = min(width, 8)
    rows[:, at : at + low] = x.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)[:, :low]
    for k in range(8, width):
        rows[:, at + k] = (v >> np.uint64(7 * k)) & np.uint64(0x7F) | np.uint64(0x80 if k < width - 1 else 0)


def _constant_varint(n: int, width: int) -> bytes:
    return bytes(n >> 7 * k & 0x7F | (0x80 if k < width - 1 else 0) for k in range(width))


class _Layout:
    """The bytes of all events that carry the same parts: a template and the columns to fill in."""

    def __init__(self, kind: int | None, time: I64, parts: Sequence[Part], kinds: U8, tail: bytes) -> None:
        body = bytearray([0x48, kind or 0])  # TrackEvent.type
        self._columns: list[tuple[int, Part]] = []
        for part in parts:
            at = len(body) + len(part.head)
            body += part.head + bytes(part.width)
            self._columns.append((at, part))
        head = bytes([0x40]) + bytes(9) + bytes([0x5A]) + _constant_varint(len(body), 2)
        size = len(head) + len(body) + len(tail)
        if size >= 1 << 14:
            raise ValueError(f"{len(parts)} fields do not fit one packet")
        start = 3 + len(head)
        packet = bytes([0x0A]) + _constant_varint(size, 2) + head + bytes(body) + tail
        self._template = np.frombuffer(packet, np.uint8)
        self._columns = [(start + at, part) for at, part in self._columns]
        self._kind_at = start + 1 if kind is None else None
        self._kinds, self._time = kinds, time

    def rows(self, which: I64) -> Packets:
        """The packets of the slices `which`, in that order."""
        width = len(self._template)
        rows = np.empty((len(which), width), np.uint8)
        rows[:] = self._template
        _put_varint(rows, 4, self._time[which], 9)
        if self._kind_at is not None:
            rows[:, self._kind_at] = self._kinds[which]
        for at, part in self._columns:
            part.write(rows, at, which)
        offsets = np.arange(len(which) + 1, dtype=np.int64) * width
        buffers = [None, pa.py_buffer(offsets.data), pa.py_buffer(rows.data)]
        return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(which), buffers)


def _bytes_of(packets: Packets) -> bytes:
    data = packets.buffers()[2]
    return b"" if data is None else data.to_pybytes()


def _by_presence(parts: Sequence[Part], count: int) -> tuple[list[list[Part]], I64]:
    """The combinations of parts that occur, and the index of each of `count` slices into them."""
    always = [p for p in parts if p.present is None]
    present = [p.present for p in parts if p.present is not None]
    if not present:
        return [always], np.zeros(count, np.int64)
    bits = np.packbits(np.stack(present, axis=1), axis=1)
    if bits.shape[1] == 1:  # at most eight: count the bytes instead of sorting them
        byte = bits.ravel()
        used = np.flatnonzero(np.bincount(byte, minlength=256))
        patterns, index = used.astype(np.uint8), np.searchsorted(used, np.arange(256))[byte]
    else:
        patterns, index = np.unique(bits.view(f"V{bits.shape[1]}").ravel(), return_inverse=True)
    sometimes = [p for p in parts if p.present is not None]
    combinations: list[list[Part]] = []
    for pattern in patterns:
        flags = np.unpackbits(np.frombuffer(pattern.tobytes(), np.uint8))[: len(sometimes)].tolist()
        combinations.append(always + [p for p, flag in zip(sometimes, flags, strict=True) if flag])
    return combinations, index


def encode(order: I64, kind: U8, ts: I64, end: I64, tracks: I64, parts: Sequence[Part], tail: bytes) -> Iterator[bytes]:
    """The packets of the events in `order` (see `arrange`), some thousand at a time.

    `kind` (BEGIN, INSTANT or COUNTER), `ts`, `end` and `tracks` (uuid) have one entry a slice. An END carries its track
    and the parts that say `on_end`. `tail` are the bytes that end every packet (its sequence and flags).
    """
    track = Part(bytes([0x58]), tracks, width_of(tracks))
    opening, group = _by_presence([p for p in parts if not p.on_end], len(ts))
    closing, end_group = _by_presence([p for p in parts if p.on_end], len(ts))
    layouts = [_Layout(None, ts, [track, *some], kind, tail) for some in opening]
    layouts += [_Layout(_END, end, [track, *some], kind, tail) for some in closing]
    for low in range(0, len(order), _ROWS):
        block = order[low : low + _ROWS]
        begins = block >= 0
        which = np.where(begins, block, ~block)
        layout = np.where(begins, group[which], len(opening) + end_group[which])
        chosen = [np.flatnonzero(layout == k) for k in range(len(layouts))]
        packets = [layouts[k].rows(which[rows]) for k, rows in enumerate(chosen) if len(rows)]
        if len(packets) == 1:
            yield _bytes_of(packets[0])
            continue
        source = np.empty(len(block), np.int64)
        source[np.concatenate(chosen)] = np.arange(len(block))
        gathered = pc.take(pa.concat_arrays(packets), pa.array(source, type=pa.int64()), boundscheck=False)
        yield _bytes_of(gathered)

"""One kind of row of the merged timeline's file: events with the same fields, and so with the same number of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traceana.outputs.perfetto_text import varint

__all__ = ["Clock", "Layout", "Part", "width_of"]

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Mask = NDArray[np.bool_]


def width_of(values: I64) -> int:
    """Bytes that hold every value as a varint. Negative numbers take ten."""
    if len(values) == 0:
        return 1
    if int(values.min()) < 0:
        return 10
    return max(1, (int(values.max()).bit_length() + 6) // 7)


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

    @classmethod
    def of(cls, head: bytes, values: I64, present: Mask | None = None) -> Part:
        """A varint; where all slices have the same one, it is constant bytes only."""
        if present is None and len(values) and values.min() == values.max():
            return cls(head + varint(int(values[0])), values, 0)
        return cls(head, values, width_of(values), present=present)

    def over(self, count: int, at: int) -> Part:
        """The same field for `count` slices, of which these are the ones from `at` on and only they have it."""
        values, present = np.zeros(count, np.int64), np.zeros(count, np.bool_)
        values[at : at + len(self.values)] = self.values
        present[at : at + len(self.values)] = True if self.present is None else self.present
        return replace(self, values=values, present=present)

    def take(self, index: I64) -> Part:
        """The same field of the slices `index`."""
        return replace(self, values=self.values[index], present=None if self.present is None else self.present[index])


@dataclass(frozen=True, slots=True)
class Clock:
    """How a packet tells its time: counted from `origin` (ns), as a varint of `width` bytes. `tail` ends every packet:
    its sequence, its flags, and its clock where that is not the sequence's own."""

    origin: int
    width: int
    tail: bytes


def _strided(rows: U8, at: int, dtype: str) -> NDArray[Any]:
    """The numbers that lie in the columns from `at` on, one a row."""
    return np.ndarray(len(rows), dtype, rows.data, at, (rows.shape[1],))


def _put_varint(rows: U8, at: int, values: I64, width: int) -> None:
    """Writes each value as a varint of exactly `width` bytes into the columns from `at` on."""
    if width == 1:
        rows[:, at] = values
        return
    if width == 2:
        v = values.astype(np.uint16)
        _strided(rows, at, "<u2")[:] = (v & 0x7F) | 0x80 | (v << 1 & 0x7F00)
        return
    # Spread 28 bits over 4 bytes of 7 bits each; all bytes but the last of the number say that more follow.
    x = values.astype(np.uint32)
    x = ((x & 0x3FFF) | ((x & 0x0FFFC000) << 2)).astype(np.uint32, copy=False)
    x = ((x & 0x007F007F) | ((x & 0x3F803F80) << 1)).astype(np.uint32, copy=False)
    x |= np.uint32(0x80808080 & ((1 << 8 * (width - 1)) - 1))
    if width == 3:
        _strided(rows, at, "<u2")[:] = x
        rows[:, at + 2] = x >> 16
        return
    _strided(rows, at, "<u4")[:] = x
    if width > 4:
        _put_varint(rows, at + 4, (values.view(np.uint64) >> np.uint64(28)).view(np.int64), width - 4)


class Layout:
    """The bytes of all rows that carry the same fields: a template, and the columns to fill in."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._template = bytearray()
        self._columns: list[tuple[int, I64, int, bool]] = []

    def event(self, kind: int, time: I64, parts: Sequence[Part]) -> None:
        """Adds an event to the row. `time` counts from the clock's origin."""
        body = bytearray([0x48, kind])  # TrackEvent.type
        columns: list[tuple[int, Part]] = []
        for part in parts:
            body += part.head
            if part.width:
                columns.append((len(body), part))
                body += bytes(part.width)
        head = bytes([0x40]) + bytes(self._clock.width) + bytes([0x5A]) + varint(len(body))
        packet = bytes([0x0A]) + varint(len(head) + len(body) + len(self._clock.tail))
        start = len(self._template) + len(packet)
        self._template += packet + head + body + self._clock.tail
        self._columns.append((start + 1, time, self._clock.width, False))
        start += len(head)
        self._columns += [(start + at, part.values, part.width, part.fixed) for at, part in columns]

    def rows(self, which: slice | I64, count: int) -> U8:
        """The `count` rows of the slices `which`, shape (count, bytes)."""
        rows = np.frombuffer(self._template * count, np.uint8).reshape(count, len(self._template))
        for at, values, size, fixed in self._columns:
            if fixed:
                _strided(rows, at, "<i8")[:] = values[which]
            else:
                _put_varint(rows, at, values[which], size)
        return rows

"""Fields of protobuf messages one by one, and the strings that packets refer to by number."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceana.arrays import once
from traceana.categories import few_words

__all__ = ["Interned", "Texts", "bytes_field", "int_field", "varint"]


_SHORT = [bytes([n]) for n in range(1 << 7)]


def varint(n: int) -> bytes:
    """`n` as a varint; negative numbers as their 64 bits."""
    if 0 <= n < 1 << 14:  # nearly all of them
        return _SHORT[n] if n < 1 << 7 else bytes((n & 0x7F | 0x80, n >> 7))
    n &= (1 << 64) - 1
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def int_field(field: int, n: int) -> bytes:
    """The field of a message with the number `n`."""
    return varint(field << 3) + varint(n)


def bytes_field(field: int, data: bytes | str) -> bytes:
    """The field of a message with a text, bytes, or a message."""
    raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
    return varint(field << 3 | 2) + varint(len(raw)) + raw


class Texts:
    """A column of texts: the different ones in order of their first rows, and for each row the place of its own there,
    -1 where it is null."""

    def __init__(self, texts: list[str], places: NDArray[np.int64]) -> None:
        self.texts, self.places = texts, places

    @classmethod
    def of(cls, values: pl.Series) -> Texts:
        """Those of a Categorical or String column."""
        if values.dtype == pl.String():
            values = few_words(values)
        nulls = values.null_count()
        if nulls == values.len():
            return cls([], np.full(values.len(), -1, np.int64))
        codes = values.to_physical()  # they depend on what was read before
        plain = (codes.fill_null(0) if nulls else codes).to_numpy()
        rows = np.flatnonzero(values.is_not_null().to_numpy()) if nulls else np.arange(len(plain))
        first = np.full(int(plain.max()) + 1, -1, np.int64)
        first[plain[rows[::-1]]] = rows[::-1]
        used = np.flatnonzero(first >= 0)
        used = used[np.argsort(first[used])]
        place = np.full(len(first), -1, np.int64)
        place[used] = np.arange(len(used))
        places = place[plain]
        if nulls:
            places[values.is_null().to_numpy()] = -1
        return cls(values.gather(first[used]).cast(pl.String()).to_list(), places)

    @classmethod
    def told(cls, tell: Callable[[list[int]], str], *columns: NDArray[np.int64]) -> Texts:
        """The text of each row, which `tell` makes of the row's numbers in `columns`, once for all equal ones."""
        first, key = once(*columns)
        by_row = np.argsort(first)
        place = np.empty(len(first), np.int64)
        place[by_row] = np.arange(len(first))
        numbers = np.stack([c[first[by_row]] for c in columns], axis=1).tolist()
        return cls([tell(row) for row in numbers], place[key])


class Interned:
    """Strings of one kind that packets refer to by id (from 1 on)."""

    def __init__(self, field: int) -> None:
        self._tag = varint(field << 3 | 2)
        self._ids: dict[str, int] = {}
        self._fresh = bytearray()

    def id(self, text: str) -> int:
        """The id of `text`, new if it is."""
        number = self._ids.get(text)
        if number is None:
            number = self._ids[text] = len(self._ids) + 1
            raw = text.encode("utf-8", "replace")
            entry = b"\x08" + varint(number) + b"\x12" + varint(len(raw)) + raw
            self._fresh += self._tag + varint(len(entry)) + entry
        return number

    def column(self, values: pl.Series | Texts, change: Callable[[str], str | None] | None = None) -> pl.Series:
        """Ids of a Categorical or String column as Int64; 0 where it is null or `change` gives None."""
        texts = values if isinstance(values, Texts) else Texts.of(values)
        changed = texts.texts if change is None else [change(text) for text in texts.texts]
        ids = np.array([*(0 if text is None else self.id(text) for text in changed), 0], np.int64)
        return pl.Series("" if isinstance(values, Texts) else values.name, ids[texts.places])

    def take(self) -> bytes:
        """The InternedData entries made since the last call."""
        fresh = bytes(self._fresh)
        self._fresh.clear()
        return fresh

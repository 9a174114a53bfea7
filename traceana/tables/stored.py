"""The tables of a rank that stay in the store: read when they are asked for, so that a capture may be larger than
memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from itertools import count

import polars as pl

from traceana.tables.capture import FRAMES, RankInfo, RankTables

__all__ = ["Kept", "StoredTables"]

_KEPT_BYTES = 64 << 20
_numbers = count()


class Kept:
    """The frames that the ranks of a capture read last, up to `most` bytes: a step asks for the same table more than
    once. Safe for several threads."""

    def __init__(self, most: int = _KEPT_BYTES) -> None:
        self._most = most
        self._bytes = 0
        self._frames: OrderedDict[tuple[int, str], tuple[pl.DataFrame, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, str], read: Callable[[str], pl.DataFrame]) -> pl.DataFrame:
        """The frame of `key`, read by its name where it is not kept."""
        with self._lock:
            if key in self._frames:
                self._frames.move_to_end(key)
                return self._frames[key][0]
        frame = read(key[1])
        size = int(frame.estimated_size())
        with self._lock:
            if key not in self._frames:
                self._frames[key] = frame, size
                self._bytes += size
            while self._bytes > self._most and len(self._frames) > 1:
                self._bytes -= self._frames.popitem(last=False)[1][1]
        return frame


class StoredTables(RankTables):
    """RankTables whose frames, but for `losses`, are what `read` gives for their names, whenever they are not kept."""

    __slots__ = ("_kept", "_number", "_read")
    _read: Callable[[str], pl.DataFrame]
    _kept: Kept
    _number: int

    def __init__(
        self, info: RankInfo, losses: pl.DataFrame, read: Callable[[str], pl.DataFrame], kept: Kept | None = None
    ) -> None:
        own = {"info": info, "losses": losses, "_read": read, "_kept": kept or Kept(), "_number": next(_numbers)}
        for name, value in own.items():
            object.__setattr__(self, name, value)  # the parent is frozen

    def __getattr__(self, name: str) -> pl.DataFrame:
        # Only asked for attributes that are not set: the frames of the parent.
        if name not in FRAMES:
            raise AttributeError(name)
        return self._kept.get((self._number, name), self._read)

    @property
    def in_memory(self) -> bool:
        """They are read when they are asked for."""
        return False

    def of(self, info: RankInfo, losses: pl.DataFrame) -> StoredTables:
        """The same frames under another name."""
        return StoredTables(info, losses, self._read, self._kept)

    def mapped(self, change: Callable[[str, pl.DataFrame], pl.DataFrame]) -> StoredTables:
        """The same with every frame passed through `change`, each time it is read."""
        read = self._read
        return StoredTables(self.info, self.losses, lambda name: change(name, read(name)), self._kept)

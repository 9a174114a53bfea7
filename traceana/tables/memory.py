"""How much of a capture is in memory at once: ranks that are being read, and tables that were."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Memory", "text_bytes"]

_TABLE_BYTES = 96 << 20  # ranks beyond it stay in the store and are read from there
_TEXT_BYTES = 3 << 29  # of traces read at the same time; what reading takes is about as much
_GZ = b"\x1f\x8b"


class Memory:
    """What may still be held in this process. Safe for several threads."""

    def __init__(self, tables: int = _TABLE_BYTES, text: int = _TEXT_BYTES) -> None:
        self._left = tables
        self._text = text
        self._reading = 0
        self._changed = threading.Condition()

    def take(self, size: int) -> bool:
        """Whether tables of `size` bytes more may be held; from then on they are counted."""
        with self._changed:
            if size > self._left:
                return False
            self._left -= size
            return True

    @contextmanager
    def reading(self, size: int) -> Generator[bool, None, None]:
        """Waits until a trace of `size` bytes of text may be read beside those that are. Gives whether few such traces
        may be at the same time, so that their chunks are better spread over the cores."""
        with self._changed:
            self._changed.wait_for(lambda: not self._reading or self._reading + size <= self._text)
            self._reading += size
        try:
            yield 4 * size > self._text
        finally:
            with self._changed:
                self._reading -= size
                self._changed.notify_all()


def text_bytes(path: Path) -> int:
    """About how many bytes of text a trace holds; a gz says so at its end, but for whole 4 GB. Raises OSError."""
    with path.open("rb") as file:
        packed = file.read(2) == _GZ
        size = file.seek(0, 2)
        if not packed or size < 18:
            return size
        file.seek(-4, 2)
        return max(int.from_bytes(file.read(4), "little"), 4 * size)

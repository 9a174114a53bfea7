"""One stream, written by several threads in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition

__all__ = ["InTurn"]

_AHEAD_BYTES = 16 << 20


class InTurn:
    """Hands what writers 0, 1, 2, ... write to `write` as if they had written one after the other.

    The writer whose turn it is writes through; those behind it are held back in memory, up to `most` bytes of all of
    them together, then wait. So the writers have to be started in order.
    """

    def __init__(self, write: Callable[[bytes | memoryview], object], most: int = _AHEAD_BYTES) -> None:
        self._write = write
        self._most = most
        self._turn = 0
        self._held: dict[int, list[bytes | memoryview]] = {}
        self._bytes = 0
        self._done: set[int] = set()
        self._error: BaseException | None = None
        self._changed = Condition()

    def writer(self, number: int) -> Callable[[bytes | memoryview], None]:
        """What writer `number` writes with; raises what `stop` was called with, once it was."""

        def write(data: bytes | memoryview) -> None:
            with self._changed:
                if number != self._turn and self._bytes + len(data) > self._most:
                    self._changed.wait_for(lambda: self._error or number == self._turn)
                if self._error is not None:
                    raise self._error
                if number != self._turn:
                    self._held.setdefault(number, []).append(data)
                    self._bytes += len(data)
                    return
            self._flush(number)
            self._write(data)

        return write

    def done(self, number: int) -> None:
        """Writer `number` has nothing more to write."""
        with self._changed:
            self._done.add(number)
            while self._turn in self._done and self._error is None:
                self._flush(self._turn)
                self._turn += 1
            self._changed.notify_all()

    def stop(self, error: BaseException) -> None:
        """Lets nobody wait or write any more: one of them failed with `error`, and so do all. The first one counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _flush(self, number: int) -> None:
        """Writes what is held of the writer whose turn it is; nobody else touches that."""
        for data in self._held.pop(number, ()):
            self._bytes -= len(data)
            self._write(data)

"""Cuts the text of a trace into what stands before its events, stretches of whole events, and what stands after them.

    cutter = Cutter(blocks, limits)
    cutter.read_head()            # up to the list of events
    for chunk in cutter: ...      # stretches of whole events; the last ones hold what stands after the list

A cut is made where `}, {"ph":` stands (in the layout of the file), an event boundary in all but contrived files. Where
it is none, the chunk's braces or quotes do not add up, and the tolerant path carries its tail over to the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from traceana.sources.kineto_words import SLACK
from traceana.sources.limits import Limits

__all__ = ["Chunk", "Cutter"]

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_LIST = re.compile(rb"\s*\[\s*(?=\{)")
_CUT = re.compile(rb'\}\s*,\s*\{\s*"[^"\\]{1,32}"\s*:')
_PHASE = re.compile(rb'"ph"\s*:\s*"')
_PAD = b" " * SLACK
_LARGEST = 16 << 20  # a stretch without any boundary is handed over at this size


@dataclass(frozen=True, slots=True)
class Chunk:
    """`buffer[raw:stop]` is the next stretch of text, with `SLACK` bytes around it; from `start` on it is whole events.
    `offset` is where the buffer lies in the whole text; `final` says that no text follows. The texts of all chunks together are the whole text after
    the head: what follows the list of events begins in the chunk in which the list ends."""

    buffer: bytes
    raw: int
    start: int
    stop: int
    offset: int
    final: bool


class Cutter:
    """See the module's docstring. `events` is whether the text holds a list of events at all."""

    def __init__(self, blocks: Iterator[bytes], limits: Limits) -> None:
        self._blocks = blocks
        self._limits = limits
        self._carry = b""
        self._offset = 0
        self._cut: bytes | None = None

    def read_head(self) -> bytes | None:
        """The text before the list of events, or None where there is no such list."""
        text = b""
        for block in self._blocks:
            text += block
            found = _EVENTS.search(text, max(0, len(text) - len(block) - 64))
            if found is None and _LIST.match(text):
                found = _LIST.match(text) if _PHASE.search(text) else None
                if found is None and len(text) > _LARGEST:
                    return None
            if found:
                self._carry, self._offset = text[found.end() :], found.end()
                return text[: found.end()]
            if len(text) > self._limits.header_bytes:
                return None
        return None

    def __iter__(self) -> Iterator[Chunk]:
        """The stretches, in order. The separator before a stretch's first event belongs to it (`raw` to `start`)."""
        for block in self._blocks:
            text = b"".join((_PAD, self._carry, block, _PAD))
            end = len(text) - SLACK
            stop = self._last_cut(text, end)
            if stop < 0 and end > _LARGEST:
                stop = end
            if stop < 0:
                self._carry = text[SLACK:end]
                continue
            yield self._chunk(text, stop, final=False)
            self._carry = text[stop:end]
            self._offset += stop - SLACK
        text = b"".join((_PAD, self._carry, _PAD))
        end = len(text) - SLACK
        stop = self._last_cut(text, end)
        if stop > 0:
            yield self._chunk(text, stop, final=False)
            self._offset += stop - SLACK
            text = b"".join((_PAD, text[stop:]))
            end = len(text) - SLACK
        self._carry = b""
        yield self._chunk(text, end, final=True)

    def _chunk(self, text: bytes, stop: int, *, final: bool) -> Chunk:
        start = SLACK
        while start < stop and text[start] in b" \t\r\n,":
            start += 1
        return Chunk(text, SLACK, start, stop, self._offset - SLACK, final)

    def _last_cut(self, text: bytes, end: int) -> int:
        """The position after the `}` of the last event that another one follows, or -1."""
        if self._cut is None:
            found = _CUT.search(text, SLACK, end)
            if found is None:
                return -1
            self._cut = found.group()
        at = text.rfind(self._cut, SLACK, end)
        if at < 0:  # another layout from here on
            others = list(_CUT.finditer(text, SLACK, end))
            if not others:
                return -1
            self._cut, at = others[-1].group(), others[-1].start()
        return at + 1

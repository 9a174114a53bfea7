"""Read one torch.profiler (Kineto) trace: facts beside the events, and the events as columns.

    read_kineto(path) -> RawTrace

The text is streamed: memory is bounded by the columns, not by the JSON. Every chunk goes through the fast path, and
through the tolerant one where that refuses it; the size of the chunks never changes the result.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from traceana.errors import SourceError
from traceana.sources.kineto_chunks import Chunk, Cutter
from traceana.sources.kineto_events import Events, Lost, join_events
from traceana.sources.kineto_fast import NotPlain, parse_one, parse_plain
from traceana.sources.kineto_keys import parse_keys
from traceana.sources.kineto_text import BLOCK, text_blocks
from traceana.sources.kineto_tolerant import EventReader, parse_tolerant
from traceana.sources.limits import Limits

__all__ = ["MergedTrace", "RawTrace", "is_kineto", "read_kineto"]

_SNIFF = 4 << 20
_MERGED_PID = re.compile(rb'"pid"\s*:\s*"\[([A-Z]+\d+(?:-[A-Z]+\d+)*)\] ')
_TRACE_NAME = re.compile(r"\.trace\.json(?:\.gz)?$|rank[-_]?\d+[^/]*\.json(?:\.gz)?$", re.IGNORECASE)
_AHEAD = 4  # chunks in flight where a pool parses them
_KNOWN = (
    "schemaVersion",
    "distributedInfo",
    "baseTimeNanoseconds",
    "cuda_runtime_version",
    "cuda_driver_version",
    "cupti_version",
    "hip_runtime_version",
    "trace_id",
    "with_stack",
    "record_shapes",
    "displayTimeUnit",
    "traceName",
)


class MergedTrace(SourceError):
    """A file in which several ranks were merged by SGLang; `labels` names them as the file does."""

    def __init__(self, path: Path, labels: tuple[str, ...]) -> None:
        super().__init__(
            f"the trace is a merge of {', '.join(labels)}",
            where=str(path),
            hint="use the file of each rank: a merge loses base times and mixes correlation ids",
        )
        self.path = path
        self.labels = labels

    def __reduce__(self) -> tuple[type[MergedTrace], tuple[Path, tuple[str, ...]]]:
        return type(self), (self.path, self.labels)


@dataclass(frozen=True, slots=True)
class RawTrace:
    """One trace as read. `header` is everything beside the events; times in `events` count from its base."""

    path: Path
    header: Mapping[str, Any]
    events: Events
    lost: tuple[Lost, ...]


def is_kineto(path: Path, limits: Limits | None = None) -> bool:
    """Whether `path` holds a list of events, by content: `traceEvents`, or a list whose objects have a `ph`. True also
    for a file that is named like a trace and damaged before its events: reading it says what is wrong."""
    sniffed = replace(limits or Limits(), header_bytes=_SNIFF)
    lost: list[Lost] = []
    named = _TRACE_NAME.search(path.name) is not None
    try:
        if Cutter(text_blocks(path, lost, sniffed, 1 << 16), sniffed).read_head() is not None:
            return True
        return named and (bool(lost) or not _is_json(path, sniffed))
    except SourceError:
        return named


def _is_json(path: Path, limits: Limits) -> bool:
    text = b""
    for block in text_blocks(path, [], limits):
        text += block
        if len(text) > limits.header_bytes:
            return True  # too large to say; not one of ours in any case
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def read_kineto(
    path: Path,
    *,
    limits: Limits | None = None,
    block: int = BLOCK,
    pool: Executor | None = None,
    tolerant: bool = False,
) -> RawTrace:
    """The trace in `path`, gz or plain, in blocks of `block` bytes of text, parsed in `pool` where one is given.
    `tolerant` sends every chunk through the tolerant path, which gives the same for valid text.

    Raises SourceError where the file is no trace or nothing of it is sound, MergedTrace where it is a merge.
    """
    limits = limits or Limits()
    lost: list[Lost] = []
    blocks = text_blocks(path, lost, limits, block)
    cutter = Cutter(blocks, limits)
    head = cutter.read_head()
    if head is None:
        raise _no_trace(path, lost)
    parts: list[Events] = []
    left, left_at, foot = b"", 0, None
    flight = _in_flight(iter(cutter), pool, tolerant)
    first = True
    for chunk, parsed in flight:
        if first and _MERGED_PID.search(chunk.buffer, chunk.raw, chunk.stop):
            raise _merged(path, chunk, (later for later, _ in flight))
        first = False
        if not left and (events := parsed()) is not None:
            parts.append(events)
            continue
        text = left + chunk.buffer[chunk.raw :]
        stop = len(left) + chunk.stop - chunk.raw
        offset = left_at if left else chunk.offset + chunk.raw
        reader = EventReader()
        used, ended = parse_tolerant(text, 0, stop, reader, offset, final=chunk.final, plain=parse_one)
        parts.append(reader.events())
        if ended:
            foot = _foot(text[used + 1 : stop], (later for later, _ in flight), limits)
            break
        left, left_at = text[used:stop], offset + used
    events = join_events(parts)
    header = _header(head, foot, lost)
    if foot is None and not any(
        item.name in ("trace_truncated", "gz_truncated", "gz_damaged") for item in events.lost + lost
    ):
        lost.append(Lost("trace_truncated", "warning", 1, note="the list of events has no end"))
    if not events.size and (events.lost or lost) and not events.unused and not events.metadata:
        raise SourceError(
            "nothing in the trace is sound", where=str(path), hint="record it again; check for a full disk"
        )
    return RawTrace(path, header, events, (*lost, *events.lost))


Parse = Callable[[], Events | None]


def _in_flight(chunks: Iterator[Chunk], pool: Executor | None, tolerant: bool) -> Iterator[tuple[Chunk, Parse]]:
    """Every chunk with what gives its events by the fast path (None where that refuses it); a few ahead where a pool
    works."""
    if pool is None or tolerant:
        for chunk in chunks:
            yield chunk, ((lambda: None) if tolerant else partial(_fast, chunk))
        return
    waiting: deque[tuple[Chunk, Future[Events | None]]] = deque()
    for chunk in chunks:
        waiting.append((chunk, pool.submit(_fast, chunk)))
        if len(waiting) >= _AHEAD:
            done, future = waiting.popleft()
            yield done, future.result
    for done, future in waiting:
        yield done, future.result


def _fast(chunk: Chunk) -> Events | None:
    """Nothing is raised: a future keeps what was raised in it, that keeps the frames it went through, and those keep
    the future, with all the events of the trace, until the collector of cycles comes."""
    if chunk.final or chunk.start >= chunk.stop:
        return None  # the end of the list is read by the tolerant path
    if not chunk.buffer.isascii():
        try:
            str(memoryview(chunk.buffer)[chunk.start : chunk.stop], "utf-8")
        except UnicodeDecodeError:
            return None
    for parse in (parse_keys, parse_plain):
        with suppress(NotPlain):
            return parse(chunk.buffer, chunk.start, chunk.stop, chunk.offset)
    return None


def _foot(text: bytes, later: Iterator[Chunk], limits: Limits) -> bytes:
    """What stands after the list of events: `text` and all later chunks."""
    parts, size = [text], len(text)
    for chunk in later:
        parts.append(chunk.buffer[chunk.raw : chunk.stop])
        size += len(parts[-1])
        if size > limits.header_bytes:
            break
    return b"".join(parts)


def _header(head: bytes, foot: bytes | None, lost: list[Lost]) -> dict[str, Any]:
    """The facts beside the events; those that can be found where the text is not valid JSON."""
    if head.lstrip().startswith(b"["):
        return {}
    text = (head + b"]" + (foot if foot is not None else b"}")).decode(errors="replace")
    if text.count('"traceEvents"') > 1:
        lost.append(Lost("several_traces_in_one_file", "error", 1, note="only the first list of events was read"))
    decoder = json.JSONDecoder(strict=False, parse_constant=lambda _: None)
    try:
        found, _ = decoder.raw_decode(text.lstrip())
        return found if isinstance(found, dict) else {}
    except (ValueError, RecursionError):
        pass
    if foot is not None:
        lost.append(Lost("header_broken", "warning", 1, note="facts beside the events are not valid JSON"))
    header: dict[str, Any] = {}
    for key in _KNOWN:
        at = re.search(rf'"{key}"\s*:\s*', text)
        if at:
            try:
                header[key] = decoder.raw_decode(text, at.end())[0]
            except (ValueError, RecursionError):
                continue
    return header


def _merged(path: Path, chunk: Chunk, later: Iterator[Chunk]) -> MergedTrace:
    labels = set(_MERGED_PID.findall(chunk.buffer))
    for other in later:
        labels |= set(_MERGED_PID.findall(other.buffer, other.raw, other.stop))
    return MergedTrace(path, tuple(sorted(label.decode() for label in labels)))


def _no_trace(path: Path, lost: list[Lost]) -> SourceError:
    if path.stat().st_size == 0:
        return SourceError("the trace is empty", where=str(path), hint="the profiler did not write it; record it again")
    if lost:
        return SourceError(
            f"the trace is damaged before its first event ({lost[0].note})", where=str(path), hint="record it again"
        )
    return SourceError("not a Kineto trace", where=str(path), hint="a trace holds a list called traceEvents")

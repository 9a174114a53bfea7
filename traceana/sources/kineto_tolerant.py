"""The tolerant path: events read one at a time, salvaging what is sound and saying what is not.

`EventReader` turns decoded objects into the same frames as the fast path; `parse_tolerant` walks a stretch of text that
the fast path refused: it decodes whole objects wherever they start and end, repairs the ordinary kinds of damage
(bad escapes, trailing commas, C's `nan` and `inf`, quotes inside a name), and drops the rest with its byte range.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

import numpy as np
import polars as pl

from traceana.sources.kineto_events import (
    COLUMNS,
    COMMUNICATION,
    INTS,
    KIND_OF,
    MAX_DURATION,
    MAX_TIME,
    NULL,
    Events,
    Lost,
    talk_frame,
)

__all__ = ["MAX_EVENT", "PLAIN_DECODER", "EventReader", "parse_tolerant"]

MAX_EVENT = 16 << 20
"""Bytes that one event may take; above that it is dropped (no event of a profiler is a thousandth of it)."""

Object = dict[str, Any]
_CUT = re.compile(r"\}(?=\s*,\s*\{\s*\")")
_END = re.compile(r"\}(?=\s*\]\s*(?:,\s*\"|\}|$))")
_SPACE = re.compile(r"[\x00-\x20]*")
_LIST_END = re.compile(r"\]\s*(?:,\s*\"|\}|\Z)")  # what else follows a bracket shows that it ends no list
_UNDECIDED = re.compile(r"\]\s*,?\s*\Z")
_OBJECT = re.compile(r'\{\s*"')
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_EXTRA_COMMA = re.compile(r",(?=\s*[,}\]])")
_C_FLOAT = re.compile(r'("\s*:\s*)[-+]?(?:nan(?:\([^)]*\))?|inf(?:inity)?|1\.#(?:INF|QNAN|IND))\b', re.IGNORECASE)
_NAME = re.compile(r'("name"\s*:\s*")(.*?)("\s*,\s*"(?:ph|cat|pid|tid|ts|dur|args|id|s)"\s*:)', re.DOTALL)
_BARE_QUOTE = re.compile(r'(?<!\\)"')
_STREAM = re.compile(r"\s*stream\s+(\d+)\s*")


class _Duplicates:
    """Counts objects that hold a key twice, while they are decoded (the last value wins, as everywhere in JSON)."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, pairs: list[tuple[str, Any]]) -> Object:
        found = dict(pairs)
        self.count += len(found) != len(pairs)
        return found


class EventReader:
    """Collects events given as text or as decoded objects, in file order, and gives them back as `Events`.

    Every row keeps `at`, the byte of the whole text it starts at, so that rows of both paths can be put in file order.
    """

    def __init__(self) -> None:
        self.at: list[int] = []
        self.metadata: list[Object] = []
        self.unused: Counter[str] = Counter()
        self.lost: list[Lost] = []
        self._columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        self._names: list[str] = []
        self._talks: list[tuple[int, Mapping[str, object]]] = []
        self._duplicates = _Duplicates()
        self.decoder = json.JSONDecoder(object_pairs_hook=self._duplicates, **_VALUES)

    def take(self, events: Events, start: int) -> None:
        """Takes what the fast path read from one event that starts at byte `start`."""
        for name, values in events.columns.items():
            self._columns[name] += values.tolist()
        self._names += events.names.to_list()
        self.at += [start] * events.size
        self.unused += events.unused

    def lose(self, name: str, start: int, stop: int, *, severity: str = "warning", note: str = "") -> None:
        """Notes that the bytes `start` to `stop` gave no event, or a changed one."""
        self.lost.append(Lost(name, severity, 1, start, stop, note))

    def text(self, piece: bytes, start: int) -> bool:
        """Reads one event from `piece`, which starts at byte `start` of the whole text; repairs it if need be. False
        where it is beyond repair (nothing is noted then)."""
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            text = piece.decode(errors="replace")
            self.lose("bad_utf8", start, start + len(piece), note="bytes that are not UTF-8 were replaced in a name")
        found = self._decode(text)
        if found is None:
            found = self._repair(text)
            if found is None:
                return False
            self.lose("event_repaired", start, start + len(piece), note=_context(text))
        self.event(found, start, start + len(piece))
        return True

    def event(self, event: object, start: int, stop: int) -> None:
        """Takes one decoded event."""
        if not isinstance(event, dict):
            self.lose("not_an_event", start, stop)
            return
        if self._duplicates.count:
            self._duplicates.count = 0
            self.lose("event_duplicate_key", start, stop, note="the last value was taken")
        phase, category = event.get("ph"), event.get("cat")
        if phase == "M":
            self.metadata.append(event)
        elif not isinstance(phase, str) or len(phase) != 1:
            self.lose("not_an_event", start, stop)
        elif phase != "X":
            self.unused[f"phase {phase}"] += 1
        elif not isinstance(category, str):
            self.lose("event_without_category", start, stop)
        elif category not in KIND_OF:
            self.unused[f"category {category}"] += 1
        else:
            self._keep(event, KIND_OF[category], start, stop)

    def _keep(self, event: Object, kind: int, start: int, stop: int) -> None:
        times: list[int] = []
        for key, limit in (("ts", MAX_TIME), ("dur", MAX_DURATION)):
            value = _nanoseconds(event.get(key))
            if value is None:
                self.lose("event_without_time", start, stop, note=f"{key} is {event.get(key)!r:.40}")
                return
            if abs(value) >= limit * 1000:
                self.lose("event_absurd_time", start, stop, note=f"{key} is {event.get(key)!s:.40}")
                return
            if value != value.to_integral_value():
                self.lose("sub_nanosecond_rounded", start, stop, severity="info")
            times.append(int(value.to_integral_value()))
        pid, tid = _integer(event.get("pid")), _integer(event.get("tid"))
        if tid is None and isinstance(event.get("tid"), str) and (stream := _STREAM.fullmatch(event["tid"])):
            tid = int(stream.group(1))  # the first Kineto traces
        if pid is None or tid is None:
            self.lose("event_without_thread", start, stop, note=f"pid {event.get('pid')!r:.40}")
            return
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        name = event.get("name")
        columns = self._columns
        if args.get("Collective name") is not None:
            self._talks.append((len(self.at), {key: args.get(key) for key in COMMUNICATION}))
        self.at.append(start)
        columns["kind"].append(kind)
        self._names.append(name.encode(errors="replace").decode() if isinstance(name, str) else "")
        columns["pid"].append(pid)
        columns["tid"].append(tid)
        columns["ts"].append(times[0])
        columns["dur"].append(times[1])
        for key, column in INTS.items():
            value_ = _integer(args.get(key))
            columns[column].append(NULL if value_ is None else value_)
        columns["finished"].append(args.get("finished") not in (False, "false"))

    def events(self) -> Events:
        """Everything taken so far."""
        columns = {name: np.array(self._columns[name], dtype=dtype) for name, dtype in COLUMNS.items()}
        names = pl.Series("name", self._names, dtype=pl.String()).cast(pl.Categorical())
        return Events(columns, names, talk_frame(self._talks), self.metadata, self.unused, self.lost)

    def decode_at(self, text: str, here: int) -> tuple[object, int]:
        """The value that starts at `here` and where it ends. Raises ValueError or RecursionError."""
        self._duplicates.count = 0
        return self.decoder.raw_decode(text, here)

    def _decode(self, text: str) -> object | None:
        self._duplicates.count = 0
        try:
            found: object = self.decoder.decode(text)
            return found
        except (ValueError, RecursionError):
            return None

    def _repair(self, text: str) -> object | None:
        """The event in `text` after the ordinary kinds of damage were undone one after the other, or None."""
        for pattern, put in ((_BAD_ESCAPE, r"\\\\"), (_EXTRA_COMMA, ""), (_C_FLOAT, r"\1null")):
            text = pattern.sub(put, text)
            if (found := self._decode(text)) is not None:
                return found
        text = _NAME.sub(lambda m: m[1] + _BARE_QUOTE.sub(r"\\\g<0>", m[2]) + m[3], text, count=1)
        return self._decode(text)


def parse_tolerant(
    buffer: bytes,
    start: int,
    stop: int,
    reader: EventReader,
    offset: int = 0,
    *,
    final: bool = True,
    closed: bool = False,
    plain: Callable[[bytes], Events | None] = lambda _: None,
) -> tuple[int, bool]:
    """Reads the events of `buffer[start:stop]` into `reader`; `offset` is where the buffer lies in the whole text.
    `plain` is asked first for an event that is not valid JSON. `closed` says that the stretch ends with an event.

    Returns the position up to which the text is used up, and whether the list of events ended there. Where more text
    follows (`final` false) an event cut short by `stop` is left for the next call.
    """
    # Latin-1 keeps bytes and characters at the same positions; JSON's own characters are ASCII in both.
    text = buffer[start:stop].decode("latin-1")
    size, here = len(text), 0
    while True:
        here = _skip(text, here)
        if here >= size:
            return start + here, False
        char = text[here]
        if char == ",":
            here += 1
            continue
        if char == "]":
            if not final and _UNDECIDED.match(text, here):
                return start + here, False
            if _LIST_END.match(text, here):
                return start + here, True
            reader.lose("not_an_event", offset + start + here, offset + start + here + 1, note="a stray bracket")
            here += 1
            continue
        try:
            event, end = reader.decode_at(text, here)
        except (ValueError, RecursionError):
            if char != "{" and (found := _OBJECT.search(text, here)):
                reader.lose("not_an_event", offset + start + here, offset + start + found.start())
                here = found.start()
                continue
            end = _resync(text, here, closed)
            if end < 0:
                if not final and size - here <= MAX_EVENT:
                    return start + here, False
                reader.lose(
                    "trace_truncated", offset + start + here, offset + stop, note="the text ends inside an event"
                )
                return stop, False
            piece, at = buffer[start + here : start + end], offset + start + here
            if char == "{" and (taken := plain(piece)) is not None:
                reader.take(taken, at)
            elif char != "{" or not reader.text(piece, at):
                reader.lose("event_broken", offset + start + here, offset + start + end, note=_context(text[here:end]))
        else:
            first, last = offset + start + here, offset + start + end
            if text[here:end].isascii():
                reader.event(event, first, last)
            else:
                reader.text(buffer[start + here : start + end], first)
        here = end


def _skip(text: str, here: int) -> int:
    found = _SPACE.match(text, here)
    return found.end() if found else here


def _resync(text: str, here: int, closed: bool) -> int:
    """The end of the damaged event that starts at `here`: before the next one, or before the end of the list."""
    cut = _CUT.search(text, here)
    stop = cut.end() if cut else len(text)
    end = _END.search(text, here, stop)
    if end:
        return end.end()
    if cut:
        return cut.end()
    return len(text) if closed else -1


def _context(text: str) -> str:
    """The beginning of `text` on one line, without characters that a terminal would act on."""
    return "".join(c if c.isprintable() else " " for c in text[:60])


def _nanoseconds(value: object) -> Decimal | None:
    number = _number(value)
    if number is None or number.adjusted() > 25:
        return None if number is None else Decimal(10) ** 25
    with localcontext() as context:
        context.prec = 60
        return number * 1000


def _decimal(text: str) -> Decimal | None:
    """An exact number; None where not even its exponent is a number that a computer holds."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


_VALUES: Mapping[str, Any] = {"parse_float": _decimal, "parse_constant": lambda _: None, "strict": False}


def _once(pairs: list[tuple[str, Any]]) -> Object:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


PLAIN_DECODER = json.JSONDecoder(object_pairs_hook=_once, **_VALUES)
"""Gives the values that `EventReader` takes, of objects in which no key stands twice; raises ValueError for others."""


def _number(value: object) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, (int, str, Decimal)):
        return None
    try:
        number = Decimal(value.strip() if isinstance(value, str) else value)
    except (InvalidOperation, ValueError):
        return None
    return number if number.is_finite() else None


def _integer(value: object) -> int | None:
    """`value` as a 64-bit integer, also where it is written as text or as a whole fraction; else None."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) < 1 << 63 else None
    number = _number(value)
    if number is None or number.adjusted() > 18 or number != number.to_integral_value():
        return None
    return int(number) if abs(number) < 1 << 63 else None

"""The fastest path: a stretch of events in Kineto's own layout, read by the places of its keys.

    {"ph": "X", "cat": ..., "name": ..., "pid": ..., "tid": ..., "ts": ..., "dur": ..., "args": {...}}

Only what a table needs is looked at, but each event is proven to be of the layout first: its first keys are these, in
this order; it closes as many objects as it opens; and nothing but one comma stands between it and the next. White space
may be of any kind, as long as it is the same for all events. An event that cannot be proven is read by the tolerant
path, with all that stands before the next one; a stretch with many of them is refused.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from traceana.sources.kineto_events import MAX_DURATION, MAX_TIME, NULL, Events, talk_frame
from traceana.sources.kineto_fast import FALSE, METADATA, SPAN, TRUE, kinds_at, with_odd
from traceana.sources.kineto_index import Literal, NotPlain
from traceana.sources.kineto_shapes import HEAD, INT_COLUMNS, shapes
from traceana.sources.kineto_tolerant import PLAIN_DECODER
from traceana.sources.kineto_words import (
    SLACK,
    Bools,
    Bytes,
    Positions,
    Words,
    as_categorical,
    categorical,
    decimals,
    different,
    integers,
    word_view,
)

__all__ = ["parse_keys"]

_QUOTE, _OPEN, _COLON, _SPACE, _BACKSLASH, _H = b'"{: \\h'
_CAT, _NAME, _PID, _TID, _TS, _DUR, _ARGS = range(1, 8)  # the place of each key in an event; ph is 0
_BETWEEN = re.compile(rb"\}(\s*)(\}\s*,\s*\{\s*)\Z")
_LONGEST = 256  # what may stand between two events
_START = re.compile(rb'\{\s*"')
_STRING_END = re.compile(rb'",\s*\Z')
_WHITE = " \t\r\n"
_ODD = 0.05  # the share of events of a stretch that may be out of the ordinary


class _Key:
    """A key of at most eight bytes, quotes and all, to compare with the eight bytes that its closing quote ends."""

    def __init__(self, name: str) -> None:
        data = f'"{name}"'.encode()
        free = 8 * (8 - len(data))
        self.word = np.uint64(int.from_bytes(data, "little") << free)
        self.mask = np.uint64((1 << 64) - (1 << free))

    def stands(self, words: Words, quotes: Positions) -> Bools:
        """Whether the key is closed by each of `quotes`."""
        found: Bools = (words[quotes - 7] & self.mask) == self.word
        return found


_KEYS = [_Key(name) for name in HEAD]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Where the keys of a stretch are: the closing quote of each (`key`); a value starts `value` bytes behind it. For
    each event: its first key (`first`, and the number of keys as a last entry), its brace (`start`), the byte after it
    (`stop`), the braces that open in it (`opened`), and whether its last two objects close together (`inner`). That
    every event is followed by just one comma is proven."""

    text: Bytes
    words: Words
    key: Positions
    value: int
    first: Positions
    start: Positions
    stop: Positions
    opened: Positions
    inner: Bools

    def values(self, keys: Positions) -> Positions:
        """Where the values of `keys` start."""
        return self.key[keys] + self.value


def parse_keys(buffer: bytes, start: int, stop: int, offset: int = 0) -> Events:
    """The events in `buffer[start:stop]`, which begins at an event's `{`, ends at an event's `}` and is valid UTF-8.

    The buffer must reach `SLACK` bytes further on both sides, and what follows must begin with another event. `offset`
    is where it lies in the whole text. Raises NotPlain where too little of it is in the layout.
    """
    s = _stretch(buffer, start, stop)
    phase = _phases(s)
    odd = (phase == 0) | (phase == METADATA)
    spans = np.flatnonzero(phase == SPAN)
    first = s.first[spans]
    said = _said(s, spans, slice(_CAT, _NAME))
    kind = np.full(spans.size, -1, dtype=np.int64)
    kind[said] = kinds_at(s.words, s.values(first[said] + _CAT))
    used = kind >= 0
    others = spans[~used]
    odd[others[~_said(s, others, slice(_CAT, None))]] = True
    plain = s.opened == np.where(s.inner, 2, 1)
    plain[spans[used]] = True  # braces in their names are looked at below
    odd |= ~plain
    if buffer.find(b"\\", start, stop) >= 0:
        escapes = np.flatnonzero(s.text[start:stop] == _BACKSLASH) + start
        odd |= np.diff(np.searchsorted(escapes, np.append(s.start, stop))) > 0
    _check_odd(odd)
    unused = _unused(s, buffer, phase, others, odd)
    rows, kind = spans[used], kind[used]
    rows, columns, messages = _read_integers(s, buffer, rows, {"kind": kind.astype(np.uint8)}, odd)
    first = s.first[rows]

    name_from, name_to = s.values(first + _NAME) + 1, _string_ends(s, buffer, first + _PID, "pid")
    good = (name_to >= name_from) & (s.text[name_from - 1] == _QUOTE)
    names, good_names, braces = _names(s, buffer, name_from, np.maximum(name_to, name_from))
    good &= good_names
    good &= s.opened[rows] == braces + 1 + s.inner[rows]
    _read_times(s, first, columns, good)
    good &= ~odd[rows]
    talks = _read_messages(s, buffer, rows, messages, good)
    if not good.all():
        odd[rows[~good]] = True
        _check_odd(odd)
        rows, names = rows[good], names.filter(good)
        columns = {name: values[good] for name, values in columns.items()}
        place = np.cumsum(good) - 1
        talks = [(int(place[row]), args) for row, args in talks]
    events = Events(columns, names, talk_frame(talks), unused=unused)
    left = np.flatnonzero(odd)
    return (
        with_odd(events, s.start[rows] + offset, buffer, s.start[left], s.stop[left], offset) if left.size else events
    )


def _check_odd(odd: Bools) -> None:
    if np.count_nonzero(odd) > _ODD * odd.size + 1:
        raise NotPlain("many events are out of the ordinary")


def _stretch(buffer: bytes, start: int, stop: int) -> _Stretch:
    if start < SLACK or len(buffer) < stop + SLACK:
        raise ValueError("the buffer must reach beyond the stretch")
    text: Bytes = np.frombuffer(buffer, dtype=np.uint8)
    words = word_view(buffer)
    here = text[start:stop]
    ends = here[:-1] == _QUOTE
    ends &= here[1:] == _COLON
    key = np.flatnonzero(ends)
    key += start
    first = np.flatnonzero(text[key - 1] == _H)  # few keys end so
    first = first[_KEYS[0].stands(words, key[first])]
    if first.size < 2 or first[0] != 0 or not _START.fullmatch(buffer, start, int(key[0]) - 2):
        raise NotPlain("events do not begin with ph")
    quote = key[first] - 3
    closing = _between(buffer, quote[1:9].tolist())
    outer, inner = Literal.of(closing[1]), Literal.of(closing[0] + closing[1])
    # Beyond the stretch another event follows: its first key would stand here.
    quote = np.append(quote, stop - 1 + len(closing[1]))
    sealed = outer.at(words, quote - len(closing[1]))
    sealed[0] = True
    if not sealed[-1]:
        raise NotPlain("the last event is not followed by another")
    if not sealed.all():  # not the start of an event, or something odd before it: it belongs to the event before
        first, quote = first[sealed[:-1]], quote[sealed]
    opens = np.flatnonzero(here == _OPEN)
    opens += start
    begin = quote - (len(closing[1]) - closing[1].index("{"))
    begin[0] = start  # white space of its own may stand in the first event
    return _Stretch(
        text=text,
        words=words,
        key=key,
        value=2 + (int(text[key[0] + 2]) == _SPACE),
        first=np.append(first, key.size),
        start=begin[:-1],
        stop=quote[1:] - len(closing[1]) + 1,
        opened=np.diff(np.searchsorted(opens, begin)),
        inner=inner.at(words, quote[1:] - len(closing[0]) - len(closing[1])),
    )


def _between(buffer: bytes, quotes: list[int]) -> tuple[str, str]:
    """What stands between the end of one event's inner object and the next event's first key: the inner object's brace
    with white space, and all from the event's own brace on. Learned from the first events."""
    for quote in quotes:
        if found := _BETWEEN.search(buffer, max(quote - _LONGEST, 0), quote):
            inner, outer = found.groups()
            return "}" + inner.decode(), outer.decode()
    raise NotPlain("no event with an inner object among the first")


def _phases(s: _Stretch) -> Bytes:
    """The one-letter phase of every event, 0 where it is none."""
    at = s.values(s.first[:-1])
    letter = s.text[at + 1]
    letter[(s.text[at] != _QUOTE) | (s.text[at + 2] != _QUOTE)] = 0
    return letter


def _unused(s: _Stretch, buffer: bytes, phase: Bytes, spans: Positions, odd: Bools) -> Counter[str]:
    """Counts of what no table holds: `spans` by category, everything else by phase."""
    unused: Counter[str] = Counter()
    sound = np.bincount(phase[~odd], minlength=256)
    for code in np.flatnonzero(sound).tolist():
        if code != SPAN:
            unused[f"phase {chr(code)}"] += int(sound[code])
    spans = spans[~odd[spans]]
    if spans.size:
        first = s.first[spans]
        start, stop = s.values(first + _CAT) + 1, _string_ends(s, buffer, first + _NAME, "name")
        good = (s.text[start - 1] == _QUOTE) & (stop >= start)
        odd[spans[~good]] = True
        names = categorical(buffer, s.words, start[good], stop[good])
        for name, count in names.value_counts().iter_rows():
            unused[f"category {name}"] += count
    return unused


def _string_ends(s: _Stretch, buffer: bytes, after: Positions, name: str) -> Positions:
    """Where the string values before the keys `after`, all called `name`, end; -1 where there is none."""
    quote = s.key[after] - len(name) - 1
    if not quote.size:
        return quote
    found = _STRING_END.search(buffer, max(int(quote[0]) - _LONGEST, 0), int(quote[0]))
    if found is None:
        raise NotPlain(f"what stands before {name} is no string")
    end = Literal.of(found.group().decode())
    at = quote - len(found.group())
    return np.where(end.at(s.words, at), at, -1)


def _names(s: _Stretch, buffer: bytes, start: Positions, stop: Positions) -> tuple[pl.Series, Bools, Positions]:
    """The names, whether each is free of quotes and backslashes, and how many braces open in it."""
    texts, place = different(buffer, s.words, start, stop)
    good = np.array([not ('"' in text or "\\" in text) for text in texts], dtype=np.bool_)
    braces = np.array([text.count("{") for text in texts], dtype=np.int64)
    return as_categorical(texts, place), good[place], braces[place]


def _read_times(s: _Stretch, first: Positions, columns: dict[str, npt.NDArray[Any]], good: Bools) -> None:
    n = first.size
    at = s.values(np.concatenate((first + _TS, first + _DUR)))
    value, ok = decimals(s.text, s.words, at, MAX_TIME)
    good &= ok[:n] & ok[n:]
    columns["ts"], columns["dur"] = value[:n], value[n:]
    good &= np.abs(columns["dur"]) < MAX_DURATION * 1000


def _read_integers(
    s: _Stretch, buffer: bytes, rows: Positions, columns: dict[str, npt.NDArray[Any]], odd: Bools
) -> tuple[Positions, dict[str, npt.NDArray[Any]], Bools]:
    """Those of `rows` that are laid out as they should be, and their `columns`, to which are added process, thread, the
    arguments that are integers (NULL where an event lacks one), and whether it was finished; and which of them may
    carry a message. The others are odd."""
    n, first = rows.size, s.first[rows]
    good, finished = np.zeros(n, dtype=np.bool_), np.ones(n, dtype=np.bool_)
    messages = np.zeros(n, dtype=np.bool_)
    grid = np.full(len(INT_COLUMNS) * n, NULL, dtype=np.int64)
    keys, cells = [first[:0]], [first[:0]]
    for shape, members in shapes(buffer, s.words, s.key, first, s.first[rows + 1] - first):
        if not shape.plain:
            continue
        good[members] = s.inner[rows[members]] == shape.args
        messages[members] = shape.message
        begin = first[members]
        if shape.args:
            good[members] &= s.text[s.values(begin + _ARGS)] == _OPEN
        if shape.finished >= 0:
            at = s.values(begin + shape.finished)
            no, yes = FALSE.at(s.words, at), TRUE.at(s.words, at)
            finished[members[no]] = False
            good[members] &= no | yes
        keys += [begin + place for _, place in shape.wanted]
        cells += [members + column * n for column, _ in shape.wanted]
    value, ok = integers(s.text, s.words, s.values(np.concatenate(keys)))
    cell = np.concatenate(cells)
    grid[cell] = value
    if not ok.all():
        good[cell[~ok] % n] = False
    columns = {
        **columns,
        **dict(zip(INT_COLUMNS, grid.reshape(len(INT_COLUMNS), n), strict=True)),
        "finished": finished,
    }
    if not good.all():
        odd[rows[~good]] = True
        _check_odd(odd)
        rows, columns = rows[good], {name: values[good] for name, values in columns.items()}
        messages = messages[good]
    return rows, columns, messages


def _read_messages(
    s: _Stretch, buffer: bytes, rows: Positions, messages: Bools, good: Bools
) -> list[tuple[int, dict[str, Any]]]:
    """The place in `rows` and the arguments of those of `messages` that do carry one. Clears `good` where arguments are
    not one sound object up to the event's end."""
    found: list[tuple[int, dict[str, Any]]] = []
    places = np.flatnonzero(messages & good)
    starts = s.values(s.first[rows[places]] + _ARGS).tolist()
    for place, start, stop in zip(places.tolist(), starts, s.stop[rows[places]].tolist(), strict=True):
        text = buffer[start:stop].decode()
        try:
            args, end = PLAIN_DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            good[place] = False
            continue
        if text[end:].strip(_WHITE) != "}":
            good[place] = False
        elif args.get("Collective name") is not None:
            found.append((place, args))
    return found


def _said(s: _Stretch, spans: Positions, which: slice) -> Bools:
    """Which of the events `spans` have those keys of the head at their places."""
    first = s.first[spans]
    said: Bools = s.first[spans + 1] - first > _DUR
    for place in range(len(HEAD))[which]:
        said &= _KEYS[place].stands(s.words, s.key[np.minimum(first + place, s.key.size - 1)])
    return said

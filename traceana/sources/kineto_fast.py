"""The fast path: a stretch of whole events as JSON text into columns, by a structural index in numpy.

The index holds every quote and every brace outside strings (as in simdjson). Events are the objects at depth one,
keys the strings before a colon. What an event holds is read where its keys say; an event that is not entirely plain (an
escape in its name, a number out of the ordinary, a nested object, a key twice, a name with a stray quote) is left to
the tolerant path, one event at a time. A stretch whose quotes or braces do not add up is refused as a whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traceana.sources.kineto_events import (
    INTS,
    KIND_OF,
    MAX_DURATION,
    MAX_TIME,
    NULL,
    Events,
    join_events,
)
from traceana.sources.kineto_tolerant import EventReader, parse_tolerant
from traceana.sources.kineto_words import (
    SLACK,
    Bools,
    Bytes,
    Positions,
    Words,
    categorical,
    decimals,
    integers,
    word_view,
)

__all__ = ["NotPlain", "parse_one", "parse_plain"]

_QUOTE, _OPEN, _CLOSE, _COLON, _COMMA, _BACKSLASH, _SPACE = b'"{}:,\\ '
_AFTER_STRING = np.zeros(256, dtype=np.bool_)
_AFTER_STRING[[_COLON, _COMMA, _CLOSE, ord("]"), *range(_SPACE + 1)]] = True
_GAPS = 8  # different spacings between events, at most, before a stretch is called odd


class NotPlain(Exception):
    """The stretch is not a plain sequence of events; the tolerant path must read all of it."""


def _mask(length: int) -> np.uint64:
    return np.uint64((1 << (8 * min(length, 8))) - 1)


def _word(text: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(text[:8], "little"))


@dataclass(frozen=True, slots=True)
class _Text:
    """A literal to look for: its eight-byte words with their offsets and masks; its first four bytes, and whether it
    is `longer` than those."""

    words: tuple[tuple[int, np.uint64, np.uint64], ...]
    head: np.uint32
    longer: bool

    @classmethod
    def of(cls, literal: bytes) -> _Text:
        parts = [(i, literal[i : i + 8]) for i in range(0, len(literal), 8)]
        return cls(
            tuple((i, _mask(len(part)), _word(part)) for i, part in parts),
            np.uint32(int.from_bytes(literal[:4], "little")),
            len(literal) > 4,
        )

    def at(self, words: Words, positions: Positions) -> Bools:
        """Whether the literal stands at each position."""
        found = np.ones(positions.size, dtype=np.bool_)
        for offset, mask, word in self.words:
            found &= (words[positions + offset] & mask) == word
        return found


_KEYS = {key: _Text.of(f'"{key}"'.encode()) for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")}
_ARGS = {key: _Text.of(f'"{key}"'.encode()) for key in (*INTS, "finished", "Collective name")}
_CATEGORIES = [(_Text.of(f'"{name}"'.encode()), kind) for name, kind in KIND_OF.items()]
_FALSE, _TRUE = _Text.of(b"false"), _Text.of(b"true")


@dataclass(frozen=True, slots=True)
class _Index:
    """The structure of a stretch. Tokens are its strings: `opens` and `closes` are their quotes; `keys` the tokens
    before a colon. Events are `starts` to `ends` (their braces), with `args_open` to `args_close` around the one object
    within (-1: none); `nested` marks events that hold more than that, `broken` those with a string that something odd
    follows, as a stray quote turns what is inside strings to the outside."""

    text: Bytes
    words: Words
    opens: Positions
    closes: Positions
    keys: Positions
    heads: np.ndarray[tuple[int], np.dtype[np.uint32]]
    starts: Positions
    ends: Positions
    args_open: Positions
    args_close: Positions
    nested: Bools
    broken: Bools
    escapes: Positions


def parse_plain(buffer: bytes, start: int, stop: int, offset: int = 0, *, salvage: bool = True) -> Events:
    """The events in `buffer[start:stop]`, which begins at an event's `{` and ends at an event's `}`.

    `buffer` must be valid UTF-8 and reach `SLACK` bytes past `stop`; `offset` is where it lies in the whole text.
    Raises NotPlain where the stretch as a whole cannot be trusted, and without `salvage` for any event that is odd.
    """
    index = _index(buffer, start, stop)
    n = index.starts.size
    slow = index.nested.copy()
    top = {key: _find(index, literal, slow, inside=False) for key, literal in _KEYS.items()}
    args = {key: _find(index, literal, slow, inside=True) for key, literal in _ARGS.items()}

    slow |= args["Collective name"] >= 0  # messages are few and have many fields
    _check_args(index, top.pop("args"), slow)

    phase = _phases(index, top["ph"])
    phase[index.broken] = 0
    kind = np.full(n, -1, dtype=np.int64)
    spans = np.flatnonzero(phase == ord("X"))
    at, known = _values(index, top["cat"][spans])
    for literal, code in _CATEGORIES:
        kind[spans[known & literal.at(index.words, at)]] = code
    slow |= (phase == 0) | (phase == ord("M"))
    slow[spans[~known]] = True
    unused = _unused(buffer, index, phase, kind, slow, top["cat"])

    rows = np.flatnonzero((kind >= 0) & ~slow)
    good = np.ones(rows.size, dtype=np.bool_)
    name_from, name_to = _names(index, top["name"][rows], index.ends[rows], good)
    columns: dict[str, npt.NDArray[Any]] = {"kind": kind[rows].astype(np.uint8)}
    for key, limit in (("ts", MAX_TIME), ("dur", MAX_DURATION)):
        at, found = _values(index, top[key][rows])
        columns[key], ok = decimals(index.text, index.words, at, limit)
        good &= found & ok
    for key in ("pid", "tid"):
        at, found = _values(index, top[key][rows])
        columns[key], ok = integers(index.text, index.words, at)
        good &= found & ok
    for key, name in INTS.items():
        columns[name] = _optional(index, args[key][rows], good)
    columns["finished"] = _finished(index, args["finished"][rows], good)
    if not good.all():
        slow[rows[~good]] = True
        rows, name_from, name_to = rows[good], name_from[good], name_to[good]
        columns = {name: values[good] for name, values in columns.items()}
    plain = Events(columns, categorical(buffer, index.words, name_from, name_to), unused=unused)
    odd = np.flatnonzero(slow)
    if not odd.size:
        return plain
    if not salvage:
        raise NotPlain("an event is out of the ordinary")
    return _with_odd(plain, index.starts[rows] + offset, buffer, index, odd, offset)


def parse_one(event: bytes) -> Events | None:
    """The one event in `event`, or None where the fast path would not take it. The tolerant path asks this for text
    that is not valid JSON, so that both paths agree on what matters of an event."""
    try:
        event.decode()
        return parse_plain(event + b" " * SLACK, 0, len(event), salvage=False)
    except (NotPlain, UnicodeDecodeError):
        return None


def _with_odd(plain: Events, at: Positions, buffer: bytes, index: _Index, odd: Positions, offset: int) -> Events:
    """`plain`, whose rows start at `at`, with the events `odd` read by the tolerant path, in file order."""
    reader = EventReader()
    for start, stop in zip(index.starts[odd].tolist(), (index.ends[odd] + 1).tolist(), strict=True):
        if not reader.text(buffer[start:stop], offset + start):
            # Two stray quotes can make one of many events: look for whole ones within.
            parse_tolerant(buffer, start, stop, reader, offset, closed=True, plain=parse_one)
    read = reader.events()
    both = join_events([plain, read])
    order = np.argsort(np.concatenate((at, np.array(reader.at, dtype=np.int64))), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    both.columns = {name: values[order] for name, values in both.columns.items()}
    both.names = both.names[order]
    both.talks = [(int(place[row]), args) for row, args in both.talks]
    return both


def _index(buffer: bytes, start: int, stop: int) -> _Index:
    text: Bytes = np.frombuffer(buffer, dtype=np.uint8)
    words = word_view(buffer)
    if len(buffer) < stop + SLACK:
        raise ValueError("the buffer must reach past the stretch")
    here = text[start:stop]
    quotes = np.flatnonzero(here == _QUOTE)
    escapes: Positions = np.empty(0, dtype=np.int64)
    if buffer.find(b"\\", start, stop) >= 0:
        escapes = np.flatnonzero(here == _BACKSLASH)
        quotes = _unescaped(quotes, escapes)
        escapes += start
    if quotes.size % 2:
        raise NotPlain("quotes do not pair")
    braces = np.flatnonzero((here == _OPEN) | (here == _CLOSE))
    braces = braces[np.searchsorted(quotes, braces) % 2 == 0]
    opening = here[braces] == _OPEN
    depth = np.cumsum(np.where(opening, 1, -1))
    if not depth.size or depth[-1] != 0 or depth.min() < 0:
        raise NotPlain("braces do not pair")
    first, last = np.flatnonzero(opening & (depth == 1)), np.flatnonzero(depth == 0)
    starts, ends, inner = braces[first], braces[last], last - first
    if starts[0] != 0 or ends[-1] != here.size - 1:
        raise NotPlain("something stands before the first event or after the last")
    _check_gaps(here, starts, ends)
    has_args = inner == 3
    quotes += start
    starts = starts + start
    opens, closes = quotes[0::2], quotes[1::2]
    after = text[closes + 1]
    broken = np.zeros(starts.size, dtype=np.bool_)
    stray = np.flatnonzero(~_AFTER_STRING[after])
    broken[np.searchsorted(starts, opens[stray], side="right") - 1] = True
    keys = np.flatnonzero(after == _COLON)
    return _Index(
        text=text,
        words=words,
        opens=opens,
        closes=closes,
        keys=keys,
        heads=words[opens[keys]].astype(np.uint32),
        starts=starts,
        ends=ends + start,
        args_open=np.where(has_args, braces[first + has_args] + start, -1),
        args_close=np.where(has_args, braces[first + 2 * has_args] + start, -1),
        nested=inner > 3,
        broken=broken,
        escapes=escapes,
    )


def _unescaped(quotes: Positions, escapes: Positions) -> Positions:
    """`quotes` without those that a backslash escapes: those after an odd run of backslashes."""
    breaks = np.flatnonzero(np.diff(escapes) != 1)
    first = np.concatenate(([0], breaks + 1))
    last = np.concatenate((breaks, [escapes.size - 1]))
    escaped = escapes[last[(last - first) % 2 == 0]] + 1
    where = np.searchsorted(quotes, escaped)
    inside = where < quotes.size
    where, escaped = where[inside], escaped[inside]
    return np.delete(quotes, where[quotes[where] == escaped])


def _check_gaps(here: Bytes, starts: Positions, ends: Positions) -> None:
    """Between two events there is one comma and white space, nothing else."""
    gap_from, gap = ends[:-1] + 1, starts[1:] - ends[:-1] - 1
    lengths = np.unique(gap)
    if lengths.size > _GAPS:
        raise NotPlain("events are spaced in too many ways")
    for length in lengths.tolist():
        at = gap_from[gap == length]
        commas = np.zeros(at.size, dtype=np.int64)
        for k in range(length):
            char = here[at + k]
            commas += char == _COMMA
            if (char > _SPACE).sum() != (char == _COMMA).sum():
                raise NotPlain("something stands between two events")
        if (commas != 1).any():
            raise NotPlain("events are not separated by one comma")


def _find(index: _Index, literal: _Text, slow: Bools, *, inside: bool) -> Positions:
    """For every event the token of that key, at the top of the event or `inside` its args; -1 where there is none.
    Events that hold it twice become slow."""
    tokens = index.keys[index.heads == literal.head]
    at = index.opens[tokens]
    if literal.longer:
        real = literal.at(index.words, at)
        tokens, at = tokens[real], at[real]
    n = index.starts.size
    found = np.full(n, -1, dtype=np.int64)
    if tokens.size == n and bool((at > index.starts).all() and (at < index.ends).all()):
        event: Positions = np.arange(n)
    else:
        event = np.searchsorted(index.starts, at, side="right") - 1
    within = (at > index.args_open[event]) & (at < index.args_close[event])
    keep = within if inside else ~within
    if not keep.all():
        event, tokens = event[keep], tokens[keep]
    found[event] = tokens
    if event.size > 1 and not (event[1:] > event[:-1]).all():
        slow |= np.bincount(event, minlength=n) > 1
    return found


def _values(index: _Index, tokens: Positions) -> tuple[Positions, Bools]:
    """Where the values of the keys `tokens` start, and whether there is one (a missing key points at the first)."""
    found = tokens >= 0
    at = index.closes[np.where(found, tokens, 0)] + 2
    at += index.text[at] == _SPACE
    return at, found


def _phases(index: _Index, tokens: Positions) -> Bytes:
    """The one-letter phase of every event, 0 where it has none."""
    at, found = _values(index, tokens)
    one = found & (index.text[at] == _QUOTE) & (index.text[at + 2] == _QUOTE)
    return np.where(one, index.text[at + 1], 0).astype(np.uint8)


def _check_args(index: _Index, tokens: Positions, slow: Bools) -> None:
    """Events whose inner object is not the value of `args` become slow."""
    at, found = _values(index, tokens)
    holds = index.args_open >= 0
    slow |= holds & ~(found & (at == index.args_open))


def _unused(buffer: bytes, index: _Index, phase: Bytes, kind: Positions, slow: Bools, cats: Positions) -> Counter[str]:
    """Counts of what no table holds: spans by category, everything else by phase. Clears `slow` for them."""
    unused: Counter[str] = Counter()
    rest = np.flatnonzero((phase != 0) & (phase != ord("X")) & (phase != ord("M")))
    slow[rest] = False
    for code, count in zip(*np.unique(phase[rest], return_counts=True), strict=True):
        unused[f"phase {chr(code)}"] += int(count)
    rows = np.flatnonzero((phase == ord("X")) & (kind < 0) & (cats >= 0))
    good = np.ones(rows.size, dtype=np.bool_)
    start, stop = _names(index, cats[rows], index.ends[rows], good)
    slow[rows] = ~good
    if good.any():
        names = categorical(buffer, index.words, start[good], stop[good])
        for name, count in names.value_counts().iter_rows():
            unused[f"category {name}"] += count
    return unused


def _names(index: _Index, tokens: Positions, ends: Positions, good: Bools) -> tuple[Positions, Positions]:
    """Where the string values of the keys `tokens` of events that end at `ends` start and stop; clears `good` where
    there is none, or one with an escape or a stray quote."""
    at, found = _values(index, tokens)
    last = index.opens.size - 1
    value = np.minimum(np.where(found, tokens, 0) + 1, last)
    start, stop = index.opens[value] + 1, index.closes[value]
    after = index.text[stop + 1]
    good &= found & (index.opens[value] == at) & ((after == _COMMA) | (after == _CLOSE) | (after <= _SPACE))
    # The event's next string must be a key: otherwise this one held a quote and was cut short.
    following = np.minimum(value + 1, last)
    a_key = index.text[index.closes[following] + 1] == _COLON
    good &= a_key | (index.opens[following] > ends) | (following == value)
    if index.escapes.size:
        good &= np.searchsorted(index.escapes, start) == np.searchsorted(index.escapes, stop)
    return start, stop


def _optional(index: _Index, tokens: Positions, good: Bools) -> Positions:
    """The integers of an argument that events may lack (NULL then); clears `good` where one cannot be read."""
    values = np.full(tokens.size, NULL, dtype=np.int64)
    have = np.flatnonzero(tokens >= 0)
    if have.size:
        at, _ = _values(index, tokens[have])
        read, ok = integers(index.text, index.words, at)
        values[have] = read
        good[have[~ok]] = False
    return values


def _finished(index: _Index, tokens: Positions, good: Bools) -> Bools:
    """False where the event says `"finished": false`, true otherwise; clears `good` where it says anything else."""
    finished = np.ones(tokens.size, dtype=np.bool_)
    have = np.flatnonzero(tokens >= 0)
    if have.size:
        at, _ = _values(index, tokens[have])
        no, yes = _FALSE.at(index.words, at), _TRUE.at(index.words, at)
        finished[have[no]] = False
        good[have[~(no | yes)]] = False
    return finished

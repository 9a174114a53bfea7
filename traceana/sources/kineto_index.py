"""Where things are in a stretch of JSON events: a structural index in numpy, as simdjson keeps one.

It holds every quote and every brace outside strings. A token is a string; an event is an object at depth one. A stretch
whose quotes or braces do not add up is refused as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from traceana.sources.kineto_words import SLACK, Bools, Bytes, Positions, Words, word_view

__all__ = ["Index", "Literal", "NotPlain", "build_index"]

QUOTE, OPEN, CLOSE, CLOSE_LIST, COLON, COMMA, BACKSLASH, SPACE = b'"{}]:,\\ '
_GAPS = 8  # different spacings between events, at most, before a stretch is called odd
_ALL = np.uint64(2**64 - 1)


class NotPlain(Exception):
    """The stretch is not a plain sequence of events; the tolerant path must read all of it."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A text to compare with: its eight-byte words, each with its offset and mask."""

    words: tuple[tuple[int, np.uint64, np.uint64], ...]

    @classmethod
    def of(cls, text: str) -> Literal:
        """The literal `text`, quotes and all."""
        data = text.encode()
        parts = [(i, data[i : i + 8]) for i in range(0, len(data), 8)]
        return cls(
            tuple(
                (i, np.uint64((1 << 8 * len(part)) - 1), np.uint64(int.from_bytes(part, "little"))) for i, part in parts
            )
        )

    def at(self, words: Words, positions: Positions) -> Bools:
        """Whether the literal stands at each position."""
        return self.after(words, positions, words[positions])

    def after(self, words: Words, positions: Positions, first: Words) -> Bools:
        """As `at`, with the words at the positions already in hand."""
        _, mask, word = self.words[0]
        found: Bools = (first if mask == _ALL else first & mask) == word
        if len(self.words) > 1 and found.any():
            rows = np.flatnonzero(found)
            for offset, mask, word in self.words[1:]:
                rows = rows[(words[positions[rows] + offset] & mask) == word]
            found[:] = False
            found[rows] = True
        return found


@dataclass(frozen=True, slots=True)
class Index:
    """The structure of a stretch. `opens` and `closes` are the quotes of its tokens, `heads` their first two bytes.

    One entry an event: its braces `starts` and `ends`; its tokens, from `first` to `last` (exclusive); whether it
    `holds` just one object, that object's brace `inner` and its tokens, from `inner_first` to `inner_last`; `nested`,
    where it holds more than that; `broken`, where a string is followed by something odd, as a stray quote turns what
    is inside strings to the outside. `escapes` are the backslashes.
    """

    text: Bytes
    words: Words
    opens: Positions
    closes: Positions
    heads: npt.NDArray[np.uint16]
    starts: Positions
    ends: Positions
    first: Positions
    last: Positions
    holds: Bools
    inner: Positions
    inner_first: Positions
    inner_last: Positions
    nested: Bools
    broken: Bools
    escapes: Positions

    def values(self, tokens: Positions) -> Positions:
        """Where the values of the keys `tokens` start."""
        at = self.closes[tokens] + 2
        at += self.text[at] == SPACE
        return at

    def strings(self, tokens: Positions) -> tuple[Positions, Positions, Bools]:
        """Where the string values of the keys `tokens` start and stop, and whether each is one without an escape and
        with a key, if anything, after it."""
        value = np.minimum(tokens + 1, self.opens.size - 1)
        start, stop = self.opens[value] + 1, self.closes[value]
        good: Bools = self.opens[value] == self.values(tokens)
        if self.escapes.size:
            good &= np.searchsorted(self.escapes, start) == np.searchsorted(self.escapes, stop)
        return start, stop, good


def build_index(buffer: bytes, start: int, stop: int) -> Index:
    """The index of `buffer[start:stop]`, which begins with the brace of an event and ends with one. The buffer must
    reach `SLACK` bytes past `stop`. Raises NotPlain."""
    if len(buffer) < stop + SLACK:
        raise ValueError("the buffer must reach past the stretch")
    text: Bytes = np.frombuffer(buffer, dtype=np.uint8)
    words = word_view(buffer)
    here = text[start:stop]
    quotes = np.flatnonzero(here == QUOTE)
    escapes: Positions = np.empty(0, dtype=np.int64)
    if buffer.find(b"\\", start, stop) >= 0:
        escapes = np.flatnonzero(here == BACKSLASH)
        quotes = _unescaped(quotes, escapes)
        escapes += start
    if quotes.size % 2:
        raise NotPlain("quotes do not pair")
    braces = np.flatnonzero((here == OPEN) | (here == CLOSE))
    before = np.searchsorted(quotes, braces)  # quotes before each brace: an odd number means inside a string
    outside = before % 2 == 0
    if not outside.all():
        braces, before = braces[outside], before[outside]
    tokens = before >> 1
    opening = here[braces] == OPEN
    depth = np.cumsum(opening, dtype=np.int64) * 2 - np.arange(1, braces.size + 1)
    if not depth.size or depth[-1] != 0 or depth.min() < 0:
        raise NotPlain("braces do not pair")
    head, tail = np.flatnonzero(opening & (depth == 1)), np.flatnonzero(depth == 0)
    starts, ends, held = braces[head], braces[tail], tail - head
    if starts[0] != 0 or ends[-1] != here.size - 1:
        raise NotPlain("something stands before the first event or after the last")
    _check_gaps(here, starts, ends)
    holds = held == 3
    quotes += start
    opens, closes = quotes[0::2], quotes[1::2]
    first = tokens[head]
    broken = np.zeros(starts.size, dtype=np.bool_)
    after = text[closes + 1]
    ordinary = (after == COLON) | (after == COMMA) | (after <= SPACE)
    ordinary |= (after == CLOSE) | (after == CLOSE_LIST)
    if not ordinary.all():
        broken[np.searchsorted(first, np.flatnonzero(~ordinary), side="right") - 1] = True
    return Index(
        text=text,
        words=words,
        opens=opens,
        closes=closes,
        heads=_heads(text, opens),
        starts=starts + start,
        ends=ends + start,
        first=first,
        last=tokens[tail],
        holds=holds,
        inner=braces[head + holds] + start,
        inner_first=tokens[head + holds],
        inner_last=tokens[head + 2 * holds],
        nested=held > 3,
        broken=broken,
        escapes=escapes,
    )


def _heads(text: Bytes, opens: Positions) -> npt.NDArray[np.uint16]:
    """The first two bytes of every token, as one number."""
    at = opens + 1
    heads = text[at].astype(np.uint16)
    at += 1
    heads |= text[at].astype(np.uint16) << np.uint16(8)
    return heads


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
    at, gap = ends[:-1] + 1, starts[1:] - ends[:-1] - 1
    lengths = [int(gap[0])] if gap.size and (gap == gap[0]).all() else np.unique(gap).tolist()
    if len(lengths) > _GAPS:
        raise NotPlain("events are spaced in too many ways")
    for length in lengths:
        where = at if len(lengths) == 1 else at[gap == length]
        commas = np.zeros(where.size, dtype=np.uint8)
        for k in range(length):
            char = here[where + k]
            comma = char == COMMA
            if ((char > SPACE) > comma).any():
                raise NotPlain("something stands between two events")
            commas += comma
        if (commas != 1).any():
            raise NotPlain("events are not separated by one comma")

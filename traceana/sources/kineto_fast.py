"""The fast path: a stretch of whole events as JSON text into columns, many events at a time.

What an event holds is read where its layout says. An event that is not entirely plain (an escape in its name, a number
out of the ordinary, a nested object, a key twice, a stray quote, a layout of its own) is left to the tolerant path, one
at a time.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from traceana.sources.kineto_events import (
    INTS,
    KIND_OF,
    MAX_DURATION,
    MAX_TIME,
    NULL,
    Events,
    join_events,
)
from traceana.sources.kineto_index import Index, Literal, NotPlain, build_index
from traceana.sources.kineto_layout import NEEDED, learn, standard_layouts
from traceana.sources.kineto_tolerant import EventReader, parse_tolerant
from traceana.sources.kineto_words import SLACK, Bools, Bytes, Positions, Words, categorical, decimals, integers

__all__ = ["FALSE", "METADATA", "SPAN", "TRUE", "NotPlain", "kinds_at", "parse_one", "parse_plain", "with_odd"]

_PHASE = Literal.of('"ph":')
_PHASE_HEAD = np.uint16(int.from_bytes(b"ph", "little"))
_QUOTE, SPAN, METADATA = ord('"'), ord("X"), ord("M")
_ARGS = {key: Literal.of(f'"{key}":') for key in (*INTS, "finished", "Collective name")}
_HEADS = {key: np.uint16(int.from_bytes(key.encode()[:2], "little")) for key in _ARGS}
_CATEGORIES = [(Literal.of(f'"{name}"'), kind) for name, kind in KIND_OF.items()]
FALSE, TRUE = Literal.of("false"), Literal.of("true")
_STANDARD = standard_layouts()
_LEARNED = 8  # layouts of its own that a stretch may have
_WORTH = 16  # events that share one, for it to be worth learning


def parse_plain(buffer: bytes, start: int, stop: int, offset: int = 0, *, salvage: bool = True) -> Events:
    """The events in `buffer[start:stop]`, which begins at an event's `{` and ends at an event's `}`.

    `buffer` must be valid UTF-8 and reach `SLACK` bytes past `stop`; `offset` is where it lies in the whole text.
    Raises NotPlain where the stretch as a whole cannot be trusted, and without `salvage` for any event that is odd.
    """
    index = build_index(buffer, start, stop)
    phase = _phases(index)
    places = _places(buffer, index, phase)
    odd = (phase == 0) | (phase == METADATA)
    spans = np.flatnonzero(phase == SPAN)
    known = places["cat"][spans] >= 0
    odd[spans[~known]] = True
    spans = spans[known]
    kind = kinds_at(index.words, index.values(places["cat"][spans]))
    unused = _unused(buffer, index, phase, spans[kind < 0], places["cat"], odd)
    rows, kind = spans[kind >= 0], kind[kind >= 0]

    good = np.ones(rows.size, dtype=np.bool_)
    name_from, name_to, plain_name = index.strings(places["name"][rows])
    good &= plain_name
    columns: dict[str, npt.NDArray[Any]] = {"kind": kind.astype(np.uint8)}
    _read_times(index, places, rows, columns, good)
    talks = _read_integers(index, places, rows, columns, good)
    good &= ~talks  # messages are few and have many fields
    if not good.all():
        odd[rows[~good]] = True
        rows, name_from, name_to = rows[good], name_from[good], name_to[good]
        columns = {name: values[good] for name, values in columns.items()}
    plain = Events(columns, categorical(buffer, index.words, name_from, name_to), unused=unused)
    left = np.flatnonzero(odd)
    if not left.size:
        return plain
    if not salvage:
        raise NotPlain("an event is out of the ordinary")
    return with_odd(plain, index.starts[rows] + offset, buffer, index.starts[left], index.ends[left] + 1, offset)


def parse_one(event: bytes) -> Events | None:
    """The one event in `event`, or None where the fast path would not take it. The tolerant path asks this for text
    that is not valid JSON, so that both paths agree on what matters of an event."""
    try:
        event.decode()
        return parse_plain(event + b" " * SLACK, 0, len(event), salvage=False)
    except (NotPlain, UnicodeDecodeError):
        return None


def _phases(index: Index) -> Bytes:
    """The one-letter phase of every event that begins with it and says it once; 0 for the others."""
    phase = np.zeros(index.starts.size, dtype=np.uint8)
    if not index.opens.size:
        return phase
    first = np.minimum(index.first, index.opens.size - 1)
    found = _PHASE.at(index.words, index.opens[first]) & (index.last > index.first) & ~index.broken
    at = index.values(first)
    found &= (index.text[at] == _QUOTE) & (index.text[at + 2] == _QUOTE)
    phase[found] = index.text[at[found] + 1]
    said = np.flatnonzero(index.heads == _PHASE_HEAD)
    if said.size != phase.size:
        said = said[_PHASE.at(index.words, index.opens[said])]
        event = np.searchsorted(index.first, said, side="right") - 1
        phase[np.bincount(event, minlength=phase.size) > 1] = 0
    return phase


def _places(buffer: bytes, index: Index, phase: Bytes) -> dict[str, Positions]:
    """The token of every needed key of every event, -1 where it is not known. Sets the phase of events that do not
    begin with it, where their layout can be learned."""
    places = {key: np.full(phase.size, -1, dtype=np.int64) for key in NEEDED}
    left = np.flatnonzero(phase == SPAN)
    for layout in _STANDARD:
        matched = layout.match(index, left)
        for key, tokens in layout.places(index, matched).items():
            places[key][matched] = tokens
        if matched.size:
            left = left[places["ph"][left] < 0]
    strange = (phase == 0) & ~index.broken
    if left.size + np.count_nonzero(strange) < _WORTH:
        return places
    left = np.flatnonzero(((phase == SPAN) & (places["ph"] < 0)) | strange)
    for _ in range(_LEARNED):
        if left.size < _WORTH:
            break
        found = learn(buffer[index.starts[left[0]] : index.ends[left[0]] + 1])
        matched = found.match(index, left) if found else left[:0]
        if found is None or not matched.size:
            left = left[1:]
            continue
        for key, tokens in found.places(index, matched).items():
            places[key][matched] = tokens
        at = index.values(places["ph"][matched])
        letter = (index.text[at] == _QUOTE) & (index.text[at + 2] == _QUOTE)
        phase[matched] = np.where(letter, index.text[at + 1], 0)
        left = left[places["ph"][left] < 0]
    return places


def kinds_at(words: Words, at: Positions) -> Positions:
    """The kind of the category at each position, -1 for those that no table holds."""
    kind = np.full(at.size, -1, dtype=np.int64)
    first = words[at]
    left = at.size
    for literal, code in _CATEGORIES:
        if not left:
            break
        found = literal.after(words, at, first)
        kind[found] = code
        left -= int(np.count_nonzero(found))
    return kind


def _unused(buffer: bytes, index: Index, phase: Bytes, spans: Positions, cats: Positions, odd: Bools) -> Counter[str]:
    """Counts of what no table holds: `spans` by category, everything else by phase. What cannot be told is odd."""
    unused: Counter[str] = Counter()
    for code, count in enumerate(np.bincount(phase, minlength=256).tolist()):
        if count and code not in (0, SPAN, METADATA):
            unused[f"phase {chr(code)}"] += count
    if spans.size:
        start, stop, good = index.strings(cats[spans])
        odd[spans[~good]] = True
        if good.any():
            names = categorical(buffer, index.words, start[good], stop[good])
            for name, count in names.value_counts().iter_rows():
                unused[f"category {name}"] += count
    return unused


def _read_times(
    index: Index, places: dict[str, Positions], rows: Positions, columns: dict[str, npt.NDArray[Any]], good: Bools
) -> None:
    tokens = np.concatenate((places["ts"][rows], places["dur"][rows]))
    value, ok = decimals(index.text, index.words, index.values(tokens), MAX_TIME)
    good &= ok[: rows.size] & ok[rows.size :]
    columns["ts"], columns["dur"] = value[: rows.size], value[rows.size :]
    good &= np.abs(columns["dur"]) < MAX_DURATION * 1000


def _read_integers(
    index: Index, places: dict[str, Positions], rows: Positions, columns: dict[str, npt.NDArray[Any]], good: Bools
) -> Bools:
    """Process, thread and the arguments that are integers (NULL where an event lacks one), and whether it was
    finished. Returns which rows carry a message; clears `good` for rows with an argument twice or not plain."""
    row_of = np.full(index.starts.size, -1, dtype=np.int64)
    row_of[rows] = np.arange(rows.size)
    event_of = np.repeat(np.arange(index.starts.size), index.last - index.first)
    tokens, owners = [places["pid"][rows], places["tid"][rows]], [np.arange(rows.size)] * 2
    talks = np.zeros(rows.size, dtype=np.bool_)
    finished = np.ones(rows.size, dtype=np.bool_)
    for key, literal in _ARGS.items():
        found = np.flatnonzero(index.heads == _HEADS[key])
        if found.size:
            found = found[literal.at(index.words, index.opens[found])]
            event = event_of[found]
            row = row_of[event]
            inside = (row >= 0) & (found >= index.inner_first[event]) & (found < index.inner_last[event])
            if not inside.all():
                found, row = found[inside], row[inside]
            if row.size > 1 and not (row[1:] > row[:-1]).all():
                good &= np.bincount(row, minlength=rows.size) <= 1
        else:
            row = found
        if key == "Collective name":
            talks[row] = True
        elif key == "finished":
            at = index.values(found)
            no, yes = FALSE.at(index.words, at), TRUE.at(index.words, at)
            finished[row[no]] = False
            good[row[~(no | yes)]] = False
        else:
            tokens.append(found)
            owners.append(row)
    value, ok = integers(index.text, index.words, index.values(np.concatenate(tokens)))
    split = np.cumsum([part.size for part in tokens])[:-1]
    for name, owner, part, sound in zip(
        ("pid", "tid", *INTS.values()), owners, np.split(value, split), np.split(ok, split), strict=True
    ):
        if owner.size == rows.size:
            columns[name] = part  # every row has it, in order
        else:
            columns[name] = np.full(rows.size, NULL, dtype=np.int64)
            columns[name][owner] = part
        if not sound.all():
            good[owner[~sound]] = False
    columns["finished"] = finished
    return talks


def with_odd(plain: Events, at: Positions, buffer: bytes, starts: Positions, stops: Positions, offset: int) -> Events:
    """`plain`, whose rows start at `at` of the whole text, with the events from `starts` to `stops` of the buffer read
    by the tolerant path, in file order. Raises NotPlain where the list of events ends in one."""
    reader = EventReader()
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        # One may hold several: two stray quotes can make one of many.
        if parse_tolerant(buffer, start, stop, reader, offset, closed=True, plain=parse_one)[1]:
            raise NotPlain("the list of events ends")
    read = reader.events()
    both = join_events([plain, read])
    order = np.argsort(np.concatenate((at, np.array(reader.at, dtype=np.int64))), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    both.columns = {name: values[order] for name, values in both.columns.items()}
    both.names = both.names[order]
    if both.talks.height:
        row = pl.Series(place[both.talks.get_column("row").to_numpy()])
        both.talks = both.talks.with_columns(row=row).sort("row")
    return both

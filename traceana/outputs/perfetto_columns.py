"""Track events as bytes, many at a time: numpy columns in, Perfetto packets out, no Python per event.

Events that carry the same fields have the same number of bytes, because integers become varints padded to the widest
value of their column (decoders accept empty groups). So each such group is one byte matrix, filled column by column; a
slice that closes right after it opens is one row of it with both its events. The rows of all groups are then put where
they belong in the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traceana.outputs.perfetto_rows import Clock, Layout, Part

__all__ = ["Columns", "encode_counter", "encode_slices"]

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
Mask = NDArray[np.bool_]

_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4  # TrackEvent.Type
_ROWS = 1 << 14  # encoded at once: their bytes stay in the cache


@dataclass(frozen=True, slots=True)
class Columns:
    """Slices that carry the same kinds of fields, sorted by `ts`, longer first on ties (ns)."""

    ts: I64
    end: I64
    parts: Sequence[Part]


class _Group:
    """Rows in a given order; `code` is the layout of each one, or all have the only one."""

    def __init__(self, layouts: Sequence[Layout], code: NDArray[Any] | None) -> None:
        self._layouts, self._code = layouts, code

    def rows(self, low: int, high: int) -> list[tuple[U8, I64 | None]]:
        """Rows `low` to `high`, those of each layout, and which of them these are (None: all)."""
        every = slice(low, high)
        if self._code is None:
            return [(self._layouts[0].rows(every, high - low), None)]
        code = self._code[every]
        counts = np.bincount(code)
        used = np.flatnonzero(counts).tolist()
        if len(used) == 1:
            return [(self._layouts[used[0]].rows(every, high - low), None)]
        which = np.split(np.argsort(code, kind="stable"), np.cumsum(counts[used])[:-1])
        return [(self._layouts[k].rows(low + mine, len(mine)), mine) for k, mine in zip(used, which, strict=True)]


def _by_presence(parts: Sequence[Part], count: int) -> tuple[list[list[Part]], I64 | None]:
    """The combinations of parts that occur, and the index of each of `count` slices into them (None: there is one)."""
    sometimes = [p for p in parts if p.present is not None]
    if not sometimes:
        return [list(parts)], None
    masks = np.stack([p.present for p in sometimes if p.present is not None])
    patterns = np.zeros((1, 0), np.uint8)
    index = np.zeros(count, np.int64)
    # Eight parts at a time, counting what occurs instead of sorting it.
    for bits in np.packbits(masks, axis=0, bitorder="little"):
        code = index * 256 + bits
        used = np.flatnonzero(np.bincount(code))
        number = np.zeros(len(patterns) * 256, np.int64)
        number[used] = np.arange(len(used))
        patterns, index = np.column_stack([patterns[used // 256], (used % 256).astype(np.uint8)]), number[code]
    flags = np.unpackbits(patterns, axis=1, bitorder="little", count=len(sometimes)).astype(np.bool_)
    combinations: list[list[Part]] = []
    for row in flags.tolist():
        left = iter(row)
        combinations.append([p for p in parts if p.present is None or next(left)])
    return combinations, index


def _openings(columns: Columns, paired: Mask, clock: Clock, track: Sequence[Part]) -> _Group:
    """The rows that open slices: BEGIN alone, with its END where `paired`, or INSTANT."""
    combinations, index = _by_presence([p for p in columns.parts if not p.on_end], len(columns.ts))
    start, end = columns.ts - clock.origin, columns.end - clock.origin
    kind = np.where(columns.end > columns.ts, paired.view(np.uint8), 2)
    code = kind if index is None else index * 3 + kind
    used = np.flatnonzero(np.bincount(code, minlength=3 * len(combinations)))
    layouts: list[Layout] = []
    for k in used.tolist():
        layout = Layout(clock)
        layout.event(_INSTANT if k % 3 == 2 else _BEGIN, start, [*track, *combinations[k // 3]])
        if k % 3 == 1:
            layout.event(_END, end, track)
        layouts.append(layout)
    number = np.zeros(3 * len(combinations), np.uint8 if len(used) < 256 else np.int64)
    number[used] = np.arange(len(used))
    return _Group(layouts, number[code] if len(used) > 1 else None)


def _endings(end: I64, parts: Sequence[Part], clock: Clock) -> _Group:
    combinations, index = _by_presence(parts, len(end))
    layouts: list[Layout] = []
    for some in combinations:
        layout = Layout(clock)
        layout.event(_END, end - clock.origin, some)
        layouts.append(layout)
    return _Group(layouts, index)


def encode_slices(
    frames: Sequence[Columns], merged: I64 | None, order: I64, tracks: I64 | None, clock: Clock
) -> Iterator[memoryview]:
    """The packets of all slices of `frames`, some thousand at a time.

    `merged` are the slices, numbered through all frames, in order of their start (None: they are); `order` counts in
    that order (see `arrange`), and so does `tracks`, the uuid of the track of each slice (None: all are on the one that
    the sequence has by default).
    """
    first = np.cumsum([0, *(len(f.ts) for f in frames)]).tolist()
    count = first[-1]
    track = np.empty(0 if tracks is None else count, np.int64)
    if tracks is not None:
        track[slice(None) if merged is None else merged] = tracks
    on_end = [p.over(count, at) for f, at in zip(frames, first, strict=False) for p in f.parts if p.on_end]
    opened, then = order[:-1], order[1:]
    follows = (opened >= 0) & (then == ~opened)  # a slice and its own end
    if on_end:  # which says more there than all others
        plain = np.ones(count, np.bool_)
        for part in on_end:
            plain &= ~part.present if part.present is not None else False
        follows &= (plain if merged is None else plain[merged])[np.where(opened >= 0, opened, 0)]
    paired = np.zeros(count, np.bool_)
    pairs = opened[follows]
    paired[pairs if merged is None else merged[pairs]] = True
    rows = order[np.concatenate(([True], ~follows))]
    closed = ~rows[rows < 0]
    if merged is not None:
        closed = merged[closed]
    groups: list[_Group] = []
    for frame, low in zip(frames, first, strict=False):
        mine = slice(low, low + len(frame.ts))
        own = [] if tracks is None else [_on_track(track[mine])]
        groups.append(_openings(frame, paired[mine], clock, own))
    end = frames[0].end if len(frames) == 1 else np.concatenate([f.end for f in frames])
    own = [] if tracks is None else [_on_track(track[closed])]
    groups.append(_endings(end[closed], own + [p.take(closed) for p in on_end], clock))
    return _in_order(groups, first, rows, merged)


def _on_track(uuids: I64) -> Part:
    return Part.of(bytes([0x58]), uuids)


def _in_order(groups: Sequence[_Group], first: Sequence[int], rows: I64, merged: I64 | None) -> Iterator[memoryview]:
    """The rows of `groups`, the last of which are those that close slices, as `rows` puts them."""
    done = [0] * len(groups)
    place = np.empty(0 if merged is None else first[-1], np.int64)  # in the block, of the slices that it opens
    for low in range(0, len(rows), _ROWS):
        block = rows[low : low + _ROWS]
        opens = block >= 0
        opening = np.flatnonzero(opens)
        each = [len(opening)]
        if merged is not None:
            opened = merged[block[opening]]
            place[opened] = opening
            each = np.diff([0, *(int(np.count_nonzero(opened < bound)) for bound in first[1:])]).tolist()
        parts: list[tuple[U8, I64]] = []
        for k, (group, count) in enumerate(zip(groups, [*each, len(block) - len(opening)], strict=True)):
            if count == 0:
                continue
            if k == len(groups) - 1:
                there = np.flatnonzero(~opens)
            elif merged is None:
                there = opening
            else:
                there = place[first[k] + done[k] : first[k] + done[k] + count]
            found = group.rows(done[k], done[k] + count)
            parts += [(some, there if which is None else there[which]) for some, which in found]
            done[k] += count
        yield _put_together(parts, len(block))


def _put_together(parts: Sequence[tuple[U8, I64]], count: int) -> memoryview:
    """The bytes of `count` rows, given by their length and with the place of each one."""
    if len(parts) == 1:
        return parts[0][0].reshape(-1).data
    size = np.empty(count, np.int64)
    for rows, there in parts:
        size[there] = rows.shape[1]
    after = np.cumsum(size)
    out = np.empty(int(after[-1]), np.uint8)
    for rows, there in parts:
        width = rows.shape[1]
        # One item a byte of `out`: what starts there. So an assignment copies whole rows to anywhere.
        anywhere = np.ndarray(len(out) - width + 1, f"V{width}", out.data, 0, (1,))
        anywhere[after[there] - width] = rows.view(f"V{width}").ravel()
    return out.data


def encode_counter(ts: I64, value: Part, clock: Clock) -> Iterator[memoryview]:
    """The packets of the samples of one counter, in order."""
    layout = Layout(clock)
    layout.event(_COUNTER, ts - clock.origin, [value])
    for low in range(0, len(ts), _ROWS):
        high = min(low + _ROWS, len(ts))
        yield layout.rows(slice(low, high), high - low).reshape(-1).data

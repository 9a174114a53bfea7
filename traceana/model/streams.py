"""Which activity of another stream each activity waited for: the stream waits between its launch and the launch before
it on its stream, followed through streams that were themselves made to wait."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceana.arrays import distinct, groups_of
from traceana.intervals import IntArray
from traceana.model.phases import GLUE, span_numbers
from traceana.model.stream_waits import NOTHING, Issued, StreamWaits

__all__ = ["awaited_activities"]

_NEVER = np.int64(-(1 << 62))
# Streams that wait for streams that wait: SGLang's loop nests three deep, and time falls with every step.
_DEEPEST = 16


class _Order:
    """Things with a stream and a time, in that order, for "the last on a stream before a time"."""

    def __init__(self, stream: IntArray, at: IntArray, base: int) -> None:
        self.base = base
        self.rows = np.lexsort((np.arange(at.size), at, stream))
        self.stream = stream[self.rows]
        self.key = self._key(self.stream, at[self.rows])

    def _key(self, stream: IntArray, at: IntArray) -> IntArray:
        # 44 bits hold five hours in nanoseconds; a stream's number goes above them.
        return (stream << 44) + np.clip(at - self.base, 0, (1 << 44) - 1)

    def position(self, stream: IntArray, at: IntArray, side: str) -> IntArray:
        """How many come before (stream, at)."""
        if side == "left":
            return np.searchsorted(self.key, self._key(stream, at), side="left")
        return np.searchsorted(self.key, self._key(stream, at), side="right")

    def last(self, stream: IntArray, at: IntArray) -> IntArray:
        """The row of the last on `stream` before `at`, -1 where there is none."""
        index = self.position(stream, at, "left") - 1
        fits = (index >= 0) & (np.append(self.stream, -2)[index] == stream)
        return np.where(fits, np.append(self.rows, NOTHING)[index], NOTHING)


def _ranges(low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
    """Every index of `[low, high)` of each range: which range, and the index."""
    count = np.maximum(high - low, 0)
    which = np.repeat(np.arange(low.size), count)
    first = np.cumsum(count) - count
    return which, low[which] + np.arange(which.size) - first[which]


def awaited_activities(
    start: IntArray, end: IntArray, released: IntArray, issued: Issued, waits: StreamWaits, phases: pl.DataFrame,
    forwards: tuple[IntArray, IntArray],
) -> IntArray:  # fmt: skip
    """For each activity of one rank the one on another stream that it waited for longest, or -1.

    `released` is when each could have started but for other streams. `forwards` are the starts of the rank's
    `run_batch` spans in order, and the activity that ends last in each (-1: none). A wait at a place (a stream, and a
    span of the scheduler) counts only if at no instance what it is said to be for was still running when the waiting
    activity started: then the place was misread.
    """
    found = np.full(start.size, NOTHING)
    if waits.ts.size == 0 or start.size == 0:
        return found
    base = int(min(issued.at.min(), waits.ts.min())) - 1
    acts, calls = _Order(issued.stream, issued.at, base), _Order(waits.target, waits.ts, base)
    before = np.full(start.size, NOTHING)
    same = acts.stream[1:] == acts.stream[:-1]
    before[acts.rows[1:][same]] = acts.rows[:-1][same]
    since = np.where(before >= 0, issued.at[before], base)
    # What each wait is for: one activity, and the waits that its source stream was under when the event was recorded.
    awaited = np.where(waits.activity >= 0, waits.activity, acts.last(waits.source, waits.recorded))
    behind = np.where(awaited >= 0, issued.at[awaited], base)
    through = (waits.activity < 0) & ~waits.lone
    low = calls.position(waits.source, behind, "right")
    high = np.where(through, calls.position(waits.source, waits.recorded, "left"), low)
    who, at = _ranges(calls.position(issued.stream, since, "right"), calls.position(issued.stream, issued.at, "left"))
    activity, wait = [who], [calls.rows[at]]
    for _ in range(_DEEPEST):
        item, at = _ranges(low[wait[-1]], high[wait[-1]])
        if item.size == 0:
            break
        pair = groups_of(activity[-1][item], calls.rows[at])
        one = np.empty(int(pair.max()) + 1, dtype=np.int64)
        one[pair] = np.arange(pair.size)
        activity.append(activity[-1][item][one])
        wait.append(calls.rows[at][one])
    who, which = np.concatenate(activity), np.concatenate(wait)
    span = _spans(phases, waits.ts)
    direct = ~waits.lone[which]
    place = groups_of(waits.target, waits.source, (waits.activity >= 0).astype(np.int64), *span)
    said = [_unrefuted(who[direct], awaited[which[direct]], place[which[direct]], start, end)]
    said += _lone(who[~direct], which[~direct], place, waits, acts, forwards, start, end)
    k, j = np.concatenate([p[0] for p in said]), np.concatenate([p[1] for p in said])
    later = (end[j] > released[k]) & (issued.stream[j] != issued.stream[k])
    k, j = k[later], j[later]
    order = np.lexsort((-start[j], -issued.stream[j], end[j]))  # ties: the lower stream, the earlier event
    found[k[order]] = j[order]
    return found


def _unrefuted(
    who: IntArray, what: IntArray, place: IntArray, start: IntArray, end: IntArray
) -> tuple[IntArray, IntArray]:
    """Pairs (activity, awaited) without those of places where, once, the awaited one was still running."""
    known = what >= 0
    who, what, place = who[known], what[known], place[known]
    keep = ~np.isin(place, place[end[what] > start[who]])
    return who[keep], what[keep]


def _lone(
    who: IntArray, which: IntArray, place: IntArray, waits: StreamWaits, acts: _Order, forwards: tuple[IntArray, IntArray],
    start: IntArray, end: IntArray,
) -> list[tuple[IntArray, IntArray]]:  # fmt: skip
    """Pairs (activity, awaited) of the waits for an event of long ago. With forwards it is the end of one, the latest
    that every instance of the place allows; without, the last on each stream that every instance allows."""
    runs, last = forwards
    out: list[tuple[IntArray, IntArray]] = []
    if runs.size == 0:
        for stream in distinct(acts.stream):
            what = acts.last(np.full(which.size, stream), waits.ts[which])
            out.append(_unrefuted(who, what, place[which], start, end))
        return out
    newest = np.searchsorted(runs, waits.ts, side="left") - 1
    open_places = distinct(place[which])
    for age in range(_DEEPEST):
        mine = np.isin(place[which], open_places)
        if not mine.any():
            break
        index = newest[which[mine]] - age
        what = np.where(index >= 0, np.append(last, NOTHING)[index], NOTHING)
        kept = _unrefuted(who[mine], what, place[which[mine]], start, end)
        running = (what >= 0) & (end[what] > start[who[mine]])
        open_places = distinct(place[which[mine]][running])
        out.append(kept)
    return out


def _spans(phases: pl.DataFrame, at: IntArray) -> tuple[IntArray, IntArray]:
    """Numbers for the scheduler's span at each time and for the next one it opens; -1 where none is known."""
    named = phases.filter(pl.col("detail") != GLUE).get_column("ts_ns").to_numpy()
    following = np.append(named, -1)[np.searchsorted(named, at, side="right")]
    return span_numbers(phases, at), span_numbers(phases, following)

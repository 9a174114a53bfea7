"""Long traces and many ranks out of short ones: their text copied with other times, ids and headers.

Only the digits of times and of the ids that tie events together change, so a copy costs little and stays as the
profiler wrote it: 1 GB of JSON takes some seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from isal import igzip

__all__ = ["Edit", "Template", "number", "replica", "shared_visits"]

Edit = Callable[[dict[str, Any]], None]
"""Changes distributedInfo in place."""

_NUMBER = re.compile(rb'("ts"|"id"|"correlation"|"External id"|"Src Rank"|"Dst Rank"): (\d+)(?:\.(\d{3}))?(?=[,\s}])')
_MEMBERS = re.compile(rb'("Process Group Ranks": ")\[([\d, ]*)\]')
_BETWEEN = re.compile(rb'(?<=\})\s*,\s*(?=\{\s*"(?:ph|name)":)')
_ONCE = re.compile(rb'"ph": "[Mi]"|"cat": "Trace"')
_VISIT = re.compile(rb'"name": "recv_requests"')
_TIE = re.compile(rb'("correlation"|"id"): (\d+)')
_LAUNCHED = re.compile(rb'"cat": "(?:kernel|gpu_memcpy|gpu_memset|ac2g)"')
_GAP_NS = 1_000_000
_TIME, _ID, _RANK = 0, 1, 2


class Template:
    """The text of one trace, in the layout of Kineto or of json.dumps, ready to be copied.

    `stretch` is the part of its events to copy: start and end in nanoseconds as in the file, by default all of them.
    """

    def __init__(self, text: bytes, stretch: tuple[int, int] | None = None) -> None:
        start = re.search(rb'"traceEvents": \[', text)
        if start is None:
            raise ValueError("no traceEvents")
        stop = text.rindex(b"]", 0, text.rindex(b"}"))
        self._head, self._foot = text[: start.end()], text[stop:]
        events = _BETWEEN.split(text[start.end() : stop].strip())
        self._once = b",\n".join(event for event in events if _ONCE.search(event))
        rest = [event for event in events if not _ONCE.search(event)]
        self._digits(b",\n".join(rest if stretch is None else _within(rest, *stretch)))

    def _digits(self, body: bytes) -> None:
        self.size = len(body)
        self._pieces: list[bytes] = []
        keys: list[int] = []
        values: list[int] = []
        self._decimals = False
        at = 0
        for found in _NUMBER.finditer(body):
            self._pieces.append(body[at : found.start(2)])
            at = found.end()
            keys.append(_TIME if found[1] == b'"ts"' else _RANK if found[1].endswith(b'Rank"') else _ID)
            values.append(_stamp(found) if keys[-1] == _TIME else int(found[2]))
            self._decimals |= keys[-1] == _TIME and found[3] is not None
        self._last = body[at:]
        self._keys, self._values = np.array(keys), np.array(values, dtype=np.int64)
        self._times = self._keys == _TIME
        stamps = self._values[self._times]
        self.period_ns = (int(stamps.max() - stamps.min()) + _GAP_NS) // 1000 * 1000
        self._ids = int(self._values[self._keys == _ID].max()) + 1

    def _copy(self, shift_ns: int, copy: int, first_rank: int) -> bytes:
        values = self._values + np.choose(self._keys, [shift_ns, copy * self._ids, first_rank])
        if self._decimals:
            pairs = zip(values.tolist(), self._times.tolist(), strict=True)
            texts = [b"%d.%03d" % divmod(v, 1000) if time else b"%d" % v for v, time in pairs]
        else:
            texts = [b"%d" % v for v in np.where(self._times, values // 1000, values).tolist()]
        woven = [b""] * (2 * len(texts))
        woven[::2], woven[1::2] = self._pieces, texts
        text = b"".join(woven) + self._last
        return _MEMBERS.sub(lambda m: m[1] + _shifted(m[2], first_rank), text) if first_rank else text

    def _text(self, copies: int, shift_ns: int, first_rank: int, edit: Edit | None) -> Iterator[bytes]:
        yield _edited(self._head, edit)
        for copy in range(copies):
            yield (b",\n" if copy else b"") + self._copy(shift_ns + copy * self.period_ns, copy, first_rank)
        yield (b",\n" + self._once if self._once else b"") + self._foot

    def write(
        self, path: Path, copies: int = 1, *, shift_ns: int = 0, first_rank: int = 0, edit: Edit | None = None
    ) -> None:
        """Writes `copies` one after the other, `shift_ns` later (whole microseconds where the trace has no decimals),
        to `path`, gzipped where its name ends so. `first_rank` is added to the ranks that events name; `edit` changes
        distributedInfo."""
        with igzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb") as file:
            for block in self._text(copies, shift_ns, first_rank, edit):
                file.write(block)


def shared_visits(texts: list[bytes], slots: int) -> list[Template]:
    """Templates of the ranks of one pipeline that runs evenly, each cut to the same visits, whole rounds of `slots`:
    copies of all of them are a longer run of that pipeline, in which messages still go from visit to visit."""
    starts = [sorted(_stamps(text, _VISIT)) for text in texts]
    first = 1 + 2 * slots  # the first rounds still show the profiler's start, and the last ones its stop
    visits = (min(len(s) for s in starts) - first - 3 * slots) // slots * slots
    if visits < slots:
        raise ValueError("less than one round of visits between the first and the last ones")
    templates = [Template(text, (s[first], s[first + visits])) for text, s in zip(texts, starts, strict=True)]
    periods = {s[first + visits + j] - s[first + j] for s in starts for j in range(2 * slots)}
    if len(periods) > 1:
        raise ValueError("the rounds differ: messages from copy to copy would contradict each other")
    for template in templates:
        template.period_ns = min(periods)
    return templates


def number(rank: int, world: int) -> Edit:
    """An edit: this rank of a world."""

    def edit(info: dict[str, Any]) -> None:
        info |= {"rank": rank, "world_size": world}

    return edit


def replica(first: int, world: int) -> Edit:
    """An edit: the same place in a replica whose ranks begin at `first`, in a world of `world`."""

    def edit(info: dict[str, Any]) -> None:
        info |= {"rank": info["rank"] + first, "world_size": world}
        for group in info.get("pg_config", []):
            group["ranks"] = [rank + first for rank in group["ranks"]]

    return edit


def _shifted(ranks: bytes, first: int) -> bytes:
    return b"[%s]" % b", ".join(b"%d" % (int(rank) + first) for rank in ranks.split(b","))


def _stamp(found: re.Match[bytes]) -> int:
    return int(found[2]) * 1000 + int(found[3] or 0)


def _stamps(text: bytes, name: re.Pattern[bytes]) -> Iterator[int]:
    for found in name.finditer(text):
        stamp = _NUMBER.search(text, found.end())
        if stamp is not None:
            yield _stamp(stamp)


def _within(events: list[bytes], start: int, end: int) -> Iterator[bytes]:
    """Those of `events` that begin in the stretch, or were launched by a call that does."""
    inside = [start <= _stamp(found) < end if (found := _NUMBER.search(event)) else False for event in events]
    ties = [found[2] if (found := _TIE.search(event)) else None for event in events]
    launched = [_LAUNCHED.search(event) is not None for event in events]
    calls = {t for t, here, gpu in zip(ties, inside, launched, strict=True) if here and not gpu and t is not None}
    for event, tie, here, gpu in zip(events, ties, inside, launched, strict=True):
        if tie in calls if gpu else here:
            yield event


def _edited(head: bytes, edit: Edit | None) -> bytes:
    found = re.search(rb'"distributedInfo": ', head)
    if edit is None or found is None:
        return head
    before, after = head[: found.end()].decode(), head[found.end() :].decode()
    info, end = json.JSONDecoder().raw_decode(after)
    edit(info)
    return (before + json.dumps(info) + after[end:]).encode()

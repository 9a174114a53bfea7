"""The order in which a writer puts the keys of an event, learned from one event and checked on all others.

Within an event of a known layout every key has a known token: so many after the event's first, or so many after the
inner object's last. That each key really stands there, and that no token is left over, is checked for every event; so
there can be no second `ts`, and none that belongs to an inner object.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from traceana.sources.kineto_index import Index, Literal
from traceana.sources.kineto_words import Positions

__all__ = ["NEEDED", "Layout", "learn", "standard_layouts"]

NEEDED = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
_STRINGS = {"ph", "cat", "name"}


@dataclass(frozen=True, slots=True)
class _Key:
    name: str
    literal: Literal
    offset: int  # in tokens, from the event's first, or from the first after the inner object
    behind: bool  # the latter


@dataclass(frozen=True, slots=True)
class Layout:
    """Keys in order; `before` and `behind` are the numbers of tokens around the inner object, which `args` holds (all
    tokens are `before` where there is none)."""

    keys: tuple[_Key, ...]
    before: int
    behind: int
    args: _Key | None

    @classmethod
    def of(cls, keys: Sequence[tuple[str, int]]) -> Layout:
        """From keys and the number of tokens of their values (0 a number, 1 a string, -1 the inner object)."""
        made: list[_Key] = []
        at, behind, before, args = 0, False, 0, None
        for name, tokens in keys:
            key = _Key(name, Literal.of(f"{json.dumps(name, ensure_ascii=False)}:"), at, behind)
            made.append(key)
            at += 1 + max(tokens, 0)
            if tokens < 0:
                args, before, at, behind = key, at, 0, True
        return cls(tuple(made), before if behind else at, at if behind else 0, args)

    def match(self, index: Index, events: Positions) -> Positions:
        """Those of `events` that have this layout."""
        first = index.first[events]
        if self.args is None:
            fits = (index.last[events] - first == self.before) & ~(index.holds | index.nested)[events]
        else:
            fits = (index.inner_first[events] - first == self.before) & index.holds[events]
            fits &= index.last[events] - index.inner_last[events] == self.behind
        if not fits.all():
            events = events[fits]
        if not events.size:
            return events
        good = np.ones(events.size, dtype=np.bool_)
        for key in self.keys:
            good &= key.literal.at(index.words, index.opens[self._tokens(index, events, key)])
        if self.args is not None:
            good &= index.values(self._tokens(index, events, self.args)) == index.inner[events]
        return events if good.all() else events[good]

    def places(self, index: Index, events: Positions) -> dict[str, Positions]:
        """The tokens of the keys that tables need, for events of this layout."""
        return {key.name: self._tokens(index, events, key) for key in self.keys if key.name in NEEDED}

    def _tokens(self, index: Index, events: Positions, key: _Key) -> Positions:
        return (index.inner_last if key.behind else index.first)[events] + key.offset


def standard_layouts() -> tuple[Layout, ...]:
    """Kineto's own, with and without args."""
    keys = [(name, int(name in _STRINGS)) for name in NEEDED]
    return Layout.of([*keys, ("args", -1)]), Layout.of(keys)


class _Pairs(list[tuple[str, Any]]):
    """An object as decoded: its pairs, in order."""


_DECODER = json.JSONDecoder(object_pairs_hook=_Pairs, strict=False)


def learn(event: bytes) -> Layout | None:
    """The layout of `event`, or None where it is not one that others could share."""
    try:
        pairs = _DECODER.decode(event.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(pairs, _Pairs):
        return None
    names = [name for name, _ in pairs]
    objects = [name for name, value in pairs if isinstance(value, _Pairs)]
    if len(set(names)) != len(names) or objects not in ([], ["args"]) or not set(NEEDED) <= set(names):
        return None
    if any(isinstance(value, list) and not isinstance(value, _Pairs) for _, value in pairs):
        return None
    return Layout.of([(n, -1 if isinstance(v, _Pairs) else int(isinstance(v, str))) for n, v in pairs])

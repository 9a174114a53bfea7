"""What the events of a stretch hold, by shape: the keys of an event, in order.

A trace has few shapes. Each is learned from one event; that all others have the same keys is then proven by comparing
columns, and where a value stands that a table needs is known for all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from traceana.sources.kineto_events import INTS
from traceana.sources.kineto_words import Positions, Words

__all__ = ["HEAD", "INT_COLUMNS", "Shape", "shapes"]

HEAD = ("ph", "cat", "name", "pid", "tid", "ts", "dur")
"""The first keys of an event in Kineto's own layout; `args` comes next, where there is any."""

INT_COLUMNS = ("pid", "tid", *INTS.values())
_COLUMN = {key: len(INT_COLUMNS) - len(INTS) + place for place, key in enumerate(INTS)}
_HEAD = tuple(f'"{key}"'.encode() for key in HEAD)
_WANTED = {f'"{key}"'.encode(): key for key in (*INTS, "finished", "Collective name")}
_MOST = 64  # shapes that a stretch may have
_KEYS = 256  # keys of an event
_LONGEST = 64  # bytes of a key; more are of none that tables need
_WORD = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """The keys of an event. `tails` and `masks`: what the eight bytes that its closing quote ends hold of each, which is
    all of it, but for long ones. `plain` is whether tables can be filled from such events column by column: the head is
    Kineto's, and no key that they need stands twice. `message` is whether it is one that carries a message, of which more
    is kept.

    `wanted` are (place in INT_COLUMNS, place in the event) of the integers that tables need. `long` are the keys that
    they need of more than eight bytes, and at most sixteen: the place, how far before the closing quote the key starts,
    and its first eight bytes. `finished` is the place of that argument (-1 without), `args` whether there are arguments.
    """

    tails: Words
    masks: Words
    plain: bool
    message: bool
    wanted: tuple[tuple[int, int], ...]
    long: tuple[tuple[int, int, np.uint64], ...]
    finished: int
    args: bool

    @classmethod
    def of(cls, keys: tuple[bytes, ...]) -> Shape:
        """From the keys, quotes and all."""
        inner = keys[len(_HEAD) + 1 :]
        places = {_WANTED[key]: place for place, key in enumerate(keys) if key in _WANTED}
        plain = keys[: len(_HEAD)] == _HEAD and keys[len(_HEAD) : len(_HEAD) + 1] in ((), (b'"args"',))
        plain &= len(places) == sum(key in _WANTED for key in keys)
        # Only the end of a long key is compared: one that ends as a needed one does could stand for it.
        ends = {key[-_WORD:] for key in _WANTED}
        plain &= not any(key[-_WORD:] in ends and key not in _WANTED for key in inner)
        return cls(
            tails=np.array(
                [int.from_bytes(key[-_WORD:].rjust(_WORD, b"\0"), "little") for key in keys], dtype=np.uint64
            ),
            masks=np.array([(1 << 64) - (1 << 8 * max(_WORD - len(key), 0)) for key in keys], dtype=np.uint64),
            plain=plain,
            message="Collective name" in places,
            wanted=((0, 3), (1, 4), *((_COLUMN[key], place) for key, place in places.items() if key in INTS)),
            long=tuple(
                (place, len(keys[place]) - 1, np.uint64(int.from_bytes(keys[place][:_WORD], "little")))
                for place in places.values()
                if len(keys[place]) > _WORD
            ),
            finished=places.get("finished", -1),
            args=len(keys) > len(_HEAD),
        )

    def match(self, words: Words, key: Positions, first: Positions) -> Positions:
        """Which of the events whose first keys are `first` have this shape: places in `first`. `key` are the closing
        quotes of all keys; the events must have as many as this shape."""
        count = self.tails.size
        at = key[(first + np.arange(count)[:, None]).ravel()]
        at -= _WORD - 1
        found = words[at].reshape(count, first.size)
        found ^= self.tails[:, None]
        found &= self.masks[:, None]
        alike = np.flatnonzero(np.bitwise_or.reduce(found, axis=0) == 0)
        for place, back, head in self.long:
            alike = alike[words[key[first[alike] + place] - back] == head]
        return alike


def shapes(
    buffer: bytes, words: Words, key: Positions, first: Positions, count: Positions
) -> Iterator[tuple[Shape, Positions]]:
    """The shapes of the events whose first keys are `first` and whose numbers of keys are `count`, with the places in
    `first` of those that have it. Events of no shape given have one that is too rare."""
    left = np.flatnonzero(count <= _KEYS)
    for _ in range(_MOST):
        if not left.size:
            return
        one = int(left[0])
        alike = left[count[left] == count[one]]
        quotes = key[first[one] : first[one] + count[one]].tolist()
        shape = _shape(tuple(_key(buffer, quote) for quote in quotes))
        found = alike[shape.match(words, key, first[alike])]
        yield shape, found
        taken = np.zeros(first.size, dtype=np.bool_)
        taken[found] = True
        left = left[~taken[left]]


def _key(buffer: bytes, quote: int) -> bytes:
    """The key that is closed by `quote`, quotes and all, or the end of it, where it is long."""
    least = max(quote - _LONGEST, 0)
    return buffer[max(buffer.rfind(b'"', least, quote), least) : quote + 1]


_shape = lru_cache(maxsize=256)(Shape.of)

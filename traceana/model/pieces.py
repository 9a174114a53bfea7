"""Stretches of bubbles in arrays: cut, joined, put in order, compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from traceana.arrays import narrow
from traceana.intervals import IntArray, Intervals, intersect_pairs
from traceana.model.chain import CAUSES, CODE

__all__ = ["Pieces", "Stretches", "disagreement", "in_order", "joined", "mark_ambiguous", "tally", "uncovered"]

_WHOLE = ("lo", "hi", "crossed")
S = TypeVar("S", bound="Stretches")


@dataclass(frozen=True, slots=True)
class Stretches:
    """Stretches of bubbles on the waiter's own clock, in arrays: as much of them as clocks are compared by."""

    rank: IntArray
    lo: IntArray
    hi: IntArray
    cause: IntArray
    root: IntArray
    gap: IntArray

    def take(self: S, rows: IntArray | np.ndarray, **changed: IntArray) -> S:
        """The given rows, with some columns changed (others than its own do not matter)."""
        columns: dict[str, Any] = {
            f.name: changed[f.name] if f.name in changed else getattr(self, f.name)[rows] for f in fields(self)
        }
        return type(self)(**columns)

    def kept(self: S) -> S:
        """The same in less memory."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{name: c if name in _WHOLE else narrow(c) for name, c in columns.items()})

    def runs(self: S, most: int) -> Iterator[S]:
        """All rows, at least once, `most` at a time."""
        for first in range(0, max(self.lo.size, 1), most):
            rows = slice(first, first + most)
            yield type(self)(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def bare(self, rows: IntArray) -> Stretches:
        """The given rows without what tells more of them."""
        return Stretches(**{f.name: getattr(self, f.name)[rows] for f in fields(Stretches)})


@dataclass(frozen=True, slots=True)
class Pieces(Stretches):
    """Stretches with what details are told from: the link and element of the chain, and the phase of a host."""

    crossed: np.ndarray
    link: IntArray
    element: IntArray
    ref: IntArray
    reason: IntArray
    phase: IntArray


def joined(parts: Sequence[S]) -> S:
    """All of `parts`, of which there is at least one."""
    if len(parts) == 1:
        return parts[0]
    kind = type(parts[0])
    return kind(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(kind)})


def in_order(parts: Sequence[S]) -> S:
    """All of `parts`, of which there is at least one, by rank and time."""
    every = joined(parts)
    order = np.lexsort((every.lo, every.rank))
    return every.take(order)


def uncovered(a: Intervals, b: Intervals) -> tuple[IntArray, Intervals]:
    """What of each interval of `a` the set `b` does not cover: index into `a`, and the rest."""
    lo, hi = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    outside = Intervals(np.concatenate(([lo], b.end)), np.concatenate((b.start, [hi])))
    index, _, over = intersect_pairs(a, outside)
    return index, over


def disagreement(base: Stretches, other: Stretches) -> Intervals:
    """The nanoseconds whose cause or root differs between two tilings of the same bubbles of one rank."""
    a, b, over = intersect_pairs(Intervals(base.lo, base.hi), Intervals(other.lo, other.hi))
    differs = (base.cause[a] != other.cause[b]) | (base.root[a] != other.root[b])
    return Intervals(over.start[differs], over.end[differs])


def tally(pieces: Stretches) -> IntArray:
    """Nanoseconds of each cause."""
    out = np.zeros(len(CAUSES), dtype=np.int64)
    np.add.at(out, pieces.cause, pieces.hi - pieces.lo)
    return out


def mark_ambiguous(base: Pieces, marked: Intervals) -> Pieces:
    """The pieces of one rank, those stretches of them that are in the set `marked` as ambiguous."""
    mine = Intervals(base.lo, base.hi)
    keep, left = uncovered(mine, marked)
    rows, _, over = intersect_pairs(mine, marked)
    m = rows.size
    return in_order(
        [
            base.take(keep, lo=left.start, hi=left.end),
            base.take(
                rows, lo=over.start, hi=over.end, cause=np.full(m, CODE["ambiguous"]), root=np.full(m, -1),
                element=np.where(base.cause[rows] == CODE["ambiguous"], base.element[rows], -3),
            ),
        ]
    )  # fmt: skip

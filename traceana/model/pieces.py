"""Stretches of bubbles in arrays: cut, joined, put in order, compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from traceana.arrays import narrow
from traceana.intervals import IntArray, Intervals, intersect_pairs, union
from traceana.model.chain import CAUSES, CODE

__all__ = ["Pieces", "disagreement", "in_order", "joined", "mark_ambiguous", "tally", "uncovered"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Stretches of bubbles on the waiter's own clock, in arrays; `detail` and `visit` of host phases come along."""

    rank: IntArray
    lo: IntArray
    hi: IntArray
    cause: IntArray
    root: IntArray
    crossed: np.ndarray
    gap: IntArray
    link: IntArray
    element: IntArray
    ref: IntArray
    reason: IntArray
    phase: IntArray

    def take(self, rows: IntArray | np.ndarray, **changed: IntArray) -> Pieces:
        """The given rows, with some columns changed."""
        columns: dict[str, Any] = {f: changed.get(f, getattr(self, f)[rows]) for f in self.__slots__}
        return Pieces(**columns)

    def kept(self) -> Pieces:
        """The same in less memory."""
        whole = ("lo", "hi", "crossed")
        return Pieces(*(getattr(self, f) if f in whole else narrow(getattr(self, f)) for f in self.__slots__))


def joined(parts: Sequence[Pieces]) -> Pieces:
    if len(parts) == 1:
        return parts[0]
    return Pieces(*(np.concatenate([getattr(p, f) for p in parts]) for f in Pieces.__slots__))


def in_order(parts: Sequence[Pieces]) -> Pieces:
    """All pieces by rank and time."""
    order = np.lexsort([np.concatenate([getattr(p, f) for p in parts]) for f in ("lo", "rank")])
    return Pieces(*(np.concatenate([getattr(p, f) for p in parts])[order] for f in Pieces.__slots__))


def uncovered(a: Intervals, b: Intervals) -> tuple[IntArray, Intervals]:
    """What of each interval of `a` the set `b` does not cover: index into `a`, and the rest."""
    lo, hi = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    outside = Intervals(np.concatenate(([lo], b.end)), np.concatenate((b.start, [hi])))
    index, _, over = intersect_pairs(a, outside)
    return index, over


def disagreement(base: Pieces, other: Pieces) -> Intervals:
    """The nanoseconds whose cause or root differs between two tilings of the same bubbles of one rank."""
    a, b, over = intersect_pairs(Intervals(base.lo, base.hi), Intervals(other.lo, other.hi))
    differs = (base.cause[a] != other.cause[b]) | (base.root[a] != other.root[b])
    return Intervals(over.start[differs], over.end[differs])


def tally(pieces: Pieces) -> IntArray:
    """Nanoseconds of each cause."""
    out = np.zeros(len(CAUSES), dtype=np.int64)
    np.add.at(out, pieces.cause, pieces.hi - pieces.lo)
    return out


def mark_ambiguous(base: Pieces, doubt: Sequence[Intervals]) -> Pieces:
    """The pieces of one rank, those stretches of them that are in doubt as ambiguous."""
    marked = union(np.concatenate([s.start for s in doubt]), np.concatenate([s.end for s in doubt]))
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

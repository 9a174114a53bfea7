"""Bounds hold when their message was sent; this moves them to one instant, for clocks that drift.

Two clocks of different ranks run at rates that differ by at most 60 ppm (30 ppm each: Huygens, NSDI'18, saw 5 to 10 and
at most 30 us per second). A bound at t is therefore one at tau too, looser by 60 ppm of the time between: true for any
clock that keeps to this, bent ones included. Over a second and more the clocks are taken for straight lines: the
intervals at both ends of the window bound the rates, and narrower rates make all bounds sharper, until nothing moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from traceana.clock.bounds import RATE, Facts
from traceana.clock.graph import (
    UNREACHED,
    BoolArray,
    Edges,
    Pattern,
    close,
    distances,
    make_pattern,
    matrix,
    rough,
    sane,
    tightest,
)
from traceana.intervals import IntArray

__all__ = [
    "PPB", "RATE_BOX", "Bounds", "Constraints", "bounds_at", "edges_along", "edges_at", "excess", "line_bounds",
    "line_rates", "make_constraints", "traffic",
]  # fmt: skip

PPB = 1_000_000_000
# The box of a rate difference, in parts per billion.
RATE_BOX = RATE[0] * (PPB // RATE[1])
_ROUNDS = 8
# Keeps products inside int64; almost three hours.
_FAR_NS = 10**13


@dataclass(frozen=True, slots=True)
class Constraints:
    """Facts ready for the graph, as columns: theta[b] - theta[a] <= upper at `at`, where theta is counted from `crude`
    and `at` is time on the root's clock (known to `slop`). `always` marks those that hold at any time. `fact` is the
    row in the table they were made from; `first` and `last` are the instants of the traffic's ends."""

    nodes: int
    root: int
    a: IntArray
    b: IntArray
    upper: IntArray
    at: IntArray
    slop: IntArray
    always: BoolArray
    fact: IntArray
    crude: IntArray
    pattern: Pattern
    first: int
    last: int

    def only(self, keep: BoolArray) -> Constraints:
        """The rows that are kept."""
        return replace(
            self, a=self.a[keep], b=self.b[keep], upper=self.upper[keep], at=self.at[keep], slop=self.slop[keep],
            always=self.always[keep], fact=self.fact[keep],
        )  # fmt: skip


def traffic(facts: Facts) -> pl.DataFrame:
    """When the messages between ranks begin and end, on each clock's own time: a, first, last; of everything where no
    ranks talk."""
    ends = [pl.col("at_ns").min().alias("first"), pl.col("at_ns").max().alias("last")]
    every = facts.group_by("a", "b").agg(ends).drop_nulls()
    between = every.filter((pl.col("a") // 2 != pl.col("b") // 2) | (pl.col("a") < 0))
    return between if between.height else every


def make_constraints(facts: Facts, index: dict[int, int], root: int, when: pl.DataFrame) -> Constraints:
    """`facts` between the clocks of `index` (clock -> node), with crude offsets from clock `root` taken out. `when`:
    the `traffic` they were pruned from."""
    ids = np.array(list(index), dtype=np.int64)
    order = np.argsort(ids)
    places = np.array(list(index.values()), dtype=np.int64)[order]
    sides = [facts.get_column(c).cast(pl.Int64).to_numpy() for c in ("a", "b")]
    a, b = (places[np.searchsorted(ids[order], side)] for side in sides)
    upper = facts.get_column("upper_ns").to_numpy()
    row = np.arange(upper.size, dtype=np.int64)
    crude, slop = rough(tightest(len(index), a, b, upper, row), index[root])
    began = when.get_column("a").cast(pl.Int64).to_numpy()
    away = crude[places[np.searchsorted(ids[order], began)]]
    first = int((when.get_column("first").to_numpy() - away).min()) if away.size else 0
    last = int((when.get_column("last").to_numpy() - away).max()) if away.size else 0
    always = facts.get_column("at_ns").is_null().to_numpy()
    at = facts.get_column("at_ns").fill_null(0).to_numpy() - crude[a]
    return Constraints(
        len(index), index[root], a, b, upper - (crude[b] - crude[a]), at, slop[a], always, row, crude,
        make_pattern(len(index), a, b), first, last,
    )  # fmt: skip


def moved(c: Constraints, tau: int, rates: IntArray | None = None) -> IntArray:
    """The bounds as they hold at `tau`. `rates[a, b]`: how much faster than a clock b can run, in ppb."""
    forward = np.int64(RATE_BOX) if rates is None else rates[c.a, c.b]
    backward = np.int64(RATE_BOX) if rates is None else rates[c.b, c.a]

    def more(at: IntArray) -> IntArray:
        ahead = np.clip(tau - at, -_FAR_NS, _FAR_NS)
        return -(-np.where(ahead >= 0, forward * ahead, backward * -ahead) // PPB)

    # Convex in the time of the message, so its two extremes bound it.
    loosest = np.maximum(more(c.at - c.slop), more(c.at + c.slop))
    return c.upper + np.where(c.always, 0, loosest)


def edges_at(c: Constraints, tau: int, rates: IntArray | None = None) -> Edges:
    """The tightest bound of every pair of clocks at `tau`."""
    return sane(tightest(c.nodes, c.a, c.b, moved(c, tau, rates), c.fact))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the constraints allow at one instant: `w` closed over `pattern` (see `traceana.clock.graph`)."""

    pattern: Pattern
    w: IntArray

    def around(self, roots: IntArray) -> tuple[IntArray, IntArray]:
        """For every node i, upper bounds on theta[i] - theta[roots[i]] and on the negative of it; UNREACHED: none."""
        sources, which = np.unique(roots, return_inverse=True)
        start = np.full((sources.size, roots.size), UNREACHED, dtype=np.int64)
        start[np.arange(sources.size), sources] = 0
        nodes = np.arange(roots.size)
        up = distances(self.pattern, self.w, start)[which, nodes]
        return up, distances(self.pattern, self.w.T, start)[which, nodes]

    def between(self, nodes: IntArray) -> IntArray:
        """d[i, j]: upper bound on theta[nodes[j]] - theta[nodes[i]]."""
        start = np.full((nodes.size, self.w.shape[0]), UNREACHED, dtype=np.int64)
        start[np.arange(nodes.size), nodes] = 0
        return distances(self.pattern, self.w, start)[:, nodes]


def bounds_at(c: Constraints, tau: int, rates: IntArray | None = None) -> Bounds | None:
    """What the constraints allow at `tau`, or None where they contradict each other."""
    w = matrix(edges_at(c, tau, rates))
    return Bounds(c.pattern, w) if close(c.pattern, w) else None


def line_rates(c: Constraints, lo: int, hi: int) -> IntArray | None:
    """`rates[a, b]` (neighbours of the pattern) of clocks that are straight lines from `lo` to `hi`; None: none fit."""
    span = hi - lo
    room = RATE_BOX * span // PPB + 1
    rates = np.full((c.nodes, c.nodes), RATE_BOX, dtype=np.int64)
    np.fill_diagonal(rates, 0)
    a, b = c.pattern.a, c.pattern.b
    for _ in range(_ROUNDS):
        first, last = bounds_at(c, lo, rates), bounds_at(c, hi, rates)
        if first is None or last is None:
            return None
        # b's gain on a over the window is at most its highest offset at the end less its lowest at the start.
        end, start = last.w[a, b], first.w[b, a]
        gain = np.where((end < UNREACHED) & (start < UNREACHED), end + start, room)
        before = rates[a, b]
        rates[a, b] = np.minimum(before, -(-np.clip(gain, -2 * room, room) * PPB // span))
        if not close(c.pattern, rates):
            return None
        if np.array_equal(rates[a, b], before):
            break
    return rates


def line_bounds(c: Constraints, tau: int, lo: int, hi: int, rates: IntArray | None) -> Bounds | None:
    """As `bounds_at`; for lines (`rates`), also with what both ends of the window say about the instants between."""
    here = bounds_at(c, tau, rates)
    if here is None or rates is None or not lo < tau < hi:
        return here
    first, last = bounds_at(c, lo, rates), bounds_at(c, hi, rates)
    if first is None or last is None:
        return None
    a, b = c.pattern.a, c.pattern.b
    one, two = first.w[a, b], last.w[a, b]
    known = (one < UNREACHED) & (two < UNREACHED)
    # Exact interpolation needs more than 64 bits.
    ends = zip(one[known].tolist(), two[known].tolist(), strict=True)
    between = [-(-(f * (hi - tau) + e * (tau - lo)) // (hi - lo)) for f, e in ends]
    a, b = a[known], b[known]
    here.w[a, b] = np.minimum(here.w[a, b], np.array(between, dtype=np.int64))
    return here if close(c.pattern, here.w) else None


def edges_along(c: Constraints, slope: IntArray, mid: int, ends: tuple[int, int]) -> Edges:
    """The tightest bound of every pair of clocks at `mid`, if clock i gains `slope[i]` ppb and nothing else."""
    rate = slope[c.b] - slope[c.a]
    gain = rate * (c.at - mid) // PPB
    if c.always.any():
        gain = np.where(c.always, np.maximum(rate * (ends[0] - mid) // PPB, rate * (ends[1] - mid) // PPB), gain)
    return sane(tightest(c.nodes, c.a, c.b, c.upper - gain, c.fact))


def excess(c: Constraints, theta: IntArray, slope: IntArray, mid: int, ends: tuple[int, int]) -> int:
    """By how much the worst bound is broken if every clock is the line theta + slope (ppb) x (t - mid); <= 0: none."""
    e = edges_along(c, slope, mid, ends)
    return int((theta[e.b] - theta[e.a] - e.w).max(initial=-UNREACHED))

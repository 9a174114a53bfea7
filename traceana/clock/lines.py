"""From the feasible intervals to one clock per rank: an offset, a line, or a bent line where no line fits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traceana.clock.drift import PPB, RATE_BOX, Bounds, Constraints, bounds_at, excess, line_bounds, line_rates
from traceana.clock.graph import UNREACHED, BoolArray, distances, potentials
from traceana.errors import ClockError
from traceana.intervals import IntArray

__all__ = ["Fit", "Ties", "Window", "feasible", "fit"]

# Below this the clocks are not taken for lines: only their rates are limited.
LINE_FROM_NS = 1_000_000_000
# Lines cost two dozen passes over a matrix of all clocks; captures with more of them keep to limited rates.
_LINE_NODES = 600
_MAX_KNOTS = 64


@dataclass(frozen=True, slots=True)
class Window:
    """First, middle and last instant on the root's clock; `rates` where the clocks are taken for lines in it."""

    lo: int
    mid: int
    hi: int
    rates: IntArray | None = None


@dataclass(frozen=True, slots=True)
class Ties:
    """`roots[i]`: the node whose clock node i is told against, the same for all nodes that are related both ways.
    `leaders[i]`: the node that i should agree with if it may; itself where there is no such wish. `gpus`: GPU clocks."""

    roots: IntArray
    leaders: IntArray
    gpus: BoolArray


@dataclass(frozen=True, slots=True)
class Fit:
    """One clock per node: `theta` at the middle (counted from crude) and `slope` in ppb, or where it is bent, values
    `bent` at the instants `knots`. `worst` is how far the worst bound stays broken (0: none is)."""

    window: Window
    theta: IntArray
    slope: IntArray
    knots: tuple[int, ...] = ()
    bent: tuple[IntArray, ...] = ()
    worst: int = 0

    def at(self, tau: int) -> IntArray:
        """theta of every node at `tau`."""
        if not self.knots:
            return self.theta + self.slope * (tau - self.window.mid) // PPB
        k = min(max(int(np.searchsorted(self.knots, tau, side="right")) - 1, 0), len(self.knots) - 2)
        rise, run = self.bent[k + 1] - self.bent[k], self.knots[k + 1] - self.knots[k]
        return self.bent[k] + rise * (tau - self.knots[k]) // run


def feasible(c: Constraints, w: Window, tau: int) -> Bounds:
    """What the constraints allow at `tau`. Raises ClockError where they contradict each other (reconcile them first)."""
    found = line_bounds(c, tau, w.lo, w.hi, w.rates)
    if found is None:
        raise ClockError("the bounds of the clocks contradict each other", hint="report this as a bug")
    return found


def _clamp(bounds: Bounds, wish: IntArray, fixed: BoolArray) -> IntArray:
    """`wish` with every node that is not fixed moved to where the fixed ones allow it to be."""
    above = distances(bounds.pattern, bounds.w, np.where(fixed, wish, UNREACHED)[None, :])[0]
    below = -distances(bounds.pattern, bounds.w.T, np.where(fixed, -wish, UNREACHED)[None, :])[0]
    return np.where(fixed, wish, np.maximum(np.minimum(wish, above), below))


def _middles(bounds: Bounds, roots: IntArray, crude: IntArray) -> IntArray:
    """Midpoints of the intervals against the roots, which are taken to show true time; 0 (no offset at all) where an
    interval is open. The midpoints of all nodes of a root together solve all constraints, rounded down too."""
    up, down = bounds.around(roots)
    both = (up < UNREACHED) & (down < UNREACHED)
    half = (np.where(both, up, 0) - np.where(both, down, 0)) // 2
    return np.where(both, half - crude[roots], -crude)


def fit(c: Constraints, times: tuple[int, int, int], ties: Ties) -> tuple[Fit, Bounds]:
    """Choose the clocks, and what is allowed at mid-window.

    Without wishes the GPU clocks take the midpoints of their intervals exactly, and the CPU clocks agree with them as
    far as they may. With a same-host prior all clocks of a host agree as far as they may.
    """
    lo, mid, hi = times
    straight = hi - lo >= LINE_FROM_NS and c.nodes <= _LINE_NODES
    window = Window(lo, mid, hi, line_rates(c, lo, hi) if straight else None)
    bounds = feasible(c, window, mid)
    middle = _middles(bounds, ties.roots, c.crude)
    wish = (middle + c.crude)[ties.leaders] - c.crude
    # The reference's own component first: what only one-way bounds tie to it must not pull at it.
    main = ties.roots == ties.roots[c.root]
    if bool((ties.leaders == np.arange(c.nodes))[ties.gpus].all()):
        wish = _clamp(bounds, wish, main & ties.gpus)
    wish = np.where(main, potentials(bounds.pattern, bounds.w, wish, main), wish)
    theta = potentials(bounds.pattern, bounds.w, _clamp(bounds, wish, main))
    theta -= theta[c.root]
    best: Fit | None = None
    for slope in _slopes(c, window, ties):
        trial = Fit(window, theta, slope, worst=max(excess(c, theta, slope, mid, (lo, hi)), 0))
        if best is None or trial.worst < best.worst:
            best = trial
        if trial.worst == 0:
            break
    assert best is not None
    if best.worst and hi > lo:
        best = _bend(c, best)
    return best, bounds


def _slopes(c: Constraints, w: Window, ties: Ties) -> list[IntArray]:
    """Rates of the clocks in the order in which they are tried: no drift unless the messages refute that, then the
    middle of the feasible rates, then lines through the midpoints of the intervals at both ends."""
    out = [np.zeros(c.nodes, dtype=np.int64)]
    if w.rates is not None:
        rates = Bounds(c.pattern, np.where(w.rates >= RATE_BOX, UNREACHED, w.rates))
        up, down = rates.around(ties.roots)
        up, down = np.minimum(up, RATE_BOX), np.minimum(down, RATE_BOX)
        out.append((up - down) // 2)
    if w.hi > w.lo:
        first, last = (_middles(feasible(c, w, t), ties.roots, c.crude) for t in (w.lo, w.hi))
        most = RATE_BOX * (w.hi - w.lo) // PPB
        out.append(np.clip(last - first, -most, most) * PPB // (w.hi - w.lo))
    return out


def _bend(c: Constraints, straight: Fit) -> Fit:
    """Knots, as few (doubling their number) as make all bounds hold; each clock stays on its line where it may."""
    w, best = straight.window, straight
    pieces = 2
    while pieces <= _MAX_KNOTS and best.worst > 0:
        knots = tuple(w.lo + (w.hi - w.lo) * k // pieces for k in range(pieces + 1))
        bent: list[IntArray] = []
        for t in knots:
            here = feasible(c, w, t)
            at = potentials(here.pattern, here.w, straight.at(t))
            bent.append(at - at[c.root])
        worst = _excess_bent(c, w, knots, bent)
        if worst < best.worst:
            best = Fit(w, straight.theta, straight.slope, knots, tuple(bent), worst)
        pieces *= 2
    return best


def _excess_bent(c: Constraints, w: Window, knots: tuple[int, ...], bent: list[IntArray]) -> int:
    worst = 0
    piece = np.clip(np.searchsorted(np.array(knots), c.at, side="right") - 1, 0, len(knots) - 2)
    for k in range(len(knots) - 1):
        part = c.only((piece == k) | c.always)
        rise = (bent[k + 1] - bent[k]) * PPB // (knots[k + 1] - knots[k])
        worst = max(worst, excess(part, bent[k], rise, knots[k], (knots[k], knots[k + 1])))
    return worst

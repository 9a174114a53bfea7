"""From the feasible intervals to one clock per rank: an offset, a line, or a bent line where no line fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from traceana.clock.drift import PPB, RATE_BOX, Bounds, Constraints, edges_along, excess, line_bounds, line_rates
from traceana.clock.graph import (
    UNREACHED,
    BoolArray,
    Edges,
    close,
    distances,
    make_pattern,
    matrix,
    negative_cycles,
    potentials,
)
from traceana.errors import ClockError
from traceana.intervals import IntArray

__all__ = ["Fit", "Ties", "Window", "feasible", "fit"]

# Below this the clocks are not taken for lines: only their rates are limited.
LINE_FROM_NS = 1_000_000_000
_MAX_KNOTS = 16
_SEARCH = 400
_OTHER_RUNS = "the traces may come from different runs; check that all files belong to one capture"


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
    `leaders[i]`: the node that i should agree with if it may; itself where there is no such wish. `rates[i]`: the node
    that runs at the same rate: the GPU of a rank for its CPU, as one line converts both. `gpus`: which are GPU clocks."""

    roots: IntArray
    leaders: IntArray
    rates: IntArray
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


def feasible(c: Constraints, w: Window, tau: int) -> Bounds | None:
    """What the constraints allow at `tau`: of lines, or where there are none of clocks whose rates are limited; None
    where they contradict each other even so (never at the instants that `reconcile` has looked at)."""
    found = line_bounds(c, tau, w.lo, w.hi, w.rates)
    return found if found is not None or w.rates is None else line_bounds(c, tau, w.lo, w.hi, None)


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
    """Choose the clocks, and what is allowed at mid-window. Raises ClockError where nothing is (reconcile first).

    Without wishes the GPU clocks take the midpoints of their intervals exactly, and the CPU clocks agree with them as
    far as they may. With a same-host prior all clocks of a host agree as far as they may.
    """
    lo, mid, hi = times
    window = Window(lo, mid, hi, line_rates(c, lo, hi) if hi - lo >= LINE_FROM_NS else None)
    bounds = feasible(c, window, mid)
    if bounds is None:
        raise ClockError("the bounds of the clocks contradict each other", hint=_OTHER_RUNS)
    middle = _middles(bounds, ties.roots, c.crude)
    wish = (middle + c.crude)[ties.leaders] - c.crude
    # The reference's own component first: what only one-way bounds tie to it must not pull at it.
    main = ties.roots == ties.roots[c.root]
    if bool((ties.leaders == np.arange(c.nodes))[ties.gpus].all()):
        wish = _clamp(bounds, wish, main & ties.gpus)
    wish = np.where(main, potentials(bounds.pattern, bounds.w, wish, main), wish)
    theta = potentials(bounds.pattern, bounds.w, _clamp(bounds, wish, main))
    theta = _followed(c, bounds, theta, ties)
    theta -= theta[c.root]
    best = _straight(c, Fit(window, theta, np.zeros(c.nodes, dtype=np.int64)), ties)
    if best.worst and hi > lo:
        best = _bend(c, best)
    return best, bounds


def _followed(c: Constraints, bounds: Bounds, theta: IntArray, ties: Ties) -> IntArray:
    """The same GPU clocks, with the CPU of each rank as near to its GPU as may be: one conversion makes both stamps, so
    the CPU goes where messages have moved the GPU."""
    follows = (theta + c.crude)[ties.rates] - c.crude
    return potentials(bounds.pattern, bounds.w, _clamp(bounds, follows, ties.gpus))


def _straight(c: Constraints, flat: Fit, ties: Ties) -> Fit:
    """The first line that keeps all bounds: no drift, through the offsets given or as near to them as need be; then the
    offsets given, with the rates that they allow; then other rates, with offsets near. Else the best of these."""
    w = flat.window
    best = _checked(c, flat)
    if best.worst == 0 or w.hi == w.lo:
        return best
    trials: list[Callable[[], tuple[IntArray | None, IntArray | None]]] = [
        lambda: (_offsets_for(c, flat.theta, flat.slope, w, ties), flat.slope),
        lambda: (flat.theta, _rates_for(c, flat.theta, _middle_rates(c, w, ties), ties.rates, w)),
        lambda: (_offsets_for(c, flat.theta, _middle_rates(c, w, ties), w, ties), _middle_rates(c, w, ties)),
        lambda: _searched(c, flat.theta, _middle_rates(c, w, ties), ties, w),
    ]
    for trial in trials:
        theta, slope = trial()
        if theta is not None and slope is not None:
            found = _checked(c, Fit(w, theta, slope))
            best = found if found.worst < best.worst else best
            if best.worst == 0:
                break
    return best


def _checked(c: Constraints, line: Fit) -> Fit:
    broken = excess(c, line.theta, line.slope, line.window.mid, (line.window.lo, line.window.hi))
    return replace(line, worst=max(broken, 0))


def _offsets_for(c: Constraints, theta: IntArray, slope: IntArray, w: Window, ties: Ties) -> IntArray | None:
    """Offsets near `theta` that keep all bounds at these rates, if there are any."""
    weights = matrix(edges_along(c, slope, w.mid, (w.lo, w.hi)))
    if not close(c.pattern, weights):
        return None
    moved = _followed(c, Bounds(c.pattern, weights), potentials(c.pattern, weights, theta), ties)
    moved -= moved[c.root]
    return moved


def _rates_for(c: Constraints, theta: IntArray, wish: IntArray, same: IntArray, w: Window) -> IntArray | None:
    """Rates near `wish` (ppb) that keep all bounds at these offsets, if there are any: with the offsets fixed, every
    bound limits the difference of two rates, from above if its message is late, from below if it is early."""
    a, b = same[c.a], same[c.b]
    pattern = make_pattern(c.nodes, a, b)
    weights = np.full((c.nodes, c.nodes), UNREACHED, dtype=np.int64)
    weights[pattern.a, pattern.b] = RATE_BOX
    np.fill_diagonal(weights, 0)
    slack = c.upper - (theta[c.b] - theta[c.a])
    if (slack[a == b] < 0).any():
        return None
    for times in (np.where(c.always, w.lo, c.at), np.where(c.always, w.hi, c.at)):
        since = times - w.mid
        away = np.maximum(np.abs(since), 1)
        most = np.where(slack > RATE_BOX * away // PPB, RATE_BOX, np.maximum(slack, -(10**9)) * PPB // away)
        late = since > 0
        ends = np.where(late, a, b), np.where(late, b, a)
        np.minimum.at(weights, ends, np.where(since == 0, RATE_BOX, np.maximum(most, -2 * RATE_BOX)))
    if not close(pattern, weights):
        return None
    rates = potentials(pattern, weights, wish)[same]
    rates -= rates[c.root]
    return rates


def _middle_rates(c: Constraints, w: Window, ties: Ties) -> IntArray:
    """The middle of the feasible rates (0 where the clocks are not taken for lines)."""
    if w.rates is None:
        return np.zeros(c.nodes, dtype=np.int64)
    up, down = Bounds(c.pattern, w.rates).around(ties.roots)
    return ((np.minimum(up, RATE_BOX) - np.minimum(down, RATE_BOX)) // 2)[ties.rates]


def _searched(
    c: Constraints, theta: IntArray, slope: IntArray, ties: Ties, w: Window
) -> tuple[IntArray | None, IntArray | None]:
    """Offsets near `theta` and rates that keep all bounds, found from `slope` by the relaxation method: as long as the
    rates leave cycles of bounds that cannot hold together, move the rates across each cycle's limit. The offsets drop
    out of a cycle, so its limit is one half-space of rates. (None, None) where it does not end."""
    slope = slope.copy()
    for _ in range(_SEARCH):
        edges = edges_along(c, slope, w.mid, (w.lo, w.hi))
        cycles = negative_cycles(edges)
        if not cycles:
            return _offsets_for(c, theta, slope, w, ties), slope
        touched: set[int] = set()
        for cycle in cycles:
            pull: dict[int, int] = {}
            for one, other, since in _since(c, edges, cycle, slope, w):
                a, b = int(ties.rates[one]), int(ties.rates[other])
                pull[b] = pull.get(b, 0) + since
                pull[a] = pull.get(a, 0) - since
            norm = sum(g * g for g in pull.values())
            if norm == 0:
                return None, None
            if touched & pull.keys():
                continue
            touched |= pull.keys()
            # Half as far again as the limit itself: that ends in finitely many steps if there is any room at all.
            over = -int(edges.w[cycle].sum()) * 3 // 2 + 1
            for node, g in pull.items():
                slope[node] -= over * g * PPB // norm
        slope = slope[ties.rates]
    return None, None


def _since(c: Constraints, edges: Edges, cycle: list[int], slope: IntArray, w: Window) -> list[tuple[int, int, int]]:
    """Nodes and time from mid-window of each bound of a cycle; of those that always hold, the end that limits."""
    out: list[tuple[int, int, int]] = []
    for p in cycle:
        a, b, n = int(edges.a[p]), int(edges.b[p]), int(edges.fact[p])
        at = int(c.at[n])
        if c.always[n]:
            at = w.hi if slope[b] >= slope[a] else w.lo
        out.append((a, b, at - w.mid))
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
            if here is None:
                return best
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

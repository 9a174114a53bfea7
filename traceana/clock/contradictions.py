"""What to do when bounds contradict each other: say which, drop as little as possible, bend nothing in silence.

A contradiction is a cycle of bounds whose sum is negative. Something on it is wrong: a message paired with the wrong
partner, a broken stamp, or a belief. All messages of one stream (source, kind and pair of ranks) that the rest of the
capture refutes are dropped together; of the streams that would do, the one with the fewest such messages. The messages
are made to agree with each other first; beliefs come after and give way to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceana.clock.bounds import LOOSE, ONE_TRACE, Facts, describe, gpu, prune
from traceana.clock.drift import Constraints, bounds_at, edges_at, make_constraints, traffic
from traceana.clock.graph import UNREACHED, BoolArray, Edges, close, distances, make_pattern, matrix, negative_cycles
from traceana.clock.prior import CPU_GPU_NS, SAME_HOST_NS, Prior
from traceana.errors import ClockError

__all__ = ["Reconciled", "instants", "looks", "reconcile"]

_BELIEFS = ("same_host", "prior")
_MAX_DROPS = 200
_LISTED = 20
_ALL_PAIRS = 64
_EIGHTHS = 8


@dataclass(frozen=True, slots=True)
class Reconciled:
    """Facts without contradiction (pruned), the same as constraints, and what was dropped for it."""

    facts: Facts
    constraints: Constraints
    violations: list[dict[str, object]]


@dataclass(frozen=True, slots=True)
class _Option:
    """One way out: drop `rows` (`count` of the `total` of a stream). `enough`: what is left is free of contradiction at
    this instant. `belief`: no messages, so nothing is lost with it; `loose`: one that must be far off to be wrong."""

    belief: bool
    loose: bool
    enough: bool
    count: int
    total: int
    rows: pl.Expr


def instants(c: Constraints, mid: int | None) -> tuple[int, int, int]:
    """First, middle and last instant, on the root's clock."""
    middle = (c.first + c.last) // 2 if mid is None else mid
    return min(c.first, middle), middle, max(c.last, middle)


def looks(times: tuple[int, int, int], ranks: int) -> list[int]:
    """The instants at which the clocks have to be possible and their uncertainty is looked up: the middle, both ends, and
    of few ranks some between, since a contradiction shows only near its messages."""
    lo, mid, hi = times
    between = [lo + (hi - lo) * k // _EIGHTHS for k in range(_EIGHTHS + 1)] if ranks <= _ALL_PAIRS else [lo, hi]
    return list(dict.fromkeys([lo, mid, hi, *between]))


def _stream(facts: Facts, row: int) -> pl.Expr:
    """The stream of a fact: its belief as a whole, else its messages from one clock to another."""
    a, b, source, kind = facts.select("a", "b", "source", "kind").row(row)
    same: pl.Expr = (pl.col("source") == source) & (pl.col("kind") == kind)
    ends: pl.Expr = (pl.col("a") == a) & (pl.col("b") == b)
    return same if source in _BELIEFS else same & ends


def _refuted(every: Facts, stream: pl.Expr, c: Constraints, at: tuple[int, int, int], room: int) -> tuple[pl.Expr, int]:
    """Rows of a stream whose bound at instant `at` is below `room`, and their number. `at` = tau, node a, node b."""
    tau, a, b = at
    crude = int(c.crude[b] - c.crude[a])
    since = (pl.lit(tau) - (pl.col("at_ns") - int(c.crude[a]))).abs()
    loose = (since * 60 // 1_000_000).fill_null(0)
    bad = stream & (pl.col("upper_ns") - crude + loose < room)
    return bad, int(every.select(bad.sum()).item())


def _distance(edges: Edges, source: int, target: int) -> int:
    pattern, w = make_pattern(edges.nodes, edges.a, edges.b), matrix(edges)
    close(pattern, w)
    start = np.full((1, edges.nodes), UNREACHED, dtype=np.int64)
    start[0, source] = 0
    return int(distances(pattern, w, start)[0, target])


def _options(
    every: Facts, pruned: Facts, c: Constraints, edges: Edges, cycle: Sequence[int], tau: int
) -> list[_Option]:
    total = int(edges.w[list(cycle)].sum())
    out: list[_Option] = []
    seen: set[tuple[object, ...]] = set()
    for position in cycle:
        row = int(edges.fact[position])
        a, b = int(edges.a[position]), int(edges.b[position])
        source, kind = pruned.select("source", "kind").row(row)
        key = (source, kind) if source in _BELIEFS else (source, kind, a, b)
        if key in seen:
            continue
        seen.add(key)
        stream = _stream(pruned, row)
        rest = c.only(~pruned.select(stream.alias("s")).get_column("s").to_numpy())
        left = edges_at(rest, tau)
        enough = not negative_cycles(left)
        size = int(every.select(stream.sum()).item())
        if source in _BELIEFS:
            out.append(_Option(True, str(kind).endswith(LOOSE), enough, size, size, stream))
            continue
        # The rest of the capture says theta[b] - theta[a] >= -back: a bound below that is refuted by it.
        back = _distance(left, b, a) if enough else total - int(edges.w[position])
        bad, count = _refuted(every, stream, c, (tau, a, b), -back if back < UNREACHED else -UNREACHED)
        out.append(_Option(False, False, enough, max(count, 1), size, bad))
    return out


def _choose(options: Sequence[_Option]) -> _Option:
    beliefs = [o for o in options if o.belief and not o.loose]
    if beliefs:
        return next((o for o in beliefs if o.enough), beliefs[0])
    enough = [o for o in options if o.enough] or list(options)
    minority = [o for o in enough if not o.belief and 2 * o.count < o.total]
    return min(minority or [o for o in enough if o.loose] or enough, key=lambda o: o.count)


def _record(pruned: Facts, edges: Edges, cycle: Sequence[int], dropped: Facts, total: int) -> dict[str, object]:
    where = [int(edges.fact[p]) for p in cycle]
    bounds = describe(pruned[where]).select("a", "b", "upper_ns", "source", "message").to_dicts()
    words = describe(dropped.sort("at_ns", "ordinal").head(_LISTED)).get_column("message")
    named = words.unique(maintain_order=True).to_list()
    belief = dropped.get_column("source")[0] in _BELIEFS
    what = str(dropped.get_column("source")[0])
    reason = (
        f"the belief '{named[0]}' contradicts the messages and was dropped"
        if belief
        else f"{dropped.height} of {total} {what} messages of one stream contradict the rest and were dropped"
    )
    return {
        "reason": reason,
        "sum_ns": int(edges.w[list(cycle)].sum()),
        "cycle": bounds,
        "dropped": named,
        "dropped_count": 1 if belief else dropped.height,
        "source": what,
    }


def _settle(
    every: Facts, pruned: Facts, index: dict[int, int], root: int, mid: int | None, violations: list[dict[str, object]]
) -> tuple[Facts, Facts, Constraints]:
    when = traffic(every)
    ranks = sum(clock >= 0 for clock in index) // 2
    for _ in range(_MAX_DROPS):
        c = make_constraints(pruned, index, root, when)
        tau = next((t for t in looks(instants(c, mid), ranks) if bounds_at(c, t) is None), None)
        if tau is None:
            return every, pruned, c
        edges = edges_at(c, tau)
        cycle = negative_cycles(edges)[0]
        option = _choose(_options(every, pruned, c, edges, cycle, tau))
        dropped = every.filter(option.rows)
        if dropped.height == 0:
            break
        violations.append(_record(pruned, edges, cycle, dropped, option.total))
        every = every.filter(~option.rows)
        when = traffic(every)
        ends = dropped.select("a", "b").unique()
        untouched = pruned.join(ends, on=["a", "b"], how="anti", maintain_order="left")
        again = every.join(ends, on=["a", "b"], how="semi", maintain_order="left")
        timed = again.get_column("at_ns").is_not_null()
        pruned = pl.concat([untouched, prune(again.filter(timed)), again.filter(~timed)])
    raise ClockError(
        f"the clocks of the ranks contradict each other in more than {_MAX_DROPS} independent ways",
        hint="the traces may come from different runs; check that all files belong to one capture",
    )


def _misfits(c: Constraints, mid: int, index: Mapping[int, int], prior: Prior) -> list[int]:
    """Ranks whose messages refute the belief that they follow their host's clock; as few as explain it."""
    ranks = sorted(prior.host_of) if prior.kind != "none" else []
    bounds = bounds_at(c, mid)
    if bounds is None or not ranks:
        return []
    at = np.array([index[gpu(r)] for r in ranks], dtype=np.int64)
    homes = np.array([prior.host_of[r] for r in ranks], dtype=np.int64)
    apart_ns = SAME_HOST_NS + (prior.between_ns or UNREACHED // 4)
    limit = np.where(homes[:, None] == homes[None, :], SAME_HOST_NS, apart_ns)
    if len(ranks) <= _ALL_PAIRS:
        apart = bounds.between(at)
    else:
        # Large captures are compared with the lowest rank only.
        apart = np.full(limit.shape, UNREACHED, dtype=np.int64)
        up, down = bounds.around(np.full(c.nodes, at[0], dtype=np.int64))
        apart[0], apart[:, 0] = up[at], down[at]
    apart = np.where(apart < UNREACHED, apart + c.crude[at][None, :] - c.crude[at][:, None], UNREACHED)
    clash: BoolArray = apart < -limit
    clash |= clash.T
    out: list[int] = []
    while clash.any():
        counts = clash.sum(axis=0)
        worst = int(np.flatnonzero(counts == counts.max())[-1])
        out.append(ranks[worst])
        clash[worst] = clash[:, worst] = False
    return sorted(out)


def _split(c: Constraints, mid: int, index: Mapping[int, int]) -> list[int]:
    """Ranks whose messages refute the belief that CPU and GPU stamps of one trace share a clock."""
    edges = edges_at(c, mid)
    out: list[int] = []
    direct = dict(zip(zip(edges.a.tolist(), edges.b.tolist(), strict=True), edges.w.tolist(), strict=True))
    for clock in sorted(k for k in index if k >= 0 and k % 2 == 0):
        here, there = index[clock], index[clock + 1]
        step = int(c.crude[there] - c.crude[here])
        high, low = direct.get((here, there), UNREACHED) + step, direct.get((there, here), UNREACHED) - step
        if high < -CPU_GPU_NS or low < -CPU_GPU_NS:
            out.append(clock // 2)
    return out


def reconcile(
    told: Facts, beliefs: Facts, index: dict[int, int], root: int, *, mid: int | None, prior: Prior
) -> Reconciled:
    """Drop what contradicts: messages (`told`) first among themselves, then the beliefs that do not fit them.

    `index`: clock -> node; `root`: the clock that times are told on. Raises ClockError where there is no end to it.
    """
    violations: list[dict[str, object]] = []
    loose = pl.col("kind").str.ends_with(LOOSE)
    told, pruned, c = _settle(
        pl.concat([told, beliefs.filter(loose)], rechunk=False),
        pl.concat([prune(told), beliefs.filter(loose)]),
        index, root, mid, violations,
    )  # fmt: skip
    beliefs = beliefs.filter(~loose)
    middle = instants(c, mid)[1]
    refuted = [("same_host", f"rank {r}") for r in _misfits(c, middle, index, prior)]
    refuted += [("prior", f"rank {r}{ONE_TRACE}") for r in _split(c, middle, index)]
    for source, kind in refuted:
        this = (pl.col("source").cast(pl.String) == source) & (pl.col("kind") == kind)
        gone, beliefs = beliefs.filter(this), beliefs.filter(~this)
        if gone.height == 0:
            continue
        # With the belief back in, the cycle that refutes it can be shown.
        again = pl.concat([pruned, beliefs, gone])
        edges = edges_at(make_constraints(again, index, root, traffic(told)), middle)
        violations.append(_record(again, edges, next(iter(negative_cycles(edges)), []), gone, gone.height))
    told = pl.concat([told, beliefs], rechunk=False)
    _, pruned, c = _settle(told, pl.concat([pruned, beliefs]), index, root, mid, violations)
    return Reconciled(pruned, c, violations)

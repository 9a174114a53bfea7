"""A scenario played through the loop: from pieces, a host speed and a choice of ends to a round of all slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import repeat
from typing import TypeAlias

import numpy as np

from traceana.arrays import mapped
from traceana.intervals import IntArray
from traceana.simulate.growth import CONSTANT, PPM, Experts, host_ppm, scaled_to_batch
from traceana.simulate.hosts import HostSpeed, as_profiled, graph_launch_ns, unprofiled
from traceana.simulate.kernels import APART, EARLY, HEAD, LATE
from traceana.simulate.loop import Hops, Loop, Step, simulate
from traceana.simulate.parts import COLUMNS, Parts
from traceana.simulate.scenario import Scenario, unchanged

__all__ = ["EAGER", "Ends", "Round", "eager_ns", "play", "play_as_profiled", "services"]

# Host time of a kernel launched by itself, not profiled, with SGLang's Python around it, where the capture has none
# ahead of its graphs: that of a decode step without graphs (D of the captures).
_EAGER_NS = 75_000
# What the kernels of the layers may take instead, in parts (ppm) of what those ahead of the graph take.
EAGER = (PPM, PPM // 2, PPM * 3 // 2)
_LEAST_VISITS = 24
_EMPTY_SCHEDULE = 10  # the generator's share is 17, SGLang's source says a few lines of hundreds
_LAST_KERNEL_NS = 5_000
_SCHEDULE, _LAUNCH, _TAIL = (COLUMNS.index(name) for name in ("schedule", "launch", "tail"))
_PREPARE, _PROCESS = (COLUMNS.index(name) for name in ("prepare", "process"))


@dataclass(frozen=True, slots=True)
class Ends:
    """What is not known and has two ends: how a forward grows with its batch, what an eager launch costs (ppm of what
    the launches ahead of the graph do)."""

    growth: str = CONSTANT
    eager: int = PPM


@dataclass(frozen=True, slots=True)
class Round:
    """A steady round of all slots: its length in ns, tokens computed in it, micro-batches, and GPU ns per stage."""

    ns: int
    tokens: int
    steps: int
    gpu: tuple[int, ...]

    @property
    def throughput(self) -> int:
        """Tokens per second, in thousandths."""
        return self.tokens * 1_000_000_000_000 // max(self.ns, 1)


def play(
    parts: Parts, scenario: Scenario, speed: HostSpeed, pattern: Sequence[int], experts: Experts, ends: Ends,
    largest_graph: int | None = None,
) -> Round:  # fmt: skip
    """A round of `scenario` with the slots' batches `pattern`, on the unprofiled server. Batches above `largest_graph`
    are launched kernel by kernel. Where the capture holds no decode step, its own visits are played in their order."""
    made = [_Stage(parts, scenario, speed, s) for s in range(len(parts.stages))]
    if parts.decode:
        length = len(pattern)
        # A visit's own batch, and that of the next slot, whose result it processes.
        visits = [(b, pattern[(slot + 1) % length]) for slot, b in enumerate(pattern)]
        kinds = [{v: m.steps(*v, experts, ends, largest_graph) for v in sorted(set(visits))} for m in made]
        order = _turns(visits, kinds[0], max(_LEAST_VISITS, parts.visits.size))
        steps = [[of[v][1][turn % len(of[v][1])] for v, turn in order] for of in kinds]
        tokens, filled = sum(pattern), sum(b > 0 for b in pattern)
        window = length * -(-max(_LEAST_VISITS, parts.visits.size) // length)
    else:
        window = length = parts.visits.size
        warm = -(-_LEAST_VISITS // window) * window
        rows = [m.as_seen(ends) for m in made]
        steps = [[r[v % window] for v in range(warm + window + 1)] for r in rows]
        tokens, filled = int(parts.tokens.sum()), int((parts.batch > 0).sum())
    hops = [_slowed(h, speed.speed) for h in scenario.hops]
    loop = Loop(
        steps,
        hops,
        scenario.depth,
        parts.one_stream,
        lags=[stage.kernels.starts.lag for stage in parts.stages],
        receives_first=[stage.receives_first for stage in parts.stages],
        copies_last=[stage.copies_last for stage in parts.stages],
    )
    starts = simulate(loop, len(steps[0])).starts[0]
    last = len(starts) - 1
    span = starts[last] - starts[last - window]
    gpu = tuple(
        sum(s.gpu + s.head + s.side_before + s.side_after for s in of_stage[last - window : last]) * length // window
        for of_stage in steps
    )
    return Round(span * length // window, tokens, filled, gpu)


def play_as_profiled(parts: Parts, experts: Experts) -> int:
    """Time of a visit when the capture is played with its hosts as slow as the profiler made them, ns: what the model
    says of the profiled server, to be compared with `parts.period_ns`."""
    length = len(parts.slots) if parts.decode else parts.visits.size
    return play(parts, unchanged(parts), as_profiled(parts), parts.slots, experts, Ends()).ns // length


def eager_ns(parts: Parts, s: int, speed: HostSpeed) -> int:
    """Host time of launching one kernel by itself on stage `s`, without the profiler: as measured there, else on the
    other stages, else the usual one."""
    measured = [stage.kernels.starts.eager_ns for stage in parts.stages]
    own = measured[s] or max(measured)
    return own * speed.speed // PPM * speed.equal[s] // PPM if own else _EAGER_NS


def services(
    parts: Parts, scenario: Scenario, speed: HostSpeed, experts: Experts, ends: Ends
) -> list[Callable[[int], int]]:
    """Per stage the time that a batch takes it: the longer of its mean GPU time and its median host time, ns."""

    def of(stage: _Stage) -> Callable[[int], int]:
        host = int(np.median(stage.host[parts.batch > 0].sum(axis=1)))

        @cache
        def service(batch: int) -> int:
            steps = stage.steps(batch, batch, experts, ends, None)[1]
            return max(host, sum(step.gpu + step.head for step in steps) // len(steps))

        return service

    return [of(_Stage(parts, scenario, speed, s)) for s in range(len(parts.stages))]


_Visit: TypeAlias = "tuple[int, int]"


def _turns(
    visits: Sequence[_Visit], kinds: Mapping[_Visit, tuple[int, list[Step]]], window: int
) -> list[tuple[_Visit, int]]:
    """Every visit to play, and which of the measured visits that stand in for it. Those are taken in the order in which
    they were measured, whatever the slot: neighbours in time stay neighbours, on every stage."""
    slots = len(visits)
    total = max(2 * slots, _LEAST_VISITS) + slots * -(-window // slots) + 1
    taken = dict.fromkeys((near for near, _ in kinds.values()), 0)
    order: list[tuple[_Visit, int]] = []
    for number in range(total):
        visit = visits[number % slots]
        near = kinds[visit][0]
        order.append((visit, taken[near]))
        taken[near] += 1
    return order


def _slowed(hop: Hops, speed: int) -> Hops:
    """gloo messages are work of two hosts, so they go at the hosts' speed; what NCCL moves does not."""
    return replace(
        hop, requests=hop.requests * speed // PPM, proxy=hop.proxy * speed // PPM, output=hop.output * speed // PPM
    )


class _Stage:
    """One stage of a scenario at a host speed: its host pieces for all rows, and steps made of them."""

    def __init__(self, parts: Parts, scenario: Scenario, speed: HostSpeed, s: int) -> None:
        self.parts, self.scenario, self.stage, self.s = parts, scenario, parts.stages[s], s
        known = np.minimum(speed.known[s], self.stage.host)
        host = unprofiled(parts, s, speed, scenario.nodes[s])
        host = host * scenario.columns // PPM
        # What grows with the requests: the work, not a sleep in it.
        self.work = np.maximum(host - known, 0)
        if scenario.taken[s]:
            host = _without(host, known, scenario.taken[s])
        host += scenario.host[s]
        host[:, _SCHEDULE] += scenario.anywhere[s]
        self.host = host
        self.eager_ns = eager_ns(parts, s, speed)

    def steps(
        self, batch: int, result: int, experts: Experts, ends: Ends, largest_graph: int | None
    ) -> tuple[int, list[Step]]:
        """The measured batch whose visits stand in for `batch`, and those visits, as they process the result of a batch
        of `result`."""
        rows_of = self.parts.rows_of
        if batch == 0:
            near = 0 if 0 in rows_of else max(rows_of)
            rows = rows_of[near]
            none = np.zeros(rows.size, dtype=np.int64)
            host = self._grown(rows, near, near, result)
            if near:  # an empty slot has no batch to prepare: what is left of the scheduling is hardly more than a look
                host[:, _SCHEDULE] //= _EMPTY_SCHEDULE
            return near, _rows(host, none, none, none == 0, dict.fromkeys(APART, none), 0)
        gpu = self.scenario.gpu[self.s]
        near, gpu = scaled_to_batch(self.stage.kernels, gpu, rows_of, batch, ends.growth, experts)
        rows = rows_of[near]
        off = self.scenario.graph is False or (largest_graph is not None and batch > largest_graph)
        host = self._grown(rows, near, batch, result)
        return near, self._made(rows, host, gpu, np.full(rows.size, batch), off, ends)

    def _grown(self, rows: IntArray, near: int, batch: int, result: int) -> IntArray:
        """Host pieces of visits with `near` requests as they are with `batch`."""
        host = self.host[rows]
        if near and near != batch:
            host[:, _PREPARE] += self.work[rows, _PREPARE] * (host_ppm("prepare", batch, near) - PPM) // PPM
        if result:
            measured = self.parts.processed[rows]
            changed = mapped(measured, partial(host_ppm, "process", result)) - PPM
            host[:, _PROCESS] += self.work[rows, _PROCESS] * changed // PPM
        return host

    def as_seen(self, ends: Ends) -> list[Step]:
        """Every measured visit with its own batch."""
        rows = np.arange(self.parts.visits.size)
        off = self.scenario.graph is False
        return self._made(rows, self.host[rows], self.scenario.gpu[self.s], self.parts.batch, off, ends)

    def _made(
        self, rows: IntArray, host: IntArray, gpu: IntArray, batch: IntArray, off: bool, ends: Ends
    ) -> list[Step]:
        graphed = self.stage.graphed[rows]
        nodes, issue = self.scenario.nodes[self.s][rows], self.scenario.issue[self.s][rows]
        left = self.stage.kernels.count[rows] * issue // PPM  # kernels that a change has left
        launch = np.where(graphed, host[:, _LAUNCH], host[:, _LAUNCH] * issue // PPM)
        if self.scenario.graph is True:
            # The layers become one launch; what prepares the forward and what samples is launched as before.
            each = launch // np.maximum(left, 1)
            before, after = self.stage.kernels.before[rows], self.stage.kernels.after[rows]
            together = mapped(nodes, graph_launch_ns)
            host[:, _TAIL] += np.where(graphed, 0, each * after)
            launch = np.where(graphed, launch, np.minimum(each * before + together, launch))
            graphed = np.ones_like(graphed)
        elif off:
            # What prepares the forward and what samples is launched one by one already.
            launch = np.where(graphed, nodes * issue // PPM * self.eager_ns * ends.eager // PPM, launch)
            graphed = np.zeros_like(graphed)
        host[:, _LAUNCH] = launch
        apart = {place: ns[rows] for place, ns in self.scenario.apart[self.s].items()}
        return _rows(host, batch, gpu, graphed, apart, self.stage.kernels.starts.head_at)


def _rows(
    host: IntArray, batch: IntArray, gpu: IntArray, graphed: np.ndarray, apart: Mapping[str, IntArray], head_at: int
) -> list[Step]:
    """Steps from rows of host pieces, whose columns are a step's first fields."""
    columns = [*host.T, batch, gpu, graphed, *(apart[place] for place in (EARLY, LATE, HEAD))]
    values: list[Iterable[object]] = [column.tolist() for column in columns]
    values.insert(Step._fields.index("last"), repeat(_LAST_KERNEL_NS, batch.size))
    values.append(repeat(head_at, batch.size))
    return list(map(Step._make, zip(*values, strict=True)))


def _without(host: IntArray, known: IntArray, ns: int) -> IntArray:
    """`host` with `ns` off every visit: off what is known to be no work of the scheduler's first, then off the longest
    pieces, never below zero."""
    host = host.copy()
    left = np.full(host.shape[0], ns, dtype=np.int64)
    held = known.max(axis=0)
    first = [int(c) for c in np.argsort(-held, kind="stable") if held[c]]
    limits = [(c, known[:, c]) for c in first]
    limits += [(int(c), host[:, int(c)].copy()) for c in np.argsort(-np.median(host, axis=0), kind="stable")]
    for column, most in limits:
        off = np.minimum(np.minimum(most, host[:, column]), left)
        host[:, column] -= off
        left -= off
    return host

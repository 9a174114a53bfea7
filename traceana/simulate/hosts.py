"""Host time as it is without the profiler: what was measured, less what profiling adds, sleeps left as they are.

Profiling slows the Python of the scheduler and every launch call, and leaves the GPU and sleeps alone. `unprofiled`
multiplies the host pieces by one speed, takes the cost of a graph launch from a table measured apart, and keeps what
`planted` recognises.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from traceana.arrays import mapped
from traceana.intervals import IntArray
from traceana.simulate.growth import PPM
from traceana.simulate.parts import COLUMNS, Parts

__all__ = ["HostSpeed", "as_profiled", "claim", "equal_speeds", "graph_launch_ns", "planted", "unprofiled"]

# Host time of cudaGraphLaunch without a profiler by kernels in the graph (one H200 host, CUDA 13: launch.json of the
# captures' p2p-nccl folder). Between the points it is linear.
_GRAPH_LAUNCH = ((0, 4_000), (30, 13_400), (300, 113_400), (1_000, 234_300))
# The same code in another place: where a piece has no counterpart on another stage, its twin on this one is compared.
_TWINS = {
    "await_proxy": "await_result", "receive_proxy": "receive_result", "send_proxy": "send_output",
    "post_proxy": "post_output", "tail": "prepare",
}  # fmt: skip
# Code that is the same on every stage; the others hold what only some stages do, under the same name.
_SAME = (
    "commit_output",
    "send_output",
    "post_output",
    "await_result",
    "receive_result",
    "prepare",
    "before_sync",
    "process",
)
_TIMES, _LEAST_NS, _FEWEST = 3, 500_000, 3
_ALIKE = 1.6  # the captures' stages differ by up to 1.43 in the same code, profiled
_LAUNCH = COLUMNS.index("launch")


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """`speed` (ppm) of the measured host pieces, `equal` a factor (ppm) per stage, `known` ns per stage and column
    that are not scaled. `launch` is the speed of launching kernel by kernel, where that is another one; `table`:
    graph launches cost what they cost unprofiled."""

    speed: int
    equal: tuple[int, ...]
    known: tuple[IntArray, ...]
    launch: int | None = None
    table: bool = True


def graph_launch_ns(nodes: int) -> int:
    """Host time of launching a graph of `nodes` kernels, not profiled."""
    at = min(bisect_right(_GRAPH_LAUNCH, (nodes, PPM)), len(_GRAPH_LAUNCH) - 1)
    (low, a), (high, b) = _GRAPH_LAUNCH[at - 1], _GRAPH_LAUNCH[at]
    return a + (b - a) * (nodes - low) // (high - low)


def planted(parts: Parts) -> list[IntArray]:
    """Per stage and column the nanoseconds that are no work of the scheduler's: a piece whose every visit takes several
    times what the same code takes on the other stages (or its twin on this one) holds a sleep or a spin of a fixed
    length. Profiling does not stretch those."""
    filled = np.flatnonzero(parts.batch > 0)
    if filled.size < _FEWEST:  # one long visit is no rule
        return [np.zeros(len(COLUMNS), dtype=np.int64) for _ in parts.stages]
    floors = [np.quantile(s.host[filled], 0.05, axis=0, method="lower").astype(np.int64) for s in parts.stages]
    usual = [np.median(s.host[filled], axis=0).astype(np.int64) for s in parts.stages]
    out: list[IntArray] = []
    for stage, floor in enumerate(floors):
        extra = np.zeros(len(COLUMNS), dtype=np.int64)
        for column, name in enumerate(COLUMNS):
            if column == _LAUNCH and parts.stages[stage].graphed.any():
                continue
            others = [u[column] for s, u in enumerate(usual) if s != stage and u[column] > 0]
            if not others and name in _TWINS:
                others = [usual[stage][COLUMNS.index(_TWINS[name])]]
            if not others or max(others) == 0:
                continue
            same = int(np.median(others))
            if floor[column] >= _TIMES * same and floor[column] - same >= _LEAST_NS:
                least = min(
                    (int(f[column]) for s, f in enumerate(floors) if s != stage and f[column] > 0), default=same
                )
                extra[column] = floor[column] - least
        out.append(extra)
    return out


def claim(parts: Parts, known: list[IntArray], asked: Mapping[int, int]) -> list[IntArray]:
    """`known` with at least `asked[stage]` ns planted on each stage: who takes 3 ms off a host says that they are real,
    whatever the profiler. What is not known yet lies in the stage's longest piece."""
    out = [k.copy() for k in known]
    for stage, ns in asked.items():
        missing = ns - int(out[stage].sum())
        if missing <= 0:
            continue
        filled = np.flatnonzero(parts.batch > 0)
        room = np.median(parts.stages[stage].host[filled], axis=0).astype(np.int64) - out[stage]
        room[_LAUNCH] = 0
        column = int(room.argmax())
        out[stage][column] += min(missing, max(0, int(room[column])))
    return out


def equal_speeds(parts: Parts, known: list[IntArray]) -> list[int]:
    """Per stage a factor (ppm) that gives all stages the same host time in the code that is the same on all of them.
    Hosts that differ more than profiling makes them differ are left as they are: one of them is slow."""
    filled = np.flatnonzero(parts.batch > 0)
    work = [
        np.median(np.maximum(s.host[filled] - k, 0), axis=0).astype(np.int64)
        for s, k in zip(parts.stages, known, strict=True)
    ]
    same = np.array([name in _SAME for name in COLUMNS]) & np.all([w > 0 for w in work], axis=0)
    totals = [int(w[same].sum()) for w in work]
    if min(totals, default=0) <= 0:
        return [PPM] * len(totals)
    if max(totals) > _ALIKE * min(totals):
        return [PPM] * len(totals)
    mean = sum(totals) // len(totals)
    return [mean * PPM // t for t in totals]


def unprofiled(parts: Parts, stage: int, speed: HostSpeed, nodes: IntArray) -> IntArray:
    """Host pieces of a stage at `speed`; `nodes` are the kernels of each row's graph."""
    part = parts.stages[stage]
    fixed = np.minimum(part.host, speed.known[stage])
    own = speed.speed * speed.equal[stage] // PPM
    speeds = np.full(len(COLUMNS), own, dtype=np.int64)
    speeds[_LAUNCH] = own if speed.launch is None else speed.launch
    host = (part.host - fixed) * speeds // PPM + fixed
    graphed = part.graphed & (nodes > 0)
    table = mapped(nodes, graph_launch_ns)
    measured = part.host[:, _LAUNCH]
    host[:, _LAUNCH] = np.where(graphed, np.minimum(table, measured) if speed.table else measured, host[:, _LAUNCH])
    return host


def as_profiled(parts: Parts) -> HostSpeed:
    """The hosts as they were under the profiler."""
    none = np.zeros(len(COLUMNS), dtype=np.int64)
    return HostSpeed(PPM, (PPM,) * len(parts.stages), (none,) * len(parts.stages), table=False)

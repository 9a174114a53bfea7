"""How much faster hosts are without the profiler: the likeliest speed, given what the server did by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from traceana.simulate.growth import PPM, Experts
from traceana.simulate.hosts import HostSpeed, claim, equal_speeds, planted
from traceana.simulate.parts import Parts
from traceana.simulate.play import Ends, Round, play
from traceana.simulate.scenario import unchanged

__all__ = ["DILATION", "Calibration", "calibrate"]

# Host dilation of the captures at hand, least and most (docs/concepts/whatif.md), and the usual one between them.
DILATION = (1_350_000, 1_600_000, 2_400_000)
_LEAST, _MOST = PPM, 5 * PPM  # dilations that profiling has
# Standard deviations, of logarithms: of the captures' dilations around the usual one, and of a server's own throughput,
# a mean over a few seconds. Where hosts bind the server the throughput decides; where GPUs do it tells little of hosts.
_SPREAD, _NOISE = 0.3, 0.01
_ROUNDS = 12  # the dilation to half a percent
_Play: TypeAlias = "Callable[[int], tuple[HostSpeed, Round]]"


@dataclass(frozen=True, slots=True)
class Calibration:
    """A host speed and the round of the capture itself at that speed. `matched`: the round is the server's own, as far as
    that is known; `likely`: the prediction rests on it, else only its range does. `name` says how hosts were treated."""

    name: str
    speed: HostSpeed
    round: Round
    matched: bool
    likely: bool = True

    @property
    def dilation(self) -> float:
        """How much slower the profiled hosts were; at launching, where that is apart."""
        return PPM / (self.speed.speed if self.speed.launch is None else self.speed.launch)


def calibrate(parts: Parts, experts: Experts, taken: Sequence[int]) -> list[Calibration]:
    """Calibrations to predict with: hosts as measured, and hosts of one speed on all stages (the same code runs on
    all of them, and profiling does not slow all of them alike). Without the server's own throughput: at three
    dilations. Where GPUs bind the server, many dilations explain its throughput: then the usual one is likely, and the
    least and the most are calibrations too where they explain it.

    `taken` are ns a stage's host is said to have beyond the scheduler's work.
    """
    known = claim(parts, planted(parts), {s: ns for s, ns in enumerate(taken) if ns})
    base = unchanged(parts)
    ways = {"as measured": [PPM] * len(parts.stages)}
    equal = equal_speeds(parts, known)
    if any(e != PPM for e in equal):
        ways["of one speed"] = equal
    out: list[Calibration] = []
    if parts.throughput is not None and not all(s.graphed[parts.batch > 0].all() for s in parts.stages):
        ways["with launching apart"] = [PPM] * len(parts.stages)
    for name, factors in ways.items():
        apart = name == "with launching apart"

        def at(dilation: int, apart: bool = apart, factors: Sequence[int] = factors) -> tuple[HostSpeed, Round]:
            ppm = PPM * PPM // dilation
            own, launch = (PPM * PPM // DILATION[1], ppm) if apart else (ppm, None)
            speed = HostSpeed(own, tuple(factors), tuple(known), launch)
            return speed, play(parts, base, speed, parts.slots, experts, Ends())

        if parts.throughput is None:
            out += [Calibration(name, *at(d), matched=False, likely=d == DILATION[1]) for d in DILATION]
        else:
            out += _matched(name, at, parts.throughput)
    return out


def _matched(name: str, at: _Play, wanted: int) -> list[Calibration]:
    """The dilation that explains the server's own throughput best. `at` plays at a dilation (ppm)."""
    found: dict[int, tuple[HostSpeed, Round]] = {}

    def played(dilation: int) -> tuple[HostSpeed, Round]:
        if dilation not in found:
            found[dilation] = at(dilation)
        return found[dilation]

    target = max(played(DILATION[1])[1].tokens * 1_000_000_000_000 // wanted, 1)

    def unlikely(dilation: int) -> float:
        """How many standard deviations off both are, squared: the dilation from the usual one, the round from the
        server's own."""
        off = math.log(dilation / DILATION[1]) / _SPREAD, _off(played(dilation)[1].ns, target)
        return off[0] ** 2 + off[1] ** 2

    best = min(_search(unlikely), DILATION[1], key=unlikely)
    out = [Calibration(name, *played(best), matched=_off(played(best)[1].ns, target) <= 2)]
    ends = [played(d) for d in (DILATION[0], DILATION[2])]
    return out + [Calibration(name, *e, matched=True, likely=False) for e in ends if _off(e[1].ns, target) <= 1]


def _search(unlikely: Callable[[int], float]) -> int:
    """The dilation (ppm) from _LEAST to _MOST that is the likeliest, by golden section on its logarithm."""
    low, high = math.log(_LEAST), math.log(_MOST)
    shorter = (math.sqrt(5) - 1) / 2
    left, right = high - shorter * (high - low), low + shorter * (high - low)
    at_left, at_right = unlikely(round(math.exp(left))), unlikely(round(math.exp(right)))
    for _ in range(_ROUNDS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - shorter * (high - low)
            at_left = unlikely(round(math.exp(left)))
        else:
            low, left, at_left = left, right, at_right
            right = low + shorter * (high - low)
            at_right = unlikely(round(math.exp(right)))
    return round(math.exp((low + high) / 2))


def _off(ns: int, target: int) -> float:
    """How far a round is from the server's own, standard deviations."""
    return abs(math.log(ns / target)) / _NOISE

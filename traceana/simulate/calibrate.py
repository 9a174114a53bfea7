"""How much faster hosts are without the profiler: the speed at which the model gives the server's own throughput."""

from __future__ import annotations

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
_ROUNDS = 40
_Play: TypeAlias = "Callable[[int], tuple[HostSpeed, Round]]"
# A server's own throughput, a mean over a few seconds, is taken to be known to this (ppm); for the range, to that.
_KNOWN, _PERHAPS = 3_000, 10_000


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
    """The dilation nearest to the usual one at which the round is the server's own. `at` plays at a dilation (ppm)."""
    usual = at(DILATION[1])
    target = usual[1].tokens * 1_000_000_000_000 // wanted
    out = [_nearest(name, at, usual, target)]
    if _close(usual[1].ns, target, _PERHAPS):
        ends = [at(d) for d in (DILATION[0], DILATION[2])]
        fit = [e for e in ends if _close(e[1].ns, target, _PERHAPS)]
        out += [Calibration(name, *e, matched=True, likely=False) for e in fit]
    return out


def _nearest(name: str, at: _Play, usual: tuple[HostSpeed, Round], target: int) -> Calibration:
    if _close(usual[1].ns, target, _KNOWN):
        return Calibration(name, *usual, matched=True)
    faster = usual[1].ns > target
    # The nearer end of what is known of the server's own round.
    goal = target + (target if faster else -target) * _KNOWN // PPM
    far = _MOST if faster else _LEAST
    last = at(far)
    if (last[1].ns > goal) if faster else (last[1].ns < goal):
        # No dilation explains what the server did: GPUs or messages bind it, or its figure holds more than decoding.
        return Calibration(name, *usual, matched=False)
    return Calibration(name, *_solved(at, (DILATION[1], usual[1].ns), (far, last[1].ns), goal), matched=True)


def _solved(at: _Play, one: tuple[int, int], other: tuple[int, int], goal: int) -> tuple[HostSpeed, Round]:
    """Regula falsi (Illinois) on the dilation, between two of them and their rounds: a round falls with the dilation,
    nearly in a straight line."""
    (low, over), (high, under) = sorted((one, other))
    over, under = over - goal, under - goal
    side = 0
    best = at(high)
    for _ in range(_ROUNDS):
        middle = min(max(low + (high - low) * over // max(over - under, 1), low + 1), high - 1)
        best = at(middle)
        error = best[1].ns - goal
        if abs(error) * 2_000 <= goal or high - low <= 2:
            break
        if error > 0:
            low, over = middle, error
            under = under // 2 if side > 0 else under
            side = 1
        else:
            high, under = middle, error
            over = over // 2 if side < 0 else over
            side = -1
        over, under = max(over, 1), min(under, -1)
    return best


def _close(ns: int, target: int, ppm: int) -> bool:
    return abs(ns - target) * PPM <= target * ppm

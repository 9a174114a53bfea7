"""How much faster hosts are without the profiler: the speed at which the model gives the server's own throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from traceana.intervals import IntArray
from traceana.simulate.growth import PPM, Experts
from traceana.simulate.hosts import HostSpeed, claim, equal_speeds, planted
from traceana.simulate.parts import Parts
from traceana.simulate.play import Ends, Round, play
from traceana.simulate.scenario import Scenario, unchanged

__all__ = ["DILATION", "Calibration", "calibrate"]

# Host dilation of the captures at hand, least and most (docs/concepts/whatif.md), for servers that do not say their own
# throughput; and where between them the middle is taken.
DILATION = (1_350_000, 1_800_000, 2_400_000)
_SLOWEST, _FASTEST = PPM, PPM // 5  # dilations that profiling has
_ROUNDS = 40


@dataclass(frozen=True, slots=True)
class Calibration:
    """A host speed and the round of the capture itself at that speed. `matched`: the round is the server's own, to a
    part in ten thousand; else the dilation is the middle of DILATION, or one of them where the server's own
    throughput is not known. `name` says how hosts were treated."""

    name: str
    speed: HostSpeed
    round: Round
    matched: bool

    @property
    def dilation(self) -> float:
        """How much slower the profiled hosts were; at launching, where that is apart."""
        return PPM / (self.speed.speed if self.speed.launch is None else self.speed.launch)


def calibrate(parts: Parts, experts: Experts, taken: Sequence[int]) -> list[Calibration]:
    """Calibrations to predict with: hosts as measured, and hosts of one speed on all stages (the same code runs on
    all of them, and profiling does not slow all of them alike). Without the server's own throughput: at three
    dilations.

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
        if parts.throughput is None:
            for dilation in DILATION:
                speed = HostSpeed(PPM * PPM // dilation, tuple(factors), tuple(known))
                out.append(Calibration(name, speed, _round(parts, base, speed, experts), False))
        else:
            apart = name == "with launching apart"
            out.append(_matched(parts, base, experts, name, factors, known, parts.throughput, apart))
    return out


def _round(parts: Parts, base: Scenario, speed: HostSpeed, experts: Experts) -> Round:
    return play(parts, base, speed, parts.slots, experts, Ends())


def _matched(
    parts: Parts, base: Scenario, experts: Experts, name: str, factors: Sequence[int], known: Sequence[IntArray],
    wanted: int, apart: bool,
) -> Calibration:  # fmt: skip
    """Regula falsi (Illinois) on the speed: a round grows with the hosts' time, nearly in a straight line. `apart`:
    on the speed of launching kernel by kernel, with all else in the middle of DILATION."""

    def at(ppm: int) -> tuple[HostSpeed, Round]:
        own, launch = (PPM * PPM // DILATION[1], ppm) if apart else (ppm, None)
        speed = HostSpeed(own, tuple(factors), tuple(known), launch)
        return speed, _round(parts, base, speed, experts)

    low, high = _FASTEST, _SLOWEST
    first, last = at(low), at(high)
    target = first[1].tokens * 1_000_000_000_000 // wanted
    if first[1].ns >= target or last[1].ns <= target:
        # No dilation explains what the server did: GPUs or messages bind it, or its figure holds more than decoding.
        return Calibration(name, *at(PPM * PPM // DILATION[1]), matched=False)
    under, over = first[1].ns - target, last[1].ns - target
    best = last
    side = 0
    for _ in range(_ROUNDS):
        ppm = min(max(low + (high - low) * -under // (over - under), low + 1), high - 1)
        best = at(ppm)
        error = best[1].ns - target
        if _close(best[1].ns, target) or high - low <= 2:
            break
        if error < 0:
            low, under = ppm, error
            over = over // 2 if side < 0 else over
            side = -1
        else:
            high, over = ppm, error
            under = under // 2 if side > 0 else under
            side = 1
        over, under = max(over, 1), min(under, -1)
    return Calibration(name, *best, matched=_close(best[1].ns, target))


def _close(ns: int, target: int) -> bool:
    return abs(ns - target) * 10_000 <= target

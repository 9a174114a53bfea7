"""`compare`: baseline against candidate, one or several captures a side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from traceana.compare.side import COMPONENTS, Side

__all__ = ["NOISE", "Comparison", "compare"]

# Two identical runs differ by more than 5 % in a quarter of the pairs (docs/concepts/whatif.md).
NOISE = 0.06


@dataclass(frozen=True, slots=True)
class Comparison:
    """`parts`: (component, baseline ns, candidate ns) per decode token; the columns sum to the two token times, so their
    differences sum to the change, exactly. `metrics`: name -> (baseline, candidate, change as a share)."""

    baseline: Side
    candidate: Side
    parts: tuple[tuple[str, int, int], ...]
    metrics: Mapping[str, tuple[float | None, float | None, float | None]]
    spread: float
    significant: bool

    def as_json(self) -> dict[str, object]:
        """The document of `traceana diff --json`."""
        return {
            "baseline": _side(self.baseline),
            "candidate": _side(self.candidate),
            "token_ns": {
                "baseline": self.baseline.token_ns,
                "candidate": self.candidate.token_ns,
                "change": self.candidate.token_ns - self.baseline.token_ns,
            },
            "parts": [
                {"component": c, "baseline_ns": b, "candidate_ns": d, "change_ns": d - b} for c, b, d in self.parts
            ],
            "metrics": {name: {"baseline": b, "candidate": c, "change": x} for name, (b, c, x) in self.metrics.items()},
            "noise": self.spread,
            "significant": self.significant,
        }


def _side(side: Side) -> dict[str, object]:
    return {
        "captures": side.name,
        "rank": side.rank,
        "source": side.source,
        "tokens": side.tokens,
        "findings": list(side.findings),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if len(known) == len(values) and known else None


def _merged(sides: Sequence[Side]) -> Side:
    """Several captures of one configuration as one side: means, rounded so that the parts still sum to the token."""
    if len(sides) == 1:
        return sides[0]
    parts = {c: sum(s.parts[c] for s in sides) // len(sides) for c in COMPONENTS}
    first = sides[0]
    return Side(
        ", ".join(s.name for s in sides),
        first.rank,
        sum(parts.values()),
        first.source,
        sum(s.tokens for s in sides),
        parts,
        {k: _mean([s.metrics[k] for s in sides]) for k in first.metrics},
        first.findings,
    )


def compare(baseline: Sequence[Side], candidate: Sequence[Side]) -> Comparison:
    """The two sides compared. The change is significant beyond the run-to-run spread: the half range of each side where
    it has several captures, else 6 %."""
    a, b = _merged(baseline), _merged(candidate)
    spread = NOISE
    if len(baseline) > 1 or len(candidate) > 1:
        spans = [
            (max(times) - min(times)) / 2 / min(times)
            for group in (baseline, candidate)
            if len(times := [s.token_ns for s in group]) > 1
        ]
        spread = max(spans)
    metrics: dict[str, tuple[float | None, float | None, float | None]] = {}
    for name, left in a.metrics.items():
        right = b.metrics[name]
        metrics[name] = (left, right, right / left - 1 if left and right is not None else None)
    parts = tuple((c, a.parts[c], b.parts[c]) for c in COMPONENTS if a.parts[c] or b.parts[c])
    change = b.token_ns / a.token_ns - 1
    return Comparison(a, b, parts, metrics, spread, abs(change) > spread)

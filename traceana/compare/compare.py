"""`compare`: baseline against candidate, one or several captures a side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from traceana.compare.layout import spread_finding
from traceana.compare.side import COMPONENTS, Side, merge_sides

__all__ = ["NOISE", "PROFILER", "Comparison", "compare"]

# Two identical runs differ by more than 5 % in a quarter of the pairs (docs/concepts/whatif.md).
NOISE = 0.06
PROFILER = "profiling taken off"
OUTSIDE = "decode throughput outside the profile"
WINDOW = "the profiled window"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides, and the change from one to the other in ns per decode token (pairs are baseline, candidate).

    `parts`: (component, baseline ns, candidate ns); each column sums to its side's `token_ns`, so the differences sum to
    the change, exactly. `PROFILER` is what a token takes more outside the profile than in it. `split`: the same change in
    three: other batch size at the baseline's time per forward, other time per forward, and the profiler's part.
    `metrics`: name -> (baseline, candidate, change as a share). `noise`: share below which a change means nothing.
    `spread`: what is to be said where the sides are spread over their GPUs in other ways, else None.
    """

    baseline: Side
    candidate: Side
    token_ns: tuple[int, int]
    source: str
    parts: tuple[tuple[str, int, int], ...]
    split: Mapping[str, int]
    kernels: tuple[tuple[str, int, int], ...]
    metrics: Mapping[str, tuple[float | None, float | None, float | None]]
    noise: float
    significant: bool
    spread: Mapping[str, object] | None = None

    def as_json(self) -> dict[str, object]:
        """The document of `traceana diff --json`."""
        before, after = self.token_ns
        return {
            "baseline": _side(self.baseline),
            "candidate": _side(self.candidate),
            "token_ns": {"baseline": before, "candidate": after, "change": after - before, "source": self.source},
            "parts": [_row("component", *row) for row in self.parts],
            "split_ns": dict(self.split),
            "kernels": [_row("name", *row) for row in self.kernels],
            "metrics": {name: {"baseline": b, "candidate": c, "change": x} for name, (b, c, x) in self.metrics.items()},
            "noise": self.noise,
            "significant": self.significant,
            "spread": None if self.spread is None else dict(self.spread),
        }


def _row(key: str, name: str, before: int, after: int) -> dict[str, object]:
    return {key: name, "baseline_ns": before, "candidate_ns": after, "change_ns": after - before}


def _side(side: Side) -> dict[str, object]:
    return {
        "captures": side.name,
        "rank": side.rank,
        "window_ns": side.window_ns,
        "forwards": side.forwards,
        "tokens": side.tokens,
        "findings": list(side.findings),
        "layout": side.layout.words,
    }


def compare(baseline: Sequence[Side], candidate: Sequence[Side]) -> Comparison:
    """The two sides compared: outside the profile where every capture knows its throughput there, else in the windows.

    Noise is the widest spread (range over the least) of a side's captures, and 6 % at least unless both sides have three
    or more, for two runs that agree by chance say little.
    """
    a, b = merge_sides(baseline), merge_sides(candidate)
    outside = a.measured_ns is not None and b.measured_ns is not None
    before = a.measured_ns if outside and a.measured_ns else a.profiled_ns
    after = b.measured_ns if outside and b.measured_ns else b.profiled_ns

    spreads = [0.0 if min(len(baseline), len(candidate)) >= 3 else NOISE]
    for group in (baseline, candidate):
        times = [s.measured_ns if outside and s.measured_ns else s.profiled_ns for s in group]
        spreads.append(max(times) / min(times) - 1)
    noise = max(spreads)

    rows = [(c, a.parts[c], b.parts[c]) for c in COMPONENTS]
    rows.append((PROFILER, before - a.profiled_ns, after - b.profiled_ns))
    # The baseline's time per forward, spread over as many tokens as a forward of the candidate has; rounded down. It is
    # taken from the time of a token, not from the windows: where the batches are alike nothing is left to batch size,
    # whatever the rounding and however long the windows of several captures are.
    other_batch = a.profiled_ns * a.tokens * b.forwards // (a.forwards * b.tokens)
    split = {
        "batch_size": other_batch - a.profiled_ns,
        "forward_time": b.profiled_ns - other_batch,
        "profiler": (after - b.profiled_ns) - (before - a.profiled_ns),
    }
    names = dict.fromkeys([*a.kernels, *b.kernels])
    kernels = [(k, a.kernels.get(k, 0), b.kernels.get(k, 0)) for k in names]
    metrics = {"throughput": _pair(1e9 / before, 1e9 / after)}
    metrics |= {name: _pair(left, b.metrics[name]) for name, left in a.metrics.items()}
    metrics["tokens_per_forward"] = _pair(a.tokens / a.forwards, b.tokens / b.forwards)
    return Comparison(
        a,
        b,
        (before, after),
        OUTSIDE if outside else WINDOW,
        tuple(row for row in rows if row[1] or row[2]),
        split,
        tuple(sorted(kernels, key=lambda row: (-abs(row[2] - row[1]), row[0]))),
        metrics,
        noise,
        abs(after / before - 1) > noise,
        spread_finding(a, b, (before, after), noise),
    )


def _pair(before: float | None, after: float | None) -> tuple[float | None, float | None, float | None]:
    return before, after, after / before - 1 if before and after is not None else None

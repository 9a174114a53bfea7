"""One side of a comparison: the time of a decode token, and what it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import polars as pl

from traceana.errors import ModelError
from traceana.model.chain import CAUSES
from traceana.model.kernel_classes import CLASSES
from traceana.model.model import Model

__all__ = ["COMPONENTS", "Side", "measure_side"]

PROFILER = "profiling taken off"
COMPONENTS = (*(f"busy: {c}" for c in CLASSES), "transfer", *(f"idle: {c}" for c in CAUSES), PROFILER)


@dataclass(frozen=True, slots=True)
class Side:
    """`token_ns`: time of one decode token of the whole server; `parts` sum to it exactly. They are those of `rank`, the
    rank that computes most, in the profiled window; `PROFILER` is what the unprofiled server takes more (or less)."""

    name: str
    rank: int
    token_ns: int
    source: str
    tokens: int
    parts: Mapping[str, int]
    metrics: Mapping[str, float | None]
    findings: tuple[str, ...]


def measure_side(name: str, model: Model, document: Mapping[str, object]) -> Side:
    """The side of a capture. Raises ModelError where no decode forward starts in the window."""
    window = model.trace.window
    stages = cast("list[Mapping[str, object]]", document["stages"])
    stage = max(stages, key=lambda s: (cast("int", s["busy_ns"]), -cast("int", s["rank"])))
    rank = cast("int", stage["rank"])
    mine = model.trace.forwards.filter(
        (pl.col("rank") == rank) & (pl.col("mode") == "decode") & pl.col("ts_ns").is_between(window.start_ns, window.end_ns, closed="left")
    )  # fmt: skip
    tokens = int(mine.get_column("tokens").fill_null(0).sum())
    if tokens == 0:
        raise ModelError(
            "no decode forward in the window", where=name, hint="compare captures taken while the server decodes"
        )
    classes = cast("Mapping[str, int]", stage["busy_by_class_ns"])
    causes = cast("Mapping[str, int]", stage["causes_ns"])
    whole = {f"busy: {c}": classes[c] for c in CLASSES} | {"transfer": cast("int", stage["transfer_ns"])}
    whole |= {f"idle: {c}": causes[c] for c in CAUSES}
    profiled = window.duration_ns // tokens
    parts = _apportion(whole, profiled)
    rate = _number(document, "server", "throughput", "decode")
    token_ns = round(1e9 / rate) if rate else profiled
    parts[PROFILER] = token_ns - profiled
    latency = {q: _number(document, "server", "clients", f"latency_ns_{q}") for q in ("p50", "p99")}
    return Side(
        name,
        rank,
        token_ns,
        "the server's log before the profile" if rate else "the profiled window",
        tokens,
        parts,
        {
            "throughput": 1e9 / token_ns,
            "latency_p50": latency["p50"],
            "latency_p99": latency["p99"],
            "utilisation": cast("float", stage["utilisation"]),
            "bubble": cast("int", stage["bubble_ns"]) / window.duration_ns,
            "period": _number(document, "model", "measured_period_ns"),
        },
        tuple(str(f["title"]) for f in cast("list[Mapping[str, object]]", document["findings"])[:3]),
    )


def _apportion(whole: Mapping[str, int], total: int) -> dict[str, int]:
    """`whole` scaled to sum to `total`: rounded down, and what is left goes to the largest remainders, first named first."""
    base = sum(whole.values())
    shares = {k: divmod(v * total, base) for k, v in whole.items()}
    out = {k: q for k, (q, _) in shares.items()}
    for k in sorted(shares, key=lambda k: -shares[k][1])[: total - sum(out.values())]:
        out[k] += 1
    return out


def _number(document: Mapping[str, object], *path: str) -> float | None:
    value: object = document
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

"""One side of a comparison: the time of a decode token, and what it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import polars as pl

from traceana.compare.layout import ONE_GPU, Layout, layout_of
from traceana.errors import ModelError
from traceana.model.chain import CAUSES
from traceana.model.kernel_classes import CLASSES
from traceana.model.model import Model

__all__ = ["COMPONENTS", "Side", "measure_side", "merge_sides"]

COMPONENTS = (*(f"busy: {c}" for c in CLASSES), "transfer", *(f"idle: {c}" for c in CAUSES))


@dataclass(frozen=True, slots=True)
class Side:
    """What one capture, or several of one configuration, say about a decode token of the whole server.

    `parts`: ns per token in the profiled window on `rank`, the rank that computes most; they sum to `profiled_ns`, the
    window over its tokens, rounded down. `measured_ns`: time per token outside the profile, None where unknown.
    `kernels`: name -> ns per token of `rank`, rounded down; kernels that overlap count each. `window_ns`, `forwards` and
    `tokens` (decode only) are those of `rank` in the window.
    """

    name: str
    rank: int
    window_ns: int
    forwards: int
    tokens: int
    parts: Mapping[str, int]
    measured_ns: int | None
    kernels: Mapping[str, int]
    metrics: Mapping[str, float | None]
    findings: tuple[str, ...]
    layout: Layout = ONE_GPU

    @property
    def profiled_ns(self) -> int:
        """Time of a token in the profiled window."""
        return sum(self.parts.values())


def measure_side(name: str, model: Model, document: Mapping[str, object]) -> Side:
    """The side of a capture. Raises ModelError where the window holds no decode forward, or not all say their tokens."""
    window = model.trace.window
    stages = cast("list[Mapping[str, object]]", document["stages"])
    stage = max(stages, key=lambda s: (cast("int", s["busy_ns"]), -cast("int", s["rank"])))
    rank = cast("int", stage["rank"])
    started = pl.col("ts_ns").is_between(window.start_ns, window.end_ns, closed="left")
    tokens_of = model.trace.forwards.filter((pl.col("rank") == rank) & (pl.col("mode") == "decode") & started)["tokens"]
    tokens = int(tokens_of.sum())
    if tokens == 0 or tokens_of.null_count():
        raise ModelError(
            "no decode forward in the window"
            if tokens_of.is_empty()
            else "decode forwards that do not say their tokens",
            where=f"{name}, rank {rank}",
            hint="compare captures taken with CPU activity while the server decodes",
        )
    classes = cast("Mapping[str, int]", stage["busy_by_class_ns"])
    causes = cast("Mapping[str, int]", stage["causes_ns"])
    whole = {f"busy: {c}": classes[c] for c in CLASSES} | {"transfer": cast("int", stage["transfer_ns"])}
    whole |= {f"idle: {c}": causes[c] for c in CAUSES}
    rate = _number(document, "server", "throughput", "decode")
    return Side(
        name,
        rank,
        window.duration_ns,
        len(tokens_of),
        tokens,
        _apportion(whole, window.duration_ns // tokens),
        round(1e9 / rate) if rate else None,
        _kernels(model, rank, tokens),
        {
            "latency_p50": _number(document, "server", "clients", "latency_ns_p50"),
            "latency_p99": _number(document, "server", "clients", "latency_ns_p99"),
            "utilisation": cast("float", stage["utilisation"]),
            "bubble": cast("int", stage["bubble_ns"]) / window.duration_ns,
            "period": _number(document, "model", "measured_period_ns"),
        },
        tuple(str(f["title"]) for f in cast("list[Mapping[str, object]]", document["findings"])),
        layout_of(document),
    )


def merge_sides(sides: Sequence[Side]) -> Side:
    """Several captures of one configuration as one side: means, rounded down part by part so that parts still add up;
    window, forwards and tokens are sums; what one of them lacks is unknown. Rank, findings and
    layout are the first one's."""
    first = sides[0]
    if len(sides) == 1:
        return first
    times = [s.measured_ns for s in sides if s.measured_ns is not None]
    kernels = {k: sum(s.kernels.get(k, 0) for s in sides) // len(sides) for s in sides for k in s.kernels}
    return Side(
        ", ".join(s.name for s in sides),
        first.rank,
        sum(s.window_ns for s in sides),
        sum(s.forwards for s in sides),
        sum(s.tokens for s in sides),
        {c: sum(s.parts[c] for s in sides) // len(sides) for c in COMPONENTS},
        sum(times) // len(times) if len(times) == len(sides) else None,
        kernels,
        {k: _mean([s.metrics[k] for s in sides]) for k in first.metrics},
        first.findings,
        first.layout,
    )


def _kernels(model: Model, rank: int, tokens: int) -> dict[str, int]:
    lo, hi = model.trace.window.start_ns, model.trace.window.end_ns
    device = next(r.device for r in model.trace.capture.ranks if r.info.rank == rank)
    rows = (
        device.filter((pl.col("ts_ns") < hi) & (pl.col("end_ns") > lo) & (pl.col("kind") == "kernel"))
        .group_by(pl.col("name").cast(pl.String))
        .agg((pl.col("end_ns").clip(lo, hi) - pl.col("ts_ns").clip(lo, hi)).sum().alias("ns"))
        .sort("ns", "name", descending=[True, False])
    )
    return {name: ns // tokens for name, ns in rows.iter_rows()}


def _apportion(whole: Mapping[str, int], total: int) -> dict[str, int]:
    """`whole` scaled to sum to `total`: rounded down, and what is left goes to the largest remainders, first named first."""
    base = sum(whole.values())
    shares = {k: divmod(v * total, base) for k, v in whole.items()}
    out = {k: q for k, (q, _) in shares.items()}
    for k in sorted(shares, key=lambda k: -shares[k][1])[: total - sum(out.values())]:
        out[k] += 1
    return out


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if len(known) == len(values) and known else None


def _number(document: Mapping[str, object], *path: str) -> float | None:
    value: object = document
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

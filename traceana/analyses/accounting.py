"""Stages: where each rank's window went. busy + transfer + every cause = window, to the nanosecond."""

from __future__ import annotations

import polars as pl

from traceana.categories import spelled_out
from traceana.errors import ModelError
from traceana.model.chain import CAUSES
from traceana.model.kernel_classes import CLASSES
from traceana.model.model import Model
from traceana.result import Result, Tables
from traceana.tables.by_rank import ByRank

__all__ = ["NAME", "run"]

NAME = "stages"


def run(model: Model) -> Result:
    """Fact `stages`: one object a rank (docs/reference/report.md). Tables: `states`, and `unclassified`, the kernels no
    rule knows, by time. Raises ModelError if a sum is off by a nanosecond: that is a bug, and no number would be safe."""
    trace = model.trace
    window = trace.window.duration_ns
    stages: list[dict[str, object]] = []
    attribution, bounds = ByRank(model.blame.compact), ByRank(model.blame.bounds)
    for rank in trace.ranks:
        state = model.states[rank]
        length = (pl.col("end_ns") - pl.col("ts_ns")).sum()
        by_state = dict(state.compact.group_by("state").agg(length).iter_rows())
        by_class = dict(
            state.compact.filter(pl.col("state") == "busy").group_by("kernel_class").agg(length).iter_rows()
        )
        by_cause = dict(attribution[rank].group_by("cause").agg(length).iter_rows())
        busy, transfer, bubble = (int(by_state.get(s, 0)) for s in ("busy", "transfer", "bubble"))
        causes = {c: int(by_cause.get(c, 0)) for c in CAUSES}
        classes = {c: int(by_class.get(c, 0)) for c in CLASSES}
        if (
            busy + transfer + sum(causes.values()) != window
            or sum(classes.values()) != busy
            or bubble != sum(causes.values())
        ):
            raise ModelError(
                "the nanoseconds of a stage do not add up", where=f"rank {rank}", hint="report this with the capture"
            )
        gaps = pl.Series(state.bubbles.end - state.bubbles.start)
        stages.append(
            {
                "rank": rank,
                "pp_rank": trace.topology.stage.get(rank),
                "window_ns": window,
                "busy_ns": busy,
                "transfer_ns": transfer,
                "bubble_ns": bubble,
                "utilisation": busy / window,
                "reported_utilisation": state.resident_ns / window,
                "busy_by_class_ns": classes,
                "causes_ns": causes,
                "causes_bounds_ns": {
                    cause: [low, high]
                    for cause, low, high in bounds[rank].select("cause", "low_ns", "high_ns").iter_rows()
                },
                "gaps": {
                    "count": gaps.len(),
                    "p50_ns": _at(gaps, 0.5),
                    "p99_ns": _at(gaps, 0.99),
                    "max_ns": _at(gaps, 1.0),
                },
                "coverage": 1.0 - (causes["unknown"] + causes["ambiguous"]) / bubble if bubble else 1.0,
            }
        )
    losses = pl.concat([s.losses for s in model.states.values()])
    tables = Tables({}, {"states": lambda: _states(model), "unclassified": lambda: _unclassified(model)})
    return Result(NAME, tables, {"stages": stages}, losses)


def _states(model: Model) -> pl.DataFrame:
    return spelled_out(pl.concat([s.compact for s in model.states.values()]))


def _at(values: pl.Series, q: float) -> int | None:
    got = values.quantile(q, "lower") if values.len() else None
    return None if got is None else int(got)


def _unclassified(model: Model) -> pl.DataFrame:
    """Kernels of class `other` by total time, over all ranks, in the window."""
    trace = model.trace
    other = [n for n, c in trace.kernel_class.items() if c == "other"]
    frames = [
        r.device.filter(pl.col("name").is_in(other))
        .filter((pl.col("ts_ns") < trace.window.end_ns) & (pl.col("end_ns") > trace.window.start_ns))
        .select(pl.col("name").cast(pl.String), (pl.col("end_ns") - pl.col("ts_ns")).alias("ns"))
        for r in trace.capture.ranks
    ]
    rows = pl.concat(frames).group_by("name").agg(pl.col("ns").sum().alias("total_ns"), pl.len().alias("count"))
    return rows.sort("total_ns", "name", descending=[True, False])

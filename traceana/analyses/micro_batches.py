"""Micro-batches: how many are in flight, what each slot holds, whether stages merge them, and how stages overlap."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceana.arrays import distinct
from traceana.intervals import Intervals, intersect, union
from traceana.model.model import Model
from traceana.result import Result

__all__ = ["NAME", "run"]

NAME = "micro_batches"


def run(model: Model) -> Result:
    """Fact `micro_batches` (docs/reference/report.md). Tables: `in_flight` and `stages_busy`, step functions of time
    (ts_ns, end_ns, count)."""
    visits = model.window_visits()
    flight = _in_flight(model)
    overlap = _overlap(model)
    facts: dict[str, object] = {
        "slots": model.trace.slots or _slots(model),
        "in_flight": _summary(flight),
        "batch_size": _sizes(visits),
        **_merged(model, visits),
        "by_slot": _by_slot(model, visits),
        "overlap": {
            "mean_stages_busy": _mean(overlap),
            "all_stages_busy_ns": _at(overlap, len(model.stage_heads())),
            "no_stage_busy_ns": _at(overlap, 0),
            "histogram_ns": _histogram(overlap),
        },
    }
    tables = {"in_flight": flight if flight is not None else _steps([], model), "stages_busy": overlap}
    return Result(NAME, tables, {"micro_batches": facts})


def _slots(model: Model) -> int | None:
    top = model.trace.visits.get_column("slot").max()
    return int(top) + 1 if isinstance(top, int) else None


def _steps(spans: list[Intervals], model: Model) -> pl.DataFrame:
    """How many of the sets hold each instant of the window: ts_ns, end_ns, count; rows tile the window."""
    lo, hi = model.trace.window.start_ns, model.trace.window.end_ns
    start = np.concatenate([np.clip(s.start, lo, hi) for s in spans]) if spans else np.zeros(0, dtype=np.int64)
    end = np.concatenate([np.clip(s.end, lo, hi) for s in spans]) if spans else np.zeros(0, dtype=np.int64)
    cuts = distinct(np.concatenate([start, end, np.array([lo, hi], dtype=np.int64)]))
    at = cuts[:-1]
    count = np.searchsorted(np.sort(start), at, side="right") - np.searchsorted(np.sort(end), at, side="right")
    return pl.DataFrame({"ts_ns": at, "end_ns": cuts[1:], "count": count.astype(np.int64)})


def _in_flight(model: Model) -> pl.DataFrame | None:
    """Micro-batches in flight: from the start of their forward on the first stage until the first stage has received
    their tokens. None where the number of slots is unknown, for then a token message cannot be told whose it is."""
    trace = model.trace
    slots = model.trace.slots or _slots(model)
    if not trace.topology.is_pipeline or slots is None or trace.forwards.height == 0:
        return None
    heads = model.stage_heads()
    first, pp = heads[0], trace.topology.pp_size
    forwards = trace.forwards.filter(pl.col("rank") == first).select("visit", "ts_ns")
    # The first stage takes the tokens of visit v in visit v + slots - 1; the last stage sent them pp_size - 1 earlier.
    tokens = trace.messages.filter((pl.col("kind") == "output") & (pl.col("dst") == first)).select(
        (pl.col("visit") + pp - slots).alias("visit"), pl.col("recv_end_ns").alias("taken_ns")
    ).group_by("visit").agg(pl.col("taken_ns").max())  # fmt: skip
    # Where the message is in no trace (the last stage's began later), that visit's end stands for it.
    visits = trace.visits.filter(pl.col("rank") == first, pl.col("complete"))
    turn = visits.select((pl.col("visit") - slots + 1).alias("visit"), pl.col("end_ns").alias("turn_ns"))
    joined = forwards.join(tokens, on="visit", how="left").join(turn, on="visit", how="left").with_columns(
        pl.coalesce("taken_ns", "turn_ns").fill_null(trace.window.end_ns).alias("taken_ns")
    ).filter(pl.col("taken_ns") > pl.col("ts_ns"))  # fmt: skip
    spans = Intervals(joined.get_column("ts_ns").to_numpy(), joined.get_column("taken_ns").to_numpy())
    return _steps([spans], model)


def _overlap(model: Model) -> pl.DataFrame:
    """Stages that compute at each instant; a stage of several ranks computes while any of them does."""
    by_stage: dict[int, list[Intervals]] = {}
    for rank in model.trace.ranks:
        busy = model.states[rank].compact.filter(pl.col("state") == "busy")
        spans = union(busy.get_column("ts_ns").to_numpy(), busy.get_column("end_ns").to_numpy())
        by_stage.setdefault(model.trace.topology.stage.get(rank, 0), []).append(spans)
    window = Intervals(np.array([model.trace.window.start_ns]), np.array([model.trace.window.end_ns]))
    merged = [
        intersect(union(np.concatenate([s.start for s in group]), np.concatenate([s.end for s in group])), window)
        for _, group in sorted(by_stage.items())
    ]
    return _steps(merged, model)


def _histogram(steps: pl.DataFrame) -> list[list[int]]:
    rows = steps.group_by("count").agg((pl.col("end_ns") - pl.col("ts_ns")).sum().alias("ns")).sort("count")
    return [[int(c), int(ns)] for c, ns in rows.iter_rows()]


def _mean(steps: pl.DataFrame) -> float:
    length = pl.col("end_ns") - pl.col("ts_ns")
    weighted, total = steps.select((pl.col("count") * length).sum().alias("a"), length.sum().alias("b")).row(0)
    return float(weighted / total) if total else 0.0


def _at(steps: pl.DataFrame, count: int) -> int:
    return dict((c, ns) for c, ns in _histogram(steps)).get(count, 0)


def _summary(steps: pl.DataFrame | None) -> dict[str, object] | None:
    if steps is None:
        return None
    return {"mean": _mean(steps), "max": steps.get_column("count").max(), "histogram": _histogram(steps)}


def _sizes(visits: pl.DataFrame) -> dict[str, object]:
    sizes = visits.get_column("batch_size").drop_nulls()
    if sizes.len() == 0:
        return {"min": None, "p50": None, "max": None}
    return {"min": sizes.min(), "p50": int(sizes.quantile(0.5, "lower") or 0), "max": sizes.max()}


def _merged(model: Model, visits: pl.DataFrame) -> dict[str, object]:
    """Whether any visit holds another batch on another stage: then a stage merged micro-batches or traces are paired
    wrongly. Null where no visit was seen on two stages."""
    keys = ["step", "batch_size"]
    stage = visits.with_columns(
        pl.col("rank").replace_strict(dict(model.trace.topology.stage), default=0, return_dtype=pl.Int64).alias("stage")
    ).filter(pl.col("batch_size").is_not_null())
    seen = stage.group_by("visit").agg(
        pl.col("stage").n_unique().alias("stages"), pl.struct(keys).n_unique().alias("kinds")
    )
    compared = seen.filter(pl.col("stages") > 1)
    odd = compared.filter(pl.col("kinds") > 1)
    return {
        "merged_between_stages": odd.height > 0 if compared.height else None,
        "compared": compared.height,
        "mismatched_visits": odd.get_column("visit").sort().to_list(),
    }


def _by_slot(model: Model, visits: pl.DataFrame) -> list[dict[str, object]]:
    """Per slot, on the first stage: visits, how many held a batch, batch sizes, modes, and the p50 of a forward."""
    heads = model.stage_heads()
    if not heads or visits.height == 0 or visits.get_column("slot").null_count() == visits.height:
        return []
    mine = visits.filter(pl.col("rank") == heads[0])
    length = (pl.col("end_ns") - pl.col("ts_ns")).quantile(0.5, "lower").cast(pl.Int64).alias("forward_ns_p50")
    forwards = model.window_forwards().filter(pl.col("rank") == heads[0]).group_by("slot").agg(length)
    rows = (
        mine.group_by("slot")
        .agg(
            pl.len().alias("visits"),
            pl.col("batch_size").is_not_null().sum().alias("filled"),
            pl.col("batch_size").min().alias("batch_size_min"),
            pl.col("batch_size").quantile(0.5, "lower").cast(pl.Int64).alias("batch_size_p50"),
            pl.col("batch_size").max().alias("batch_size_max"),
            pl.col("mode").drop_nulls().value_counts(sort=True).alias("modes"),
        )
        .join(forwards, on="slot", how="left")
        .sort("slot")
    )
    out: list[dict[str, object]] = []
    for row in rows.to_dicts():
        modes = {str(m["mode"]): int(m["count"]) for m in row["modes"] or []}
        about: dict[str, object] = {**row, "modes": modes}
        out.append(about)
    return out

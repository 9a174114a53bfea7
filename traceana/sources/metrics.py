"""Prometheus text dumps (`/metrics`): counters and gauges of every stage, at a moment that no dump tells."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from traceana import schema
from traceana.sources.losses import Loss, loss
from traceana.sources.sidecar import Sidecar

__all__ = ["counter", "label", "read_metrics"]

_SAMPLE = r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$"
# Counters that only grow while a server lives, best first: they put the dumps in order.
_CLOCKS = ("sglang:http_requests_total", "sglang:realtime_tokens_total", "sglang:num_requests_total")


def read_metrics(sidecars: Sequence[Sidecar]) -> tuple[pl.DataFrame, list[Loss]]:
    """A METRICS frame of all dumps, `when` counting them from the oldest. The counters themselves give the order; the
    file name decides between dumps whose counters are the same."""
    losses: list[Loss] = []
    dumps: list[tuple[tuple[float, ...], str, pl.DataFrame]] = []
    for sidecar in sidecars:
        frame, bad = _dump(sidecar)
        if bad:
            losses.append(
                loss("metrics_line_malformed", "warning", bad, f"{sidecar.path.name}: lines that are no sample")
            )
        # Two dumps of two servers have no order in time; the name then keeps the result the same on every run.
        order = tuple(counter(frame, name) or 0.0 for name in _CLOCKS)
        dumps.append((order, sidecar.path.name, frame))
    dumps.sort(key=lambda d: d[:2])
    frames = [frame.with_columns(when=pl.lit(when, pl.Int32())) for when, (_, _, frame) in enumerate(dumps)]
    return (schema.METRICS.frame(pl.concat(frames)) if frames else schema.METRICS.empty()), losses


def _dump(sidecar: Sidecar) -> tuple[pl.DataFrame, int]:
    lines = pl.DataFrame({"line": sidecar.text.replace("\r", "").split("\n")})
    lines = lines.filter(~pl.col("line").str.contains(r"^\s*(?:#|$)"))
    frame = (
        lines.select(pl.col("line").str.extract_groups(_SAMPLE).alias("g"))
        .select(
            pl.col("g").struct["1"].alias("name"),
            pl.col("g").struct["2"].fill_null("").alias("labels"),
            pl.col("g").struct["3"].str.replace(r"^[+]?Inf$", "inf").cast(pl.Float64(), strict=False).alias("value"),
            pl.lit(sidecar.path.name).alias("file"),
        )
        .drop_nulls(["name", "value"])
    )
    return frame, lines.height - frame.height


def counter(metrics: pl.DataFrame, name: str, **labels: str) -> float | None:
    """Sum of the samples of `name` whose labels hold all of `labels`; None where there is none. Under pipeline
    parallelism every stage counts the same tokens, so name a stage (`pp_rank="0"`)."""
    rows = metrics.filter(pl.col("name") == name, *(label(k) == v for k, v in labels.items()))
    total = rows.get_column("value").sum()
    return float(total) if rows.height else None


def label(key: str) -> pl.Expr:
    """The value of the label `key` of a METRICS frame; null where the sample lacks it."""
    return pl.col("labels").str.extract(rf'(?:^|,){key}="((?:[^"\\]|\\.)*)"')

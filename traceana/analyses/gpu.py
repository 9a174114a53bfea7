"""GPU samples beside the trace: power against its limit as read, utilisation as the driver counts it, clocks, memory."""

from __future__ import annotations

import polars as pl

from traceana.model.model import Model
from traceana.result import Result

__all__ = ["NAME", "run"]

NAME = "gpu"


def run(model: Model) -> Result:
    """Fact `gpu`: per rank the samples of the steady window (before the profile) where the capture names one, else of
    the whole capture; `samples` says how many and `window` which."""
    every = samples = model.trace.capture.gpu_samples
    steady = model.facts.get("steady_window_ns")
    window = "the whole capture"
    if isinstance(steady, list | tuple) and len(steady) == 2 and all(isinstance(x, int) for x in steady):
        inside = samples.filter(pl.col("ts_ns").is_between(int(steady[0]), int(steady[1])))
        if inside.height:
            samples, window = inside, "the steady window before the profile"
    out: list[dict[str, object]] = []
    for rank in model.trace.ranks:
        mine = samples.filter(pl.col("rank") == rank)
        out.append(
            {
                "rank": rank,
                "power_w": _figures(mine, "power_w") | {"limit": _figures(mine, "power_limit_w")["max"]},
                "utilisation": _figures(mine, "utilisation"),
                "clocks_mhz": _figures(mine, "sm_clock_mhz"),
                "memory_bytes": mine.get_column("memory_bytes").max(),
                "temperature_c": _figures(mine, "temperature_c"),
                "samples": mine.height,
                "window": window,
            }
        )
    return Result(NAME, {"gpu_samples": every}, {"gpu": out})


def _figures(frame: pl.DataFrame, column: str) -> dict[str, object]:
    values = frame.get_column(column).drop_nulls()
    if values.len() == 0:
        return {"mean": None, "p50": None, "min": None, "max": None}
    return {"mean": values.mean(), "p50": values.quantile(0.5, "lower"), "min": values.min(), "max": values.max()}

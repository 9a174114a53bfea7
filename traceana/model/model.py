"""`Model`: a trace with its device states and its blame, which is what analyses read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import polars as pl

from traceana.model.blame import Blame, blame
from traceana.model.states import DeviceStates, all_states
from traceana.model.trace import Trace

__all__ = ["Model", "explain", "quantiles_ns"]


@dataclass(frozen=True, slots=True)
class Model:
    """See the module."""

    trace: Trace
    states: Mapping[int, DeviceStates]
    blame: Blame

    @property
    def facts(self) -> Mapping[str, object]:
        """The server's facts, empty where the capture has none."""
        server = self.trace.capture.server
        return server.facts if server is not None else {}

    def window_visits(self) -> pl.DataFrame:
        """Complete visits that lie wholly inside the visits common to all ranks; empty without visits."""
        first, last = self.trace.window.first_visit, self.trace.window.last_visit
        if first is None or last is None:
            return self.trace.visits.clear()
        return self.trace.visits.filter(pl.col("visit").is_between(first, last) & pl.col("complete"))

    def window_forwards(self) -> pl.DataFrame:
        """Forwards that lie wholly inside the window."""
        w = self.trace.window
        return self.trace.forwards.filter((pl.col("ts_ns") >= w.start_ns) & (pl.col("end_ns") <= w.end_ns))

    def stage_heads(self) -> list[int]:
        """One rank for each stage in stage order: the lowest of the stage's ranks in the capture."""
        heads: dict[int, int] = {}
        for rank in self.trace.ranks:
            heads.setdefault(self.trace.topology.stage.get(rank, 0), rank)
        return [heads[s] for s in sorted(heads)]


def explain(trace: Trace, progress: Callable[[str, int, int], None] | None = None) -> Model:
    """States and blame of `trace`. `progress` is told what is being done, for how many ranks, and of how many."""
    states = all_states(trace, progress)
    return Model(trace, states, blame(trace, states, progress))


def quantiles_ns(values: pl.Series, *, with_count: bool = False) -> dict[str, int | None]:
    """p50, p90, p99 and max of integer nanoseconds: values that occur (nearest rank from below), never interpolated."""
    keys = (("p50_ns", 0.5), ("p90_ns", 0.9), ("p99_ns", 0.99))
    out: dict[str, int | None] = {"count": values.len()} if with_count else {}
    if values.len() == 0:
        return out | {k: None for k, _ in keys} | {"max_ns": None}
    for key, q in keys:
        got = values.quantile(q, "lower")
        out[key] = None if got is None else int(got)
    top = values.max()
    out["max_ns"] = int(top) if isinstance(top, int) else None
    return out

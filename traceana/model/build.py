"""`build_trace`: aligned tables and what was matched in them become a `Trace`."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from traceana import schema
from traceana.matching.match import Matched
from traceana.model.forwards import find_forwards
from traceana.model.kernel_classes import classify
from traceana.model.trace import Trace
from traceana.model.window import common_window, narrow
from traceana.tables import CaptureTables

__all__ = ["build_trace"]


def build_trace(
    capture: CaptureTables,
    matched: Matched,
    collectives: pl.DataFrame,
    clock: pl.DataFrame,
    *,
    uncertainty_ns: Mapping[int, int | None] | None = None,
    window: tuple[int, int] | None = None,
) -> Trace:
    """The model of `capture`. All frames must be on trace time already (`traceana.clock.align`).

    `uncertainty_ns` is how far each rank's clock may be off anywhere in the window (default: at mid-window). `window` are
    start and end in nanoseconds from the start of the common window. Raises ModelError where the ranks
    have no common window.
    """
    forwards = {
        r.info.rank: find_forwards(r, matched.visits[r.info.rank], matched.launches[r.info.rank]) for r in capture.ranks
    }
    common = common_window(capture.ranks, matched.visits, forwards)
    if window is not None:
        common = narrow(common, common.start_ns + window[0], common.start_ns + window[1])
    names = [r.device.get_column("name").unique().cast(pl.String) for r in capture.ranks]
    at_middle: Mapping[int, int | None] = dict(clock.select("rank", "uncertainty_ns").iter_rows())
    return Trace(
        capture=capture,
        topology=matched.topology,
        window=common,
        visits=pl.concat(list(matched.visits.values())) if matched.visits else schema.VISITS.empty(),
        forwards=pl.concat(list(forwards.values())) if forwards else schema.FORWARDS.empty(),
        messages=matched.messages,
        controls=matched.controls,
        collectives=collectives,
        launches=matched.launches,
        clock=clock,
        kernel_class=classify(pl.concat(names).unique().sort()) if names else {},
        uncertainty_ns=at_middle if uncertainty_ns is None else uncertainty_ns,
        unmatched=matched.unmatched,
        losses=matched.losses,
    )

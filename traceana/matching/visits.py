"""Visits: the passes of a stage over its slots, cut at `recv_requests`.

The ordinal of a visit since the profiler's start is the same on every stage, because start and stop requests travel
down the pipeline in slot order (docs/concepts/matching.md); where the hook has marked the steps, their numbers say how
far apart the ordinals of two ranks are (`marks`). The profiler starts inside a visit, after its `recv_requests` began,
so the first one has no such span and is incomplete.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl

from traceana import schema
from traceana.intervals import Intervals, within
from traceana.matching.marks import slot_marks
from traceana.matching.spans import ANCHORS, main_thread, span_set
from traceana.tables import RankTables

__all__ = ["find_visits", "mark_numbers", "number_slots", "slots_by_marks", "visit_of"]

_RUNS = ("run_batch", "scheduler.run_batch")
_STEP = r"^step\[(?P<mode>[A-Z_]+)(?: bs=(?P<batch>[0-9]+))?(?: toks=(?P<tokens>[0-9]+))?"


def _first_set(annotations: pl.DataFrame, names: Sequence[str]) -> tuple[str | None, Intervals]:
    for name in names:
        spans = span_set(annotations, name)
        if spans.start.size:
            return name, spans
    zero = np.zeros(0, dtype=np.int64)
    return None, Intervals(zero, zero)


def find_visits(rank: RankTables, *, slots: int | None = None) -> pl.DataFrame:
    """VISITS of one rank in order, or an empty frame where the trace has no scheduler spans.

    `slots` is the number of slots of the loop (pp_size + async depth), where known. Times stay on the clock of `rank`.
    A visit with a forward carries the forward's `step[...]` annotation, its mode, batch
    size and tokens (a decode step has one token a request); where there is none, those of the hook's mark.
    """
    tid = main_thread(rank)
    own = rank.annotations.filter(pl.col("tid") == tid) if tid is not None else rank.annotations
    _, anchors = _first_set(own, ANCHORS)
    if anchors.start.size == 0:
        return schema.VISITS.empty()
    begin, stop = int(own.get_column("ts_ns").to_numpy().min()), int(own.get_column("end_ns").to_numpy().max())
    start = np.concatenate(([min(begin, int(anchors.start[0]))], anchors.start))
    end = np.concatenate((anchors.start, [max(stop, int(anchors.end[-1]))]))
    ordinal = np.arange(start.size)
    complete = np.ones(start.size, dtype=np.bool_)
    complete[0] = complete[-1] = False
    frame = pl.DataFrame({"visit": ordinal, "ts_ns": start, "end_ns": end, "complete": complete})
    runs = _first_set(own, _RUNS)[1]
    finished = own.filter(~pl.col("finished") & pl.col("name").is_in(_RUNS))
    run_frame = pl.DataFrame(
        {
            "visit": np.searchsorted(start, runs.start, side="right") - 1,
            "run_ts_ns": runs.start,
            "run_end_ns": runs.end,
        }
    ).unique("visit", keep="first", maintain_order=True)
    steps = own.select(
        pl.col("ts_ns"),
        pl.col("name").cast(pl.String).alias("step"),
        pl.col("name").cast(pl.String).str.extract_groups(_STEP).alias("g"),
    ).filter(pl.col("g").struct.field("mode").is_not_null())
    marks = slot_marks(rank)
    mark_frame = (
        marks.with_columns(_visits_at(start, marks)).unique("visit", keep="first", maintain_order=True)
        .select("visit", pl.col("slot", "mode", "batch_size", "tokens").name.prefix("marked_"))
    )  # fmt: skip
    step_frame = (
        steps.with_columns(
            _visits_at(start, steps),
            pl.col("g").struct.field("mode").str.to_lowercase().alias("mode"),
            pl.col("g").struct.field("batch").cast(pl.Int32, strict=False).alias("batch_size"),
            pl.col("g").struct.field("tokens").cast(pl.Int64, strict=False).alias("tokens"),
        )
        .drop("g", "ts_ns")
        .unique("visit", keep="first", maintain_order=True)
    )
    frame = (
        frame.join(run_frame, on="visit", how="left", maintain_order="left")
        .join(step_frame, on="visit", how="left", maintain_order="left")
        .join(mark_frame, on="visit", how="left", maintain_order="left")
        .with_columns(pl.coalesce(c, f"marked_{c}").alias(c) for c in ("mode", "batch_size", "tokens"))
        .with_columns(
            pl.when(pl.col("tokens").is_null() & (pl.col("mode") == "decode"))
            .then(pl.col("batch_size").cast(pl.Int64))
            .otherwise(pl.col("tokens"))
            .alias("tokens"),
            pl.lit(rank.info.rank).alias("rank"),
        )
        .with_columns(_slot(slots, "marked_slot"))
    )
    if finished.height:  # a run_batch cut by the profiler's stop has no known end
        cut = finished.get_column("ts_ns")
        frame = frame.with_columns(
            pl.when(pl.col("run_ts_ns").is_in(cut.implode()))
            .then(None)
            .otherwise(pl.col("run_end_ns"))
            .alias("run_end_ns")
        )
    return schema.VISITS.frame(frame)


def _visits_at(start: np.ndarray, rows: pl.DataFrame) -> pl.Series:
    return pl.Series("visit", np.searchsorted(start, rows.get_column("ts_ns").to_numpy(), side="right") - 1)


def _slot(slots: int | None, marked: str) -> pl.Expr:
    """The slot of each visit: what the mark says, counted on to visits without one; without marks the ordinal's."""
    if not slots:
        return pl.col(marked).cast(pl.Int32).alias("slot")
    turn = ((pl.col(marked).cast(pl.Int64) - pl.col("visit")) % slots).drop_nulls()
    one = turn.n_unique() == 1
    counted = pl.when(one).then((pl.col("visit") + turn.first()) % slots)
    plain = pl.when(turn.len() == 0).then(pl.col("visit") % slots)
    return pl.coalesce(marked, counted, plain).cast(pl.Int32).alias("slot")


def number_slots(visits: pl.DataFrame, slots: int | None) -> pl.DataFrame:
    """VISITS of one rank with a slot for every visit, once the number of slots is known, and for none where it is not."""
    if slots is None:
        return visits.with_columns(pl.lit(None, dtype=pl.Int32).alias("slot"))
    return visits.with_columns(_slot(slots, "slot"))


def slots_by_marks(visits: Iterable[pl.DataFrame]) -> int | None:
    """The number of slots of the loop, from the VISITS of all ranks whose slots the hook has marked. The loop visits them
    in turn, so from one time to the next that a slot holds a batch there are as many visits as slots, or a multiple.
    None where no slot came twice, or the marks do not follow such a turn."""
    turns, highest = [0], 0
    for frame in visits:
        marked = frame.select("visit", "slot").drop_nulls()
        if marked.height:
            turns += (marked.get_column("visit") - marked.get_column("slot")).diff().drop_nulls().unique().to_list()
            highest = max(highest, int(marked.get_column("slot").to_numpy().max()))
    slots = math.gcd(*turns)
    return slots if slots > highest else None


def mark_numbers(rank: RankTables, visits: pl.DataFrame) -> pl.DataFrame:
    """visit and number of each of the hook's marks (`marks.visit_offsets`)."""
    marks = slot_marks(rank)
    if visits.height == 0 or marks.height == 0:
        return pl.DataFrame(schema={"visit": pl.Int64, "number": pl.Int64})
    visit = visit_of(visits, marks.get_column("ts_ns").to_numpy())
    return pl.DataFrame({"visit": visit, "number": marks.get_column("number")}).filter(pl.col("visit") >= 0)


def visit_of(visits: pl.DataFrame, times: np.ndarray) -> np.ndarray:
    """Ordinal of the visit of one rank that holds each time, -1 where none does."""
    spans = Intervals(visits.get_column("ts_ns").to_numpy(), visits.get_column("end_ns").to_numpy())
    index = within(times.astype(np.int64), spans)
    ordinals = np.append(visits.get_column("visit").to_numpy(), -1)
    return ordinals[index]

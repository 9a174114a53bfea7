"""Device state of every nanosecond of the window: busy by kernel class, transfer, or bubble. See
docs/concepts/attribution.md, section 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceana import schema
from traceana.categories import in_numbers, spelled_out
from traceana.engine import side_by_side
from traceana.intervals import Intervals, intersect, intersect_pairs, subtract, union
from traceana.model.kernel_classes import is_communication
from traceana.model.trace import Trace
from traceana.model.transfers import collective_parts, message_parts
from traceana.tables import RankTables
from traceana.tables.by_rank import ByRank

__all__ = ["DeviceStates", "all_states"]


@dataclass(frozen=True, slots=True)
class DeviceStates:
    """States of one rank. `states` (STATES) tiles the window, and is kept as `compact`, its words as categories;
    `bubbles` is its idle part as a set.

    `labels` are stretches whose cause is told by the kernel that spins in them, without a chain (ts_ns, end_ns, cause,
    root_rank, detail): a collective that waits for its last rank, a transfer that two splits place differently, a
    send or receive whose direction or partner the trace lacks. `resident_ns` is the time in which any kernel, copy or
    fill is on the device, which is what utilisation counters report as busy.
    """

    rank: int
    compact: pl.DataFrame
    bubbles: Intervals
    labels: pl.DataFrame
    resident_ns: int
    losses: pl.DataFrame

    @property
    def states(self) -> pl.DataFrame:
        """STATES of the rank, made anew each time."""
        return spelled_out(self.compact)


_LABELS = {"ts_ns": pl.Int64, "end_ns": pl.Int64, "cause": pl.String, "root_rank": pl.Int32, "detail": pl.String}


def _label(spans: Intervals, cause: str, detail: str) -> pl.DataFrame:
    return pl.DataFrame({"ts_ns": spans.start, "end_ns": spans.end}).with_columns(
        pl.lit(cause).alias("cause"), pl.lit(None, dtype=pl.Int32).alias("root_rank"), pl.lit(detail).alias("detail")
    )


def _spans(frame: pl.DataFrame) -> Intervals:
    return union(frame.get_column("ts_ns").to_numpy(), frame.get_column("end_ns").to_numpy())


def _owned(frame: pl.DataFrame) -> pl.DataFrame:
    """The part of each activity in which no earlier-started one still runs: `[max(start, furthest end so far), end)`."""
    ordered = frame.sort("ts_ns", "end_ns", "stream", descending=[False, True, False], maintain_order=True)
    reach = pl.col("end_ns").cum_max().shift(1).fill_null(0)
    return ordered.with_columns(pl.max_horizontal("ts_ns", reach).alias("ts_ns")).filter(
        pl.col("end_ns") > pl.col("ts_ns")
    )


def all_states(trace: Trace, progress: Callable[[str, int, int], None] | None = None) -> dict[int, DeviceStates]:
    """The states of every rank over `trace.window`. `progress` is told for how many ranks, and of how many."""
    messages = ByRank(message_parts(trace.messages, trace.uncertainty_ns))
    gathered = ByRank(collective_parts(trace.collectives, trace.uncertainty_ns))
    forwards = ByRank(trace.forwards)

    def one(rank: RankTables) -> DeviceStates:
        me = rank.info.rank
        return _states(rank, trace, messages[me], gathered[me], forwards[me])

    states: dict[int, DeviceStates] = {}
    every = side_by_side(one, trace.capture.ranks, alone=not trace.capture.in_memory)
    if progress is not None:
        progress("account for every nanosecond", 0, len(trace.ranks))
    for done, (me, found) in enumerate(zip(trace.ranks, every, strict=True), 1):
        states[me] = found
        if progress is not None:
            progress("account for every nanosecond", done, len(trace.ranks))
    return states


def _states(
    rank: RankTables, trace: Trace, parts: pl.DataFrame, gathered: pl.DataFrame, forwards: pl.DataFrame
) -> DeviceStates:
    """The states of `rank`; `parts`, `gathered` and `forwards` are its messages, collectives and forwards."""
    me = rank.info.rank
    lo, hi = trace.window.start_ns, trace.window.end_ns
    device = rank.device.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    near = device.filter((pl.col("end_ns") > lo) & (pl.col("ts_ns") < hi))
    names = near.get_column("name").unique().cast(pl.String)
    nccl = [n for n in names if is_communication(n)]
    text = pl.col("name")
    near = near.with_columns(
        text.is_in(nccl).alias("communication"),
        text.replace_strict(dict(trace.kernel_class), default="other", return_dtype=pl.String).alias("kernel_class"),
    )
    compute = near.filter(~pl.col("communication")).select("ts_ns", "end_ns", "stream", "kernel_class")
    p2p = near.filter(pl.col("collective").is_in(["send", "recv"]).fill_null(False))
    lone = p2p.join(parts.select("row"), on="row", how="anti")
    other = near.filter(pl.col("communication")).join(p2p.select("row"), on="row", how="anti")
    # In a pipeline a SendRecv kernel without arguments is most likely a send or a receive. It is never work; whether it
    # waits or moves data, and for whom, the trace does not say.
    mute = other.clear()
    if trace.topology.is_pipeline:
        silent = text.cast(pl.String).str.contains("SendRecv") & pl.col("collective").is_null()
        mute, other = other.filter(silent), other.filter(~silent)
    matched = other.join(gathered.select("row", "sure_ns"), on="row", how="inner")
    alone = other.join(gathered.select("row"), on="row", how="anti").with_columns(
        (pl.col("end_ns") - pl.col("ts_ns")).alias("sure_ns")
    )
    # An unmatched collective's wait cannot be told from its transfer: it counts as busy as a whole, and is said to.
    moving = pl.concat([matched, alone], how="diagonal").select(
        (pl.col("end_ns") - pl.col("sure_ns")).alias("ts_ns"),
        "end_ns",
        "stream",
        pl.lit("collective").alias("kernel_class"),
    )
    busy = _owned(pl.concat([compute, moving]))
    busy_set = union(busy.get_column("ts_ns").to_numpy(), busy.get_column("end_ns").to_numpy())
    end, moved = parts.get_column("end_ns").to_numpy(), parts.get_column("sure_ns").to_numpy()
    window = Intervals(np.array([lo], dtype=np.int64), np.array([hi], dtype=np.int64))
    transfer = intersect(subtract(union(end - moved, end), busy_set), window)
    bubbles = subtract(subtract(window, busy_set), transfer)
    doubtful = intersect(_doubt(parts, gathered), bubbles)
    silent_set = subtract(intersect(_spans(mute), bubbles), doubtful)
    lone_set = subtract(subtract(intersect(_spans(lone), bubbles), doubtful), silent_set)
    waited = pl.col("end_ns") - pl.col("sure_ns") - pl.col("ambiguous_ns")
    who = pl.col("last_rank")
    late = gathered.filter((waited > pl.col("ts_ns")) & who.ne_missing(me)).select(
        "ts_ns", waited.alias("end_ns"), pl.when(who.is_null()).then(pl.lit("ambiguous")).otherwise(pl.lit("collective_late")).alias("cause"),
        who.cast(pl.Int32).alias("root_rank"),
        pl.when(who.is_null()).then(pl.lit("who comes last: the clocks cannot tell")).otherwise(pl.lit("in-stage collective")).alias("detail"),
    )  # fmt: skip
    taken = union(
        np.concatenate([doubtful.start, silent_set.start, lone_set.start]),
        np.concatenate([doubtful.end, silent_set.end, lone_set.end]),
    )
    waiting = Intervals(late.get_column("ts_ns").to_numpy(), late.get_column("end_ns").to_numpy())
    which, _, parts_late = intersect_pairs(waiting, subtract(bubbles, taken))
    late_rows = late[which].with_columns(pl.Series("ts_ns", parts_late.start), pl.Series("end_ns", parts_late.end))
    labels = pl.concat(
        [
            pl.DataFrame(schema=_LABELS),
            _label(doubtful, "ambiguous", "transfer or wait: the clocks cannot tell"),
            _label(silent_set, "unknown", "send or receive kernel without direction in the trace"),
            _label(lone_set, "unknown", "send or receive whose partner is not in the traces"),
            _owned(late_rows.with_columns(pl.lit(0).alias("stream"))).drop("stream"),
        ]
    ).sort("ts_ns")
    clipped = busy.with_columns(pl.col("ts_ns").clip(lo, hi), pl.col("end_ns").clip(lo, hi)).filter(
        pl.col("end_ns") > pl.col("ts_ns")
    )
    rows = pl.concat(
        [
            clipped.select("ts_ns", "end_ns", pl.lit("busy").alias("state"), "kernel_class"),
            _set_rows(transfer, "transfer"),
            _set_rows(bubbles, "bubble"),
        ]
    ).sort("ts_ns")
    rows = _merged(rows).with_columns(pl.lit(me, dtype=pl.Int32).alias("rank"))
    rows = rows.join_asof(
        forwards.select("visit", pl.col("ts_ns").alias("forward_ns"), pl.col("end_ns").alias("forward_end_ns")).sort("forward_ns"),
        left_on="ts_ns", right_on="forward_ns", strategy="backward",
    ).with_columns(pl.when(pl.col("ts_ns") < pl.col("forward_end_ns")).then(pl.col("visit")).alias("visit"))  # fmt: skip
    resident = intersect(union(near.get_column("ts_ns").to_numpy(), near.get_column("end_ns").to_numpy()), window)
    losses: list[dict[str, object]] = []
    if mute.height:
        losses.append({"name": "p2p_direction_unknown", "severity": "warning", "rank": me, "count": mute.height,
                       "detail": "SendRecv kernels carry no direction (profiled without CPU activities?): their time is unknown"})  # fmt: skip
    if alone.height:
        losses.append({"name": "collective_wait_unknown", "severity": "info", "rank": me, "count": alone.height,
                       "detail": "collective kernels not matched over their ranks: waiting and transfer count as busy together"})  # fmt: skip
    table = schema.LOSSES.frame(losses) if losses else schema.LOSSES.empty()
    return DeviceStates(me, in_numbers(schema.STATES.frame(rows)), bubbles, labels, resident.total, table)


def _doubt(*parts: pl.DataFrame) -> Intervals:
    """What the clocks cannot place: it lies just before the part of each kernel that surely moves data."""
    stop = [p.select(pl.col("end_ns") - pl.col("sure_ns")).to_series().to_numpy() for p in parts]
    start = [e - p.get_column("ambiguous_ns").to_numpy() for e, p in zip(stop, parts, strict=True)]
    return union(np.concatenate(start), np.concatenate(stop))


def _set_rows(spans: Intervals, state: str) -> pl.DataFrame:
    return pl.DataFrame({"ts_ns": spans.start, "end_ns": spans.end}).with_columns(
        pl.lit(state).alias("state"), pl.lit(None, dtype=pl.String).alias("kernel_class")
    )


def _merged(rows: pl.DataFrame) -> pl.DataFrame:
    """Neighbouring rows of the same state and class become one."""
    new = (
        (pl.col("state") != pl.col("state").shift(1))
        | pl.col("kernel_class").ne_missing(pl.col("kernel_class").shift(1))
        | (pl.col("ts_ns") != pl.col("end_ns").shift(1))
    ).fill_null(True)
    return (
        rows.with_columns(new.cum_sum().alias("run"))
        .group_by("run", maintain_order=True)
        .agg(pl.col("ts_ns").first(), pl.col("end_ns").last(), pl.col("state").first(), pl.col("kernel_class").first())
        .drop("run")
    )

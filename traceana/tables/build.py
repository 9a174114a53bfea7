"""Raw Kineto events -> the tables of one rank, in epoch nanoseconds on that rank's own clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import cast

import numpy as np
import numpy.typing as npt
import polars as pl

from traceana import schema
from traceana.sources.kineto import RawTrace
from traceana.sources.kineto_events import (
    ANNOTATION,
    CALL,
    GPU_ANNOTATION,
    MEMSET,
    NULL,
    OP,
    OVERHEAD,
    Events,
    Lost,
    impossible_ranks,
)
from traceana.sources.losses import Loss, Severity, loss, losses_frame
from traceana.tables.capture import RankInfo, RankTables
from traceana.tables.check import check_links, sound_events
from traceana.tables.identity import check_facts
from traceana.tables.messages import message_columns

__all__ = ["build_rank", "epoch_base"]

Ints = npt.NDArray[np.int64]

EPOCH_NS = 10**18  # 2001-09-09: every epoch time is larger, and no time since a base is
MAX_BASE_NS = 22 * 10**17  # 2039
_KINDS = ["kernel", "memcpy", "memset"]
_EXPECTED = {"phase s", "phase f", "phase t", "phase i", "phase I", "category Trace", "category python_function"}
_RANGES = 3  # byte ranges a loss names


def epoch_base(events: Events, base_ns: int, rank: int) -> tuple[int, list[Loss]]:
    """What to add to the times of `events` to get epoch nanoseconds, and a loss where that is not simply the base: a
    warning where it leaves the rank without a place beside the others."""
    ts = events.columns["ts"]
    if ts.size and int(np.median(ts)) >= EPOCH_NS:
        note = "times are epoch times already; the base was not added"
        return 0, [loss("base_time_not_added", "info", 1, note, rank)] if base_ns else []
    if not 0 <= base_ns <= MAX_BASE_NS:
        note = f"the base time {base_ns} ns is impossible; it was not added"
        return 0, [loss("base_time_not_added", "warning", 1, note, rank)]
    return base_ns, []


def build_rank(trace: RawTrace, info: RankInfo) -> RankTables:
    """The tables of `trace`: every frame as its schema says, sorted by start, longer first on ties; `losses` says what
    of the file is not in them and what in them does not fit together."""
    base, unbased = epoch_base(trace.events, info.base_time_ns, info.rank)
    losses = [*file_losses(trace, info.rank), *check_facts(trace.header, info.rank), *unbased]
    keep, dropped = sound_events(trace.events, info.rank)
    losses += dropped
    if odd := impossible_ranks(trace.events.talks):
        losses.append(loss("rank_impossible", "warning", odd, "messages name a rank that cannot be", info.rank))
    parts = _Parts(trace.events, keep, base)
    device = parts.device(info)
    calls = parts.table(schema.CALLS, CALL)
    losses += check_links(device, calls, info.rank)
    if not device.height:
        losses.append(loss("no_device_events", "warning", 1, "the trace holds no GPU activity", info.rank))
    return RankTables(
        info=info,
        device=device,
        calls=calls,
        annotations=parts.table(schema.ANNOTATIONS, ANNOTATION),
        gpu_annotations=parts.table(schema.GPU_ANNOTATIONS, GPU_ANNOTATION),
        ops=parts.table(schema.OPS, OP),
        overheads=parts.table(schema.OVERHEADS, OVERHEAD),
        losses=losses_frame(losses),
    )


class _Parts:
    """The kept events of a trace, given out by kind."""

    def __init__(self, events: Events, keep: npt.NDArray[np.bool_], base: int) -> None:
        self._events = events
        self._kind = np.where(keep, events.columns["kind"], 255)
        self._ts: Ints = events.columns["ts"] + base
        self._end: Ints = self._ts + events.columns["dur"]

    def table(self, table: schema.Table, kind: int) -> pl.DataFrame:
        return table.frame(self._frame(np.flatnonzero(self._kind == kind), gpu=kind == GPU_ANNOTATION))

    def device(self, info: RankInfo) -> pl.DataFrame:
        rows = self._sorted(np.flatnonzero(self._kind <= MEMSET))
        frame = self._frame(rows, gpu=True, ordered=True)
        frame = frame.with_columns(pl.Series("kind", _KINDS, dtype=pl.Categorical())[self._kind[rows]])
        gpu = self._frame(np.flatnonzero(self._kind == GPU_ANNOTATION), gpu=True)
        return schema.DEVICE.frame(frame.hstack(message_columns(self._events, rows, frame, gpu, info)))

    def _sorted(self, rows: Ints) -> Ints:
        """`rows` by start, longer first on ties, then as in the file."""
        ts = self._ts[rows]
        order = np.argsort(ts, kind="stable")
        ts = ts[order]
        same = ts[1:] == ts[:-1]
        if same.any():
            ties = np.flatnonzero(np.concatenate((same, [False])) | np.concatenate(([False], same)))
            tied = order[ties]
            order[ties] = tied[np.lexsort((-self._end[rows[tied]], ts[ties]))]
        return rows[order]

    def _frame(self, rows: Ints, *, gpu: bool, ordered: bool = False) -> pl.DataFrame:
        columns = self._events.columns
        if not ordered:
            rows = self._sorted(rows)
        pid, tid = columns["pid"][rows], columns["tid"][rows]
        frame = pl.DataFrame(
            {
                "ts_ns": self._ts[rows],
                "end_ns": self._end[rows],
                "pid": pid,
                "tid": tid,
                "finished": columns["finished"][rows],
            }
        ).with_columns(self._events.names[rows].alias("name"))
        device, stream = columns["device"][rows], columns["stream"][rows]
        if gpu:  # Kineto's process of a GPU row is the device and its thread the stream
            device, stream = np.where(device == NULL, pid, device), np.where(stream == NULL, tid, stream)
            device = np.where((device >= -1) & (device < 1 << 31), device, NULL)
        return frame.with_columns(
            _nullable("device", device),
            _nullable("stream", stream),
            *(_nullable(name, columns[name][rows]) for name in ("correlation", "external_id", "bytes")),
        )


def _nullable(name: str, values: Ints) -> pl.Series:
    series = pl.Series(name, values)
    missing = values == NULL
    return series.set(pl.Series(missing), None) if missing.any() else series


def file_losses(trace: RawTrace, rank: int | None) -> list[Loss]:
    """What of the file gave no event, as losses: one for each kind of damage, with the first byte ranges."""
    grouped: dict[tuple[str, str], list[Lost]] = defaultdict(list)
    for item in trace.lost:
        grouped[item.name, item.severity].append(item)
    losses: list[Loss] = []
    for (name, severity), items in grouped.items():
        places = [f"bytes {i.start} to {i.stop}" for i in items if i.start >= 0]
        more = f" and {len(places) - _RANGES} more" if len(places) > _RANGES else ""
        detail = "; ".join(filter(None, [items[0].note, ", ".join(places[:_RANGES]) + more]))
        count = sum(i.count for i in items)
        losses.append(loss(name, cast("Severity", severity), count, f"{trace.path.name}: {detail}", rank))
    losses += _unused(trace.events.unused, rank)
    return losses


def _unused(unused: Counter[str], rank: int | None) -> Iterable[Loss]:
    odd = {what: count for what, count in sorted(unused.items()) if what not in _EXPECTED}
    if odd:
        detail = ", ".join(f"{what} ({count})" for what, count in list(odd.items())[:8])
        yield loss("events_not_needed", "info", sum(odd.values()), f"events that no table holds: {detail}", rank)

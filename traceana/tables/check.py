"""Impossible events: which are kept out of the tables, what is only noted, and the losses that say so.

Rules, each counted: a negative duration; a time stamp of zero in a trace that does not start near zero; a device
activity far outside the time of the trace's CPU events; a span that ends later than everything else by more than the
whole trace lasts; a device activity that covers whole later ones of its own stream by more than a tenth of a second. A
stream runs its kernels one after the other, so such a duration is a broken stamp and would swallow every gap. Small
overlaps (programmatic dependent launch, branches of a graph) are real and stay.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import polars as pl

from traceana.categories import matching
from traceana.sources.kineto_events import GPU_ANNOTATION, MEMSET, OVERHEAD, Events
from traceana.sources.losses import Loss, loss

__all__ = ["check_links", "sound_events"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SECOND = 10**9
HOUR = 3600 * SECOND
COVERED = SECOND // 10
_LAUNCH = r"^(?:cuda|cu|hip|hipExt|hipModule|hipExtModule)(?:Graph)?Launch"
_NCCL = re.compile(r"nccl", re.IGNORECASE)


def sound_events(events: Events, rank: int) -> tuple[Bools, list[Loss]]:
    """Which of `events` can be believed, and the losses for the others. Times are as in the file (no base added)."""
    ts, dur, kind = events.columns["ts"], events.columns["dur"], events.columns["kind"]
    keep = np.ones(ts.size, dtype=np.bool_)
    losses: list[Loss] = []
    if not ts.size:
        return keep, losses
    device = kind <= MEMSET

    def drop(bad: Bools, name: str, why: str) -> None:
        bad = bad & keep
        count = int(bad.sum())
        if count:
            first = int(np.flatnonzero(bad)[0])
            what = f"{events.names[first]!s:.80} (ts {ts[first]} ns, dur {dur[first]} ns)"
            losses.append(loss(name, "warning", count, f"{why}; kept out of all sums; the first: {what}", rank))
            keep[bad] = False

    drop(dur < 0, "event_negative_duration", "a duration below zero")
    if (ts == 0).any():
        others = ts[keep & (ts > 0)]
        near = others.size > 0 and int(others.min()) <= int(others.max() - others.min()) + SECOND
        zero = ts == 0
        bad = zero & device & (dur == 0) if near else zero & (others.size > 0)
        drop(bad, "event_zero_timestamp", "a time stamp of zero, which no clock gave")
    drop(_outside(ts, dur, kind, keep), "event_outside_trace", "a device activity far outside the trace's CPU events")
    drop(
        _endless(events, keep), "event_absurd_duration", "ends later than everything else by more than the trace lasts"
    )
    drop(_covering(events, keep & device), "event_absurd_duration", "covers whole later activities of its own stream")
    return keep, losses


def _outside(ts: Ints, dur: Ints, kind: npt.NDArray[np.uint8], keep: Bools) -> Bools:
    host = keep & (kind > MEMSET) & (kind != GPU_ANNOTATION) & (kind != OVERHEAD) & (dur < HOUR) & (ts != 0)
    if not host.any():
        return np.zeros(ts.size, dtype=np.bool_)
    first, last = int(ts[host].min()), int((ts[host] + dur[host]).max())
    room = last - first + SECOND
    outside: Bools = ((kind <= MEMSET) | (kind == GPU_ANNOTATION)) & ((ts < first - room) | (ts > last + room))
    return outside


def _endless(events: Events, keep: Bools) -> Bools:
    """Long spans that end beyond the rest of the trace by more than its length. Waiting NCCL kernels and CPU spans may
    truly be long, so they are only suspected from an hour on."""
    ts, dur, kind = events.columns["ts"], events.columns["dur"], events.columns["kind"]
    suspect = keep & (dur >= SECOND)
    rows = np.flatnonzero(suspect & (dur < HOUR))
    if rows.size:
        waits = np.array([_NCCL.search(name) is not None for name in events.names[rows].cast(pl.String()).to_list()])
        suspect[rows[waits | (kind[rows] > MEMSET)]] = False
    rest = keep & ~suspect
    if not suspect.any() or not rest.any():
        return np.zeros(ts.size, dtype=np.bool_)
    first, last = int(ts[rest].min()), int((ts[rest] + dur[rest]).max())
    endless: Bools = suspect & (ts + dur > last + max(last - first, SECOND))
    return endless


def _covering(events: Events, rows_of: Bools) -> Bools:
    """Device activities that last beyond the end of at least two later ones of their stream, by `COVERED` or more."""
    ts, dur = events.columns["ts"], events.columns["dur"]
    found = np.zeros(ts.size, dtype=np.bool_)
    suspects = np.flatnonzero(rows_of & (dur >= COVERED))
    if not suspects.size:
        return found
    device, stream = events.columns["device"], events.columns["stream"]
    for row in suspects[:1000].tolist():
        same = rows_of & (stream == stream[row]) & (device == device[row])
        end = ts[row] + dur[row]
        covered = same & (ts > ts[row]) & (ts + dur <= end) & (ts <= end - COVERED)
        found[row] = int(covered.sum()) >= 2
    return found


def check_links(device: pl.DataFrame, calls: pl.DataFrame, rank: int) -> list[Loss]:
    """What does not fit together between calls and device activities of a rank (both as in the schema). All of it stays
    in the tables."""
    losses: list[Loss] = []
    if device.height:
        losses += _check_device(device, rank)
    if not calls.height or not device.height:
        return losses
    known = calls.filter(pl.col("correlation").is_not_null())
    if known.height != (distinct := known.get_column("correlation").n_unique()):
        count = known.height - distinct
        losses.append(loss("duplicate_correlation", "warning", count, "calls share a correlation id", rank))
    launched = device.filter(pl.col("correlation").is_not_null()).select("ts_ns", "correlation")
    orphans = device.height - launched.join(known, on="correlation", how="semi").height
    if orphans:
        losses.append(loss("kernel_without_launch", "info", orphans, "activities whose launch was not recorded", rank))
    losses += _check_launches(launched, known, rank)
    first_call = known.group_by("correlation").agg(pl.col("ts_ns").min().alias("call_ns"))
    early = launched.join(first_call, on="correlation").select((pl.col("call_ns") - pl.col("ts_ns")).alias("early"))
    early = early.filter(pl.col("early") > 0)
    if early.height:
        detail = f"the GPU's clock runs ahead of the CPU's by up to {early.get_column('early').to_numpy().max()} ns"
        losses.append(loss("kernel_before_launch", "warning", early.height, detail, rank))
    return losses


def _check_device(device: pl.DataFrame, rank: int) -> list[Loss]:
    losses: list[Loss] = []
    gpus = device.get_column("device").drop_nulls().unique().sort().to_list()
    if len(gpus) > 1:
        detail = f"activities of GPUs {', '.join(map(str, gpus))}; one rank should use one"
        losses.append(loss("several_devices", "warning", len(gpus), detail, rank))
    before = pl.col("end_ns").cum_max().shift(1).over("device", "stream")
    overlap = device.select((before - pl.col("ts_ns")).alias("by")).filter(pl.col("by") > 0)
    if overlap.height:
        most = overlap.get_column("by").to_numpy().max()
        detail = f"activities that start before an earlier one of their stream ends, by up to {most} ns"
        losses.append(loss("overlap_on_stream", "info", overlap.height, detail, rank))
    return losses


def _check_launches(launched: pl.DataFrame, known: pl.DataFrame, rank: int) -> list[Loss]:
    """Launch calls without an activity: expected where the profiler started or stopped in between, else a hole."""
    launches = known.filter(matching(known.get_column("name"), _LAUNCH))
    lone = launches.join(launched, on="correlation", how="anti").get_column("ts_ns")
    if not lone.len():
        return []
    matched = launches.join(launched, on="correlation", how="semi").get_column("ts_ns")
    first, last = matched.min(), matched.max()
    assert first is None or isinstance(first, int)
    edge = lone.len() if first is None else int(((lone < first) | (lone > last)).sum())
    losses: list[Loss] = []
    if edge:
        losses.append(
            loss(
                "launch_without_kernel_at_edge",
                "info",
                edge,
                "launches before the first or after the last matched one",
                rank,
            )
        )
    if lone.len() > edge:
        count = lone.len() - edge
        losses.append(
            loss("launch_without_kernel", "warning", count, "the profiler lost device activities in mid-trace", rank)
        )
    return losses

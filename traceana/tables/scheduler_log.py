"""The scheduler's lines on the wall clock: which of them a profiler disturbed, and which measure decode alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from traceana.sources.server_log import ServerLog
from traceana.sources.sidecar import SECOND, to_ns

__all__ = ["LogClock", "batch_lines", "log_clock", "profile_runs"]

_QUARTER = 15 * 60 * SECOND  # every time zone is a whole number of quarters of an hour from UTC
_NEAR = 120 * SECOND  # how far apart two records of one event may be
STAGE = ["pp_rank", "tp_rank", "dp_rank"]


class LogClock(NamedTuple):
    """`offset_ns`: the log's zone against UTC, None where nothing tells (times are then read as UTC)."""

    resolution_ns: int
    offset_ns: int | None
    source: str | None


def log_clock(logs: Sequence[ServerLog], loads_ns: Sequence[int], requests: pl.DataFrame) -> LogClock:
    """The zone of the logs, from events that both the log and something on UTC record: the profile id (the moment of
    the request), /v1/loads (it holds its own time), and the clients' requests."""
    resolution = max((log.resolution_ns for log in logs), default=SECOND)
    for log in logs:
        for row in log.profile.filter(pl.col("event") == "Profiling starts").drop_nulls("id").iter_rows(named=True):
            at = to_ns(row["id"]) if str(row["id"]).replace(".", "", 1).isdigit() else None
            if at is not None and (offset := _offset(int(row["printed_ns"]) - at)) is not None:
                return LogClock(resolution, offset, "profile id")
    for log in logs:
        for printed in log.access.filter(pl.col("path") == "/v1/loads").get_column("printed_ns"):
            for at in loads_ns:
                if (offset := _offset(int(printed) - at)) is not None:
                    return LogClock(resolution, offset, "/v1/loads")
    for log in logs:
        answered = log.access.filter(pl.col("method") == "POST").get_column("printed_ns").median()
        ended = requests.get_column("end_ns").median()
        if isinstance(answered, (int, float)) and isinstance(ended, (int, float)):
            offset = _offset(int(answered) - int(ended))  # quarters of an hour are told apart, not nanoseconds
            if offset is not None:
                return LogClock(resolution, offset, "client requests")
    return LogClock(resolution, None, None)


def _offset(difference_ns: int) -> int | None:
    """`difference_ns` rounded to a time zone; None where it is none."""
    offset = round(difference_ns / _QUARTER) * _QUARTER
    return offset if abs(difference_ns - offset) <= _NEAR and abs(offset) <= 14 * 3600 * SECOND else None


def batch_lines(
    logs: Sequence[ServerLog], offset_ns: int, since_ns: int | None = None
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """DECODE_LOG and PREFILL_LOG columns of all logs in order of time, with two more: `file`, and `follows_decode` (the
    stage's line before is a decode line). Lines of before `since_ns` (epoch) are left out, and so are the profiles
    that had ended by then: the log of a server that was captured before tells of those captures too."""
    decode: list[pl.DataFrame] = []
    prefill: list[pl.DataFrame] = []
    for log in logs:
        kinds = {"decode": log.decode, "prefill": log.prefill}
        lines = pl.concat([f.with_columns(kind=pl.lit(k)) for k, f in kinds.items()], how="diagonal")
        earliest = None if since_ns is None else since_ns + offset_ns - log.resolution_ns + 1
        if earliest is not None:
            lines = lines.filter(pl.col("printed_ns") >= earliest)
        if not lines.height:
            continue
        starts, ends = (_events(log, event, earliest) for event in ("Profiling starts", "Profiling done"))
        at = lines.get_column("line").to_numpy()
        started, ended = np.searchsorted(starts, at), np.searchsorted(ends, at)
        # A log that begins inside a profile ends more profiles than it starts.
        missing = max((i + 1 - int(np.searchsorted(starts, end)) for i, end in enumerate(ends.tolist())), default=0)
        started = started + max(missing, 0)
        lines = lines.with_columns(
            pl.Series("cycle", started + ended),
            pl.Series("phase", np.where(started == 0, "before", np.where(started > ended, "profile", "after"))),
            ts_ns=pl.col("printed_ns") - offset_ns,
            file=pl.lit(log.file),
        ).sort("line")
        before = pl.col("kind").shift(1).over(STAGE) == "decode"
        lines = lines.with_columns(
            follows_decode=before.fill_null(False),
            pure=(before & (pl.col("cycle").shift(1).over(STAGE) == pl.col("cycle"))).fill_null(False),
        )
        decode.append(lines.filter(pl.col("kind") == "decode"))
        prefill.append(lines.filter(pl.col("kind") == "prefill"))
    return _joined(decode), _joined(prefill)


def _joined(frames: list[pl.DataFrame]) -> pl.DataFrame:
    frames = [f for f in frames if f.height]
    return pl.concat(frames, how="diagonal").sort("ts_ns", maintain_order=True) if frames else pl.DataFrame()


def _events(log: ServerLog, event: str, earliest_ns: int | None) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    rows = log.profile.filter(pl.col("event") == event)
    if earliest_ns is not None:
        rows = rows.filter(pl.col("printed_ns") >= earliest_ns)
    lines = rows.get_column("line")
    return lines.cast(pl.Int64()).sort().to_numpy()


def profile_runs(logs: Sequence[ServerLog], offset_ns: int, since_ns: int | None = None) -> list[dict[str, object]]:
    """One row per rank and profile: id, stage, and when the rank started, began to stop and was done (epoch ns, null
    where the log does not say). Runs that were done before `since_ns` are left out."""
    rows: list[dict[str, object]] = []
    for log in logs:
        if not log.profile.height:
            continue
        event = pl.col("event")
        when = pl.col("ts_ns")
        runs = (
            log.profile.with_columns(pl.col("dp_rank").fill_null(0), ts_ns=pl.col("printed_ns") - offset_ns)
            .sort("line")
            .with_columns(run=(event == "Profiling starts").cum_sum().over(STAGE))
            .group_by([*STAGE, "run"], maintain_order=True)
            .agg(
                pl.col("id").drop_nulls().first(),
                pl.col("stage").drop_nulls().first(),
                when.filter(event == "Profiling starts").first().alias("started_ns"),
                when.filter(event == "Stop profiling").first().alias("stopping_ns"),
                when.filter(event == "Profiling done").first().alias("done_ns"),
            )
            .sort(["run", *STAGE])
        )
        if since_ns is not None:
            runs = runs.filter(pl.max_horizontal("started_ns", "stopping_ns", "done_ns") + log.resolution_ns > since_ns)
        rows += runs.drop("run").to_dicts()
    return rows

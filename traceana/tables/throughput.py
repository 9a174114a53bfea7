"""Tokens per second that a server reached by itself: what a prediction is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import polars as pl

from traceana.sources.losses import Loss, loss
from traceana.sources.manifest import Window
from traceana.sources.metrics import counter
from traceana.sources.server_log import ServerLog
from traceana.sources.sidecar import SECOND

__all__ = ["Interval", "interval_of_dumps", "throughput"]

_TOKENS = "sglang:realtime_tokens_total"
_MOST_VALUES = 256


class Interval(NamedTuple):
    """Two /metrics dumps and the time between them; `source` says how that time is known."""

    first: int
    last: int
    ns: int
    source: str


def interval_of_dumps(
    metrics: pl.DataFrame, logs: Sequence[ServerLog], steady_ns: tuple[int, int] | None, offset_ns: int
) -> tuple[Interval | None, list[Loss]]:
    """The dumps around the steady window. A dump does not say when it was made, but the server counts the requests for
    /metrics and logs each of them."""
    dumps: list[int] = metrics.get_column("when").unique().sort().to_list()
    if len(dumps) < 2:
        return None, []
    times = {
        d: t for d in dumps if (t := _time_of_dump(metrics.filter(pl.col("when") == d), logs, offset_ns)) is not None
    }
    first, last = dumps[0], dumps[-1]
    if steady_ns is None or (len(dumps) > 2 and len(times) < len(dumps)):
        if first in times and last in times and times[first] < times[last]:
            ns = times[last] - times[first]
            return Interval(first, last, ns, "the log's lines of the two requests, to a second"), []
        return None, [loss("metrics_without_time", "info", len(dumps), "dumps of /metrics at unknown times: no rate")]
    start_ns, end_ns = steady_ns
    if len(dumps) > 2:
        first = min(dumps, key=lambda d: abs(times[d] - start_ns))
        last = min(dumps, key=lambda d: abs(times[d] - end_ns))
    off = abs(times[last] - times[first] - (end_ns - start_ns)) if first in times and last in times else 0
    if first == last or off > 2 * SECOND:
        return None, [
            loss("metrics_without_time", "info", len(dumps), "no two dumps of /metrics fit the steady window")
        ]
    return Interval(first, last, end_ns - start_ns, "the steady window"), []


def _time_of_dump(dump: pl.DataFrame, logs: Sequence[ServerLog], offset_ns: int) -> int | None:
    ordinal = counter(dump, "sglang:http_requests_total", endpoint="/metrics")
    for log in logs:
        lines = log.access.filter(pl.col("path") == "/metrics").get_column("printed_ns")
        if ordinal is not None and 1 <= ordinal <= len(lines):
            return int(lines[int(ordinal) - 1]) - offset_ns
    return None


def throughput(
    decode: pl.DataFrame,
    prefill: pl.DataFrame,
    metrics: pl.DataFrame,
    interval: Interval | None,
    windows: Sequence[Window] = (),
) -> dict[str, object]:
    """The report's `throughput`, in tokens per second of the whole server.

    `decode` is the mean of the first stage's `gen throughput` lines without a prefill since the line before and before
    any profile (they cover all micro-batches). `decode_counter` is the rise of the token counter, prefills between
    included: over `windows`, the recorder's own, else over `interval`. Where a capture lacks one, the other stands in
    and `source` says so.
    """
    lines = first_stage(decode)
    pure = lines.filter(pl.col("pure"), pl.col("phase") == "before") if lines.height else lines
    source = "log: decode lines before the profile without a prefill between"
    if lines.height and not pure.height:
        pure = lines.filter(pl.col("pure"), pl.col("phase") == "after")
        source = "log: decode lines outside the profiles without a prefill between"
    rate = _over_replicas(pure)
    counted, computed = _rate(metrics, interval, "decode"), _rate(metrics, interval, "prefill_compute")
    counter_source = interval.source if interval and counted is not None else None
    if (over := _over_windows([(w.ns, w.decode_tokens) for w in windows])) is not None:
        counted, computed = over, _over_windows([(w.ns, w.prefill_tokens) for w in windows])
        counter_source = f"{len(windows)} windows that the recorder counted"
    if rate is None and counted is not None:
        rate, source = counted, "metrics: decode tokens between two dumps, prefills between included"
    if rate is None and lines.height:
        rate, source = (
            _over_replicas(lines.filter(pl.col("phase") != "profile")),
            "log: decode lines with prefills between",
        )
    disturbed = lines.filter(pl.col("follows_decode"), pl.col("phase") == "profile") if lines.height else lines
    logged = _logged_prefill(first_stage(prefill))
    values: list[float] = pure.get_column("gen_throughput").to_list() if pure.height else []
    return {
        "decode": rate,
        "prefill": computed if computed is not None else logged,
        "source": source if rate is not None else None,
        "prefill_source": "metrics" if computed is not None else "log: tokens of the prefill lines" if logged else None,
        "decode_lines": len(values),
        "decode_spread": _spread(pure),
        "decode_values": values if 0 < len(values) <= _MOST_VALUES else None,
        "decode_counter": counted,
        "counter_source": counter_source,
        "decode_profiled": _over_replicas(disturbed),
        "decode_profiled_lines": disturbed.height,
    }


def first_stage(lines: pl.DataFrame) -> pl.DataFrame:
    """The lines of the first stage's first tensor-parallel rank: every stage prints the same tokens."""
    if not lines.height:
        return lines
    stage = lines.filter(pl.col("pp_rank") == pl.col("pp_rank").min())
    return stage.filter(pl.col("tp_rank") == pl.col("tp_rank").min())


def _over_replicas(lines: pl.DataFrame) -> float | None:
    """Mean per data-parallel replica, summed: each replica prints its own tokens."""
    if not lines.height:
        return None
    means = lines.group_by(pl.col("dp_rank").fill_null(0)).agg(pl.col("gen_throughput").mean())
    return float(means.get_column("gen_throughput").sum())


def _spread(lines: pl.DataFrame) -> dict[str, float] | None:
    if not lines.height:
        return None
    figure = pl.col("gen_throughput")
    row = lines.select(
        figure.min().alias("min"), figure.median().alias("p50"), figure.max().alias("max"), figure.std().alias("stdev")
    )
    return {k: float(v) for k, v in row.to_dicts()[0].items() if v is not None}


def _rate(metrics: pl.DataFrame, interval: Interval | None, mode: str) -> float | None:
    if interval is None:
        return None
    ends = [
        counter(metrics.filter(pl.col("when") == when), _TOKENS, mode=mode, pp_rank="0", tp_rank="0")
        for when in (interval.first, interval.last)
    ]
    if ends[0] is None or ends[1] is None or ends[1] < ends[0]:
        return None
    return (ends[1] - ends[0]) * SECOND / interval.ns


def _over_windows(counts: Sequence[tuple[int, int | None]]) -> float | None:
    """Tokens over time of all windows together; None where one was not counted."""
    tokens = [t for _, t in counts if t is not None]
    ns = sum(n for n, _ in counts)
    return sum(tokens) * SECOND / ns if tokens and len(tokens) == len(counts) and ns > 0 else None


def _logged_prefill(lines: pl.DataFrame) -> float | None:
    """New tokens of the lines before the profile over the time they span; None for less than a few seconds of log."""
    lines = lines.filter(pl.col("phase") == "before") if lines.height else lines
    if lines.height < 2:
        return None
    first, last = int(lines.get_column("ts_ns")[0]), int(lines.get_column("ts_ns")[-1])
    if last - first < 5 * SECOND:
        return None
    return float(lines.get_column("new_tokens")[1:].sum()) * SECOND / (last - first)

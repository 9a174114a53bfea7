"""The window common to all ranks: what the profiler's staggered start and stop leave whole on every one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from traceana.errors import ModelError
from traceana.model.trace import Window
from traceana.tables import RankTables

__all__ = ["common_window", "narrow"]


def _gpu_span(rank: RankTables) -> tuple[int, int] | None:
    if rank.device.height == 0:
        return None
    low, high = rank.device.select(pl.col("ts_ns").min(), pl.col("end_ns").max()).row(0)
    return int(low), int(high)


def common_window(
    ranks: Sequence[RankTables], visits: Mapping[int, pl.DataFrame], forwards: Mapping[int, pl.DataFrame]
) -> Window:
    """From the latest first to the earliest last complete visit, cut to the earliest last-forward end
    (docs/concepts/attribution.md, section 1); the common span of GPU activity where a rank has no visits, or none is
    complete on all ranks.

    Raises ModelError where no rank has GPU activity, or no instant is common to those that have.
    """
    spans = {r.info.rank: span for r in ranks if (span := _gpu_span(r)) is not None}
    if not spans:
        raise ModelError(
            "no GPU activity in any trace",
            where=", ".join(str(r.info.file.name) for r in ranks[:4]),
            hint="profile with GPU activities, while the server is under load",
        )
    trimmed: list[Mapping[str, object]] = []
    whole = {r: v.filter(pl.col("complete")) for r, v in visits.items() if r in spans}
    basis = "gpu"
    start = max(low for low, _ in spans.values())
    end = min(high for _, high in spans.values())
    if whole and len(whole) == len(spans) and all(v.height for v in whole.values()):
        first = max(int(v.get_column("ts_ns")[0]) for v in whole.values())
        last = min(int(v.get_column("end_ns")[-1]) for v in whole.values())
        ends = [int(f.get_column("end_ns").max()) for r, f in forwards.items() if r in spans and f.height]  # type: ignore[arg-type]
        last = min([last, *ends])
        if last > first:
            start, end, basis = first, last, "visits"
    if end <= start:
        raise ModelError(
            "the ranks have no instant of GPU activity in common",
            where=", ".join(f"rank {r}: {low}..{high}" for r, (low, high) in spans.items()),
            hint="they are traces of different moments, or of hosts whose clocks differ: see `traceana check`",
        )
    for rank, (low, high) in spans.items():
        if start > low:
            trimmed.append({"rank": rank, "side": "head", "ns": start - low, "why": "not yet running on every rank"})
        if high > end:
            trimmed.append({"rank": rank, "side": "tail", "ns": high - end, "why": "no longer running on every rank"})
    inside = [
        v.filter((pl.col("ts_ns") >= start) & (pl.col("end_ns") <= end)).get_column("visit") for v in whole.values()
    ]
    firsts = [int(v[0]) for v in inside if v.len()]
    lasts = [int(v[-1]) for v in inside if v.len()]
    known = basis == "visits" and len(firsts) == len(inside)
    return Window(start, end, basis, tuple(trimmed), max(firsts) if known else None, min(lasts) if known else None)


def narrow(window: Window, start_ns: int, end_ns: int) -> Window:
    """`window` cut to `[start_ns, end_ns)`; raises ModelError where nothing is left."""
    start, end = max(window.start_ns, start_ns), min(window.end_ns, end_ns)
    if end <= start:
        raise ModelError(
            "the window asked for lies outside the common window",
            where=f"0..{window.duration_ns} ns from {window.start_ns}",
            hint="give --window START..END inside it, in ns or like 12ms..40ms",
        )
    cut = [dict(t) for t in window.trimmed]
    if start > window.start_ns:
        cut.append({"rank": None, "side": "head", "ns": start - window.start_ns, "why": "--window"})
    if end < window.end_ns:
        cut.append({"rank": None, "side": "tail", "ns": window.end_ns - end, "why": "--window"})
    return Window(start, end, "option", tuple(cut), window.first_visit, window.last_visit)

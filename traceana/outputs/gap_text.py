"""The chain of one gap as text: which event waited for which, back to the root."""

from __future__ import annotations

import re
from collections.abc import Mapping

import polars as pl

from traceana.errors import OutputError
from traceana.model.evidence import describe_chain
from traceana.model.model import Model

__all__ = ["render_gap"]

_UNITS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}


def render_gap(model: Model, document: Mapping[str, object], which: str) -> str:
    """The chain of gap `which`: a number in the list of the worst gaps (from 1), or a time from the window's start with
    its unit (`12.5ms`), which gives the gap of every rank that is idle then. Raises OutputError where there is none."""
    if which.isdigit():
        worst = document.get("worst_gaps")
        gaps = worst if isinstance(worst, list) else []
        if not 1 <= int(which) <= len(gaps):
            raise OutputError(
                "no such gap", where=f"--gap {which}", hint=f"give 1 to {len(gaps)}, or a time like 12.5ms"
            )
        gap = gaps[int(which) - 1]
        return _text(model, int(gap["rank"]), int(gap["gap"]))
    found = re.match(r"^(\d+)(?:\.(\d+))?(ns|us|ms|s)$", which)
    if found is None:
        raise OutputError(
            "neither a number nor a time", where=f"--gap {which}", hint="give 1, 2, ... or a time like 12.5ms"
        )
    fraction = found[2] or ""
    at = int(found[1] + fraction) * _UNITS[found[3]] // 10 ** len(fraction) + model.trace.window.start_ns
    rows = model.blame.compact.filter((pl.col("ts_ns") <= at) & (pl.col("end_ns") > at) & (pl.col("gap") >= 0))
    if rows.height == 0:
        raise OutputError(
            "no stage is idle then", where=f"--gap {which}", hint="times count from the start of the window"
        )
    return "\n".join(
        _text(model, int(r), int(g)) for r, g in rows.select("rank", "gap").unique().sort("rank").iter_rows()
    )


def _text(model: Model, rank: int, gap: int) -> str:
    chain = describe_chain(model, rank, gap)
    rows = model.blame.compact.filter((pl.col("rank") == rank) & (pl.col("gap") == gap))
    start, end = rows.select(pl.col("ts_ns").min().alias("a"), pl.col("end_ns").max().alias("b")).row(0)
    total = sum(int(str(link["ns"])) for link in chain)
    visit = rows.get_column("visit")[0]
    origin = model.trace.window.start_ns
    head = (
        f"Gap {gap} of rank {rank}: {total:,} ns idle between {start - origin:,} and {end - origin:,} ns of the window"
    )
    lines = [head + (f", waiting for the micro-batch of visit {visit}" if visit is not None else "") + "; last first:"]
    for link in chain:
        root = "" if link["root_rank"] is None else f" (rank {link['root_rank']})"
        detail = f": {link['detail']}" if link["detail"] else ""
        crossed = ", after the token return" if link["crossed_token_return"] else ""
        at = int(str(link["ts_ns"])) - origin
        lines.append(f"  {int(str(link['ns'])):>12,} ns  from {at:>14,}  {link['cause']}{root}{detail}{crossed}")
        if link["what"]:
            lines.append(f"{'':>18}{link['what']}")
    return "\n".join(lines)

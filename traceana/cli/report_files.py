"""The files of a report: HTML, JSON, the merged Perfetto trace, and the tables as Parquet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import polars as pl

from traceana.model.evidence import Words, describe_events
from traceana.outputs.files import new_folder
from traceana.outputs.html import write_html
from traceana.outputs.jsonfile import write_json
from traceana.outputs.parquet import write_tables
from traceana.outputs.timeline import Args, write_timeline
from traceana.pipeline import Report

__all__ = ["write_merged", "write_report"]


def write_merged(path: Path, report: Report, args: Args = "key") -> dict[str, int]:
    """Write the merged Perfetto trace to `path`; what was written, counted. Raises OutputError."""
    trace = report.model.trace
    attribution = report.model.blame.compact
    worst = report.document.get("worst_gaps")
    keys = [(g["rank"], g["gap"]) for g in worst] if isinstance(worst, list) else []
    pick = pl.DataFrame(keys, schema={"rank": pl.Int32, "gap": pl.Int64}, orient="row")
    stats = write_timeline(
        path,
        trace.capture,
        clock=trace.clock,
        visits=trace.visits,
        forwards=trace.forwards,
        messages=trace.messages,
        states=pl.concat(s.compact for s in report.model.states.values()),
        attribution=attribution,
        kernel_class=trace.kernel_class,
        window=(trace.window.start_ns, trace.window.end_ns),
        chains=attribution.join(pick, on=["rank", "gap"], how="semi", maintain_order="left"),
        in_flight=report.tables["in_flight"],
        stages_busy=report.tables["stages_busy"],
        stages=trace.topology.stage if trace.topology.is_pipeline else None,
        events=partial(describe_events, Words(report.model)),
        args=args,
    )
    return {"slices": stats.slices, "slices_in_lanes": stats.slices_in_lanes, "bytes": stats.bytes_written}


def write_report(out: Path, report: Report, say: Callable[[str], None]) -> list[Path]:
    """Write all files of a report into the folder `out`; their paths. They appear together once all are written, so
    that a full disk or a kill leaves what was there. Raises OutputError."""
    with new_folder(out) as folder:
        say("write report.json")
        write_json(folder / "report.json", report.document)
        say("write report.html")
        write_html(folder / "report.html", report.document, report.tables)
        say("write merged.pftrace")
        write_merged(folder / "merged.pftrace", report)
        say("write tables")
        write_tables(folder / "tables", report.tables)
    return [out / "report.html", out / "report.json", out / "merged.pftrace", out / "tables"]

"""`traceana.load`: the report of a capture as objects, for notebooks and scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import polars as pl

from traceana.errors import TraceanaError
from traceana.pipeline import Options, Report, analyse, parse_window
from traceana.sources.storage import is_url
from traceana.tables import RankTables

__all__ = ["LoadedCapture", "load"]


@dataclass(frozen=True, slots=True, repr=False)
class LoadedCapture:
    """A capture, explained. `report` is what every command starts from; the properties are what notebooks want of it."""

    report: Report

    @property
    def document(self) -> Mapping[str, Any]:
        """The document of `traceana report --json` (docs/reference/report.md)."""
        return self.report.document

    @property
    def tables(self) -> Mapping[str, pl.DataFrame]:
        """Every table of the report by name, times in integer ns on the reference clock (docs/reference/tables.md)."""
        return self.report.tables

    @property
    def ranks(self) -> Mapping[int, RankTables]:
        """The events of each rank: `device`, `calls`, `annotations`, `ops` and so on, on the reference clock."""
        return {r.info.rank: r for r in self.report.model.trace.capture.ranks}

    @property
    def losses(self) -> pl.DataFrame:
        """What was lost or is doubtful, worst first (LOSSES)."""
        return self.report.losses

    @property
    def stages(self) -> pl.DataFrame:
        """One row a rank: where its time went. `causes_ns` and the like are struct columns; `unnest` spreads them."""
        return _frame(self.document["stages"])

    @property
    def findings(self) -> pl.DataFrame:
        """What to change, most recoverable time first: id, title, rank, lost_ns, recoverable_fraction, action."""
        keys = ("id", "title", "rank", "lost_ns", "recoverable_fraction", "action")
        types = (pl.String, pl.String, pl.Int32, pl.Int64, pl.Float64, pl.String)
        rows = [{k: f[k] for k in keys} for f in self.document["findings"]]
        return pl.DataFrame(rows, schema=dict(zip(keys, types, strict=True)))

    def to_hta(self) -> Any:
        """The same trace files as a `hta.trace_analysis.TraceAnalysis`, each under its rank. HTA reads them itself: its times are floats
        of microseconds on each host's own clock. Raises TraceanaError without the `hta` extra, and for nsys exports."""
        try:
            hta = import_module("hta.trace_analysis")
        except ImportError as error:
            raise TraceanaError(
                "HolisticTraceAnalysis is not installed",
                where=str(error),
                hint="pip install 'traceana[hta]'",
            ) from error
        files = {rank: str(tables.info.file.resolve()) for rank, tables in self.ranks.items()}
        other = [file for file in files.values() if not file.endswith((".json", ".json.gz"))]
        if other:
            raise TraceanaError(
                "HolisticTraceAnalysis reads traces of torch.profiler only",
                where=other[0],
                hint="load a capture of *.json or *.json.gz files",
            )
        return hta.TraceAnalysis(trace_files=files, trace_dir="")

    def __repr__(self) -> str:
        window = self.document["window"]["duration_ns"] / 1e6
        return (
            f"LoadedCapture({len(self.ranks)} ranks, window {window:.1f} ms, {len(self.document['findings'])} findings)"
        )


def load(
    path: str | Path,
    *,
    ranks: Sequence[int] | None = None,
    window: str | None = None,
    assume: str | None = None,
    cache: bool = True,
    engine: str | None = None,
) -> LoadedCapture:
    """Read and explain the capture at `path`; options are those of `traceana report` (`window` like `12ms..40ms`).

    Raises TraceanaError, with what is wrong, where, and what to do.
    """
    options = Options(ranks, parse_window(window) if window else None, assume, cache, engine)
    return LoadedCapture(analyse(path if isinstance(path, str) and is_url(path) else Path(path), options))


def _frame(rows: object) -> pl.DataFrame:
    return pl.DataFrame(cast("list[dict[str, object]]", rows), infer_schema_length=None)

"""`traceana report`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from traceana.cli.common import analysis_options, default_out, gate, make_options, progress, use_color
from traceana.cli.report_files import write_report
from traceana.outputs.jsonfile import to_json
from traceana.outputs.terminal import render_terminal
from traceana.outputs.words import plain_lines, plain_text
from traceana.pipeline import analyse

__all__ = ["command"]


@click.command("report")
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and write no files.")
@click.option("--no-files", is_flag=True, help="Write no report files.")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Where to write the report files [default: DIR/report]."
)
@click.option(
    "--gap", metavar="N|TIME", help="Print the chain of one gap: its number in worst_gaps, or a time like 12.5ms."
)
@analysis_options
def command(
    folder: Path, as_json: bool, no_files: bool, out: Path | None, gap: str | None, ranks: str | None, window: str | None,
    assume: str | None, no_cache: bool, strict: bool, verbose: int,
) -> None:  # fmt: skip
    """Say where each stage's time went and why.

    DIR is a capture folder, a folder of torch profiler traces (*.json, *.json.gz), or an nsys .sqlite export. Writes
    DIR/report/{report.html, report.json, merged.pftrace, tables/*.parquet}.
    """
    written: list[Path] = []
    with progress(verbose) as say:
        report = analyse(folder, make_options(ranks, window, assume, no_cache), say)
        if gap is not None:
            from traceana.outputs.gap_text import render_gap

            click.echo(plain_lines(render_gap(report.model, report.document, gap)))
            return
        if as_json:
            click.echo(to_json(report.document))
        elif not no_files:
            written = write_report(out or default_out(folder), report, say)
    if not as_json:
        click.echo(render_terminal(report.document, width=_width(), color=use_color()), nl=False)
        for path in written:
            click.echo(f"Wrote {plain_text(str(path))}")
    gate(report.losses, strict)


def _width() -> int:
    if not sys.stdout.isatty():
        return 80
    import shutil

    return max(60, min(shutil.get_terminal_size((80, 24)).columns, 120))

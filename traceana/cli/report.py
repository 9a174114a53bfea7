"""`traceana report`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from traceana.cli.answers import answer_key, load_answer, save_answer
from traceana.cli.common import (
    Place,
    analysis_options,
    default_out,
    gate,
    make_options,
    no_limits,
    progress,
    use_color,
)

__all__ = ["command"]


@click.command("report")
@click.argument("folder", metavar="DIR", type=Place())
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
    folder: Path | str, as_json: bool, no_files: bool, out: Path | None, gap: str | None, ranks: str | None, window: str | None,
    assume: str | None, no_cache: bool, engine: str | None, strict: bool, verbose: int,
) -> None:  # fmt: skip
    """Say where each stage's time went and why.

    DIR is a capture folder, a folder of torch profiler traces (*.json, *.json.gz), or an nsys .sqlite export. Writes
    DIR/report/{report.html, report.json, merged.pftrace, tables/*.parquet}.
    """
    # All that the answer depends on beside the files; an engine, once it works, gives the same one.
    asked = {"ranks": ranks, "window": window, "assume": assume, "no_limits": no_limits()}
    plain = as_json and gap is None and engine is None and not no_cache
    here = folder if isinstance(folder, Path) and plain else None
    key = answer_key(here, asked) if here is not None else None
    kept = load_answer(key) if key is not None else None
    if kept is not None:
        click.echo(kept)
        if strict:
            from traceana import schema

            gate(schema.LOSSES.frame(json.loads(kept)["losses"]), strict)
        return

    from traceana.pipeline import analyse

    written: list[Path] = []
    target = None if as_json or no_files or gap is not None else out or default_out(folder)
    with progress(verbose) as say:
        report = analyse(folder, make_options(ranks, window, assume, no_cache, engine), say)
        if gap is not None:
            from traceana.outputs.gap_text import render_gap
            from traceana.outputs.words import plain_lines

            click.echo(plain_lines(render_gap(report.model, report.document, gap)))
            return
        if as_json:
            from traceana.outputs.jsonfile import to_json

            text = to_json(report.document)
            click.echo(text)
            if here is not None and key is not None and answer_key(here, asked) == key:  # still what was read
                save_answer(key, text)
        elif target is not None:
            from traceana.cli.report_files import write_report

            written = write_report(target, report, say)
    if not as_json:
        from traceana.outputs.terminal import render_terminal
        from traceana.outputs.words import plain_text

        click.echo(render_terminal(report.document, width=_width(), color=use_color()), nl=False)
        for path in written:
            click.echo(f"Wrote {plain_text(str(path))}")
    gate(report.losses, strict)


def _width() -> int:
    if not sys.stdout.isatty():
        return 80
    import shutil

    return max(60, min(shutil.get_terminal_size((80, 24)).columns, 120))

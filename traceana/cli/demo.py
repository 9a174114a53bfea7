"""`traceana demo`."""

from __future__ import annotations

from pathlib import Path

import click

from traceana.cli.common import progress, use_color
from traceana.cli.report_files import write_report
from traceana.demo_capture import demo_folder
from traceana.outputs.jsonfile import to_json
from traceana.outputs.terminal import render_terminal
from traceana.pipeline import Options, analyse

__all__ = ["command"]


@click.command("demo")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and write no files.")
@click.option("--no-files", is_flag=True, help="Write no report files.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=Path("traceana-demo"),
    show_default=True,
    help="Where to write the report files.",
)
@click.option("-v", "--verbose", count=True, help="Say what is being done.")
def command(as_json: bool, no_files: bool, out: Path, verbose: int) -> None:
    """The whole job on a bundled real capture: SGLang serving a 64-layer MoE on two H200 in pipeline-parallel mode,
    32 clients, micro-batches capped at 8."""
    with progress(verbose) as say:
        report = analyse(demo_folder(), Options(), say)
        written = [] if no_files or as_json else write_report(out, report, say)
    if as_json:
        click.echo(to_json(report.document))
        return
    click.echo(render_terminal(report.document, width=80, color=use_color()), nl=False)
    for path in written:
        click.echo(f"Wrote {path}")
    if written:
        click.echo(f"Next: traceana open {out}")
        click.echo("Then, on your own server: traceana capture --ranks 0-7")

"""`traceana merge`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click

from traceana.cli.common import Place, analysis_options, gate, make_options, progress
from traceana.cli.report_files import write_merged
from traceana.outputs.timeline import Args
from traceana.outputs.words import plain_text
from traceana.pipeline import analyse

__all__ = ["command"]


@click.command("merge")
@click.argument("folder", metavar="DIR", type=Place())
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="Output [default: merged.pftrace; .pftrace.gz compresses]."
)
@click.option(
    "--args",
    type=click.Choice(["none", "key", "full"]),
    default="key",
    show_default=True,
    help="Arguments kept on slices.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was written as one JSON document.")
@analysis_options
def command(
    folder: Path | str, out: Path | None, args: str, as_json: bool, ranks: str | None, window: str | None, assume: str | None,
    no_cache: bool, engine: str | None, strict: bool, verbose: int,
) -> None:  # fmt: skip
    """Write one Perfetto trace of all ranks on one clock, with attribution, micro-batches and messages."""
    target = out or Path("merged.pftrace")
    with progress(verbose) as say:
        report = analyse(folder, make_options(ranks, window, assume, no_cache, engine), say)
        say("write the trace")
        stats = write_merged(target, report, cast("Args", args))
    if as_json:
        from traceana.outputs.jsonfile import to_json

        click.echo(to_json({"path": str(target), **stats}))
    else:
        click.echo(f"Wrote {plain_text(str(target))}: {stats['slices']:,} slices, {stats['bytes']:,} bytes")
    gate(report.losses, strict)

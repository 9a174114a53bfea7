"""`traceana check`."""

from __future__ import annotations

from pathlib import Path

import click

from traceana.cli.common import Place, analysis_options, gate, make_options, progress, use_color
from traceana.outputs.check_text import render_check
from traceana.outputs.jsonfile import to_json
from traceana.pipeline import check

__all__ = ["command"]


@click.command("check")
@click.argument("folder", metavar="DIR", type=Place())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@analysis_options
def command(
    folder: Path | str, as_json: bool, ranks: str | None, window: str | None, assume: str | None, no_cache: bool, engine: str | None, strict: bool,
    verbose: int,
) -> None:  # fmt: skip
    """Say what is usable in DIR, how the ranks' clocks relate, what is missing, and what was lost."""
    with progress(verbose) as say:
        document, losses = check(folder, make_options(ranks, window, assume, no_cache, engine), say)
    click.echo(to_json(document) if as_json else render_check(document, color=use_color()), nl=as_json)
    gate(losses, strict)

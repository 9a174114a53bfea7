"""`traceana open`."""

from __future__ import annotations

from pathlib import Path

import click

from traceana.errors import OutputError
from traceana.outputs.open_ui import open_trace
from traceana.outputs.words import plain_text

__all__ = ["command"]

_SUFFIXES = (".pftrace", ".pftrace.gz", ".json", ".json.gz")


@click.command("open")
@click.argument("path", metavar="DIR|FILE", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--offline/--online",
    default=None,
    help="The local copy of the UI, or ui.perfetto.dev [default: local if installed].",
)
@click.option("--no-browser", is_flag=True, help="Print the address; open no browser.")
@click.option(
    "--port", default=9001, show_default=True, help="Port on 127.0.0.1; ui.perfetto.dev reads from 9001 only."
)
@click.option(
    "--timeout", "timeout_s", default=300, show_default=True, help="Seconds to wait for the UI to fetch the trace."
)
def command(path: Path, offline: bool | None, no_browser: bool, port: int, timeout_s: int) -> None:
    """Open a merged trace in the Perfetto UI. DIR is a capture folder with a report, or the report itself.

    The trace is served from this machine to this machine only, once, and never uploaded.
    """
    trace = _find(path)
    click.echo(f"Trace: {plain_text(str(trace))}")
    open_trace(trace, browser=not no_browser, offline=offline, port=port, timeout_s=timeout_s)


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    for candidate in (path / "report" / "merged.pftrace", path / "merged.pftrace", path / "merged.pftrace.gz"):
        if candidate.is_file():
            return candidate
    raise OutputError("no merged trace here", where=str(path), hint=f"run: traceana report {path}")

"""The `traceana` command. `main` is the only place that turns a TraceanaError into words and an exit status.

Exit status: 0 done, 1 failed, 2 wrong usage, 3 a gate failed (--strict, diff --fail-on), 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import click

from traceana import __version__
from traceana.cli.ctrl_c import CtrlC
from traceana.errors import TraceanaError
from traceana.outputs.words import plain_lines

__all__ = ["GateError", "cli", "main"]

# Command -> one line of help. A command's module is imported when it runs, so that `--help` needs none of polars.
_COMMANDS = {
    "capture": "Attach to a running server and record, or start one under the capture.",
    "report": "Say where each stage's time went: terminal, HTML, JSON, Perfetto trace, tables.",
    "merge": "Write one Perfetto trace with all ranks on one clock.",
    "open": "Open the merged trace in the Perfetto UI.",
    "check": "Say what is usable, what is missing, what was lost.",
    "diff": "Compare two captures and explain the difference.",
    "whatif": "Predict throughput, latency and bubbles under a change.",
    "demo": "Run the report on bundled real traces: no GPU, no server.",
}


class GateError(Exception):
    """A gate that the user set was not met: exit status 3."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"traceana.cli.{'open_' if cmd_name == 'open' else cmd_name}")
        command = module.command
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="traceana")
@click.option("--traceback", is_flag=True, help="Show where in traceana an error was raised.")
def cli(traceback: bool) -> None:
    """Where every pipeline stage of an LLM server spends its time, in nanoseconds that add up."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: list[str]) -> int:
    """Run the command line and return its exit status."""
    with CtrlC() as ctrl_c:
        try:
            result = cli.main(args=argv, prog_name="traceana", standalone_mode=False)
            sys.stdout.flush()
        except BaseException as error:
            if ctrl_c.pressed or isinstance(error, (KeyboardInterrupt, click.Abort)):
                click.echo("traceana: interrupted", err=True)
                return 130
            return _status(error, argv)
    return result if isinstance(result, int) else 0


def _status(error: BaseException, argv: Sequence[str]) -> int:
    """Says what `error` means; the exit status. Raises what none of ours can have raised."""
    match error:
        case click.exceptions.Exit():
            return error.exit_code
        case click.ClickException():
            error.show()
            return error.exit_code
        case GateError():
            click.echo(f"traceana: gate failed: {plain_lines(str(error))}", err=True)
            return 3
        case BrokenPipeError():
            _drop_stdout()  # the reader of our output went away (`| head`)
            return 0
        case TraceanaError():
            return _fail(str(error), error.hint, argv)
        case MemoryError():
            return _fail(
                "out of memory", "give fewer ranks at a time with --ranks, or a machine with more memory", argv
            )
        case OSError():
            where = f": {error.filename}" if error.filename else ""
            what = f"{error.strerror or type(error).__name__}{where}"
            return _fail(what, "check the disk, and who may write there", argv)
        case _:
            # polars raises its panics beside Exception; what else lies there (SystemExit) is none of ours.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise error
            what = f"a bug in traceana ({type(error).__name__}: {error!s:.200})"
            return _fail(what, "please report it, with what `traceana --traceback ...` shows", argv)


def _fail(what: str, hint: str | None, argv: Sequence[str]) -> int:
    """Say what is wrong, and what to do; 1. Names in it come from files and may hold anything."""
    click.echo(f"traceana: error: {plain_lines(what)}", err=True)
    if hint:
        click.echo(f"hint: {plain_lines(hint)}", err=True)
    if "--traceback" in argv:
        traceback.print_exc()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _drop_stdout()
    return 1


def _drop_stdout() -> None:
    """Python would complain again while it closes a stdout that cannot be written to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

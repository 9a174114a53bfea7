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
from traceana.errors import TraceanaError

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
    try:
        result = cli.main(args=argv, prog_name="traceana", standalone_mode=False)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("traceana: interrupted", err=True)
        return 130
    except GateError as error:
        click.echo(f"traceana: gate failed: {error}", err=True)
        return 3
    except BrokenPipeError:
        # The reader of our output went away (`| head`); Python would complain again while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except TraceanaError as error:
        click.echo(f"traceana: error: {error}", err=True)
        if error.hint:
            click.echo(f"hint: {error.hint}", err=True)
        if "--traceback" in argv:
            traceback.print_exc()
        return 1
    except MemoryError:
        click.echo("traceana: error: out of memory", err=True)
        click.echo("hint: give fewer ranks at a time with --ranks, or a machine with more memory", err=True)
        return 1
    return result if isinstance(result, int) else 0

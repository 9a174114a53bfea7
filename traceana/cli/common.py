"""What the commands share: options, rank lists, progress, and the strict gate."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from traceana.cli import GateError
from traceana.engine import ENGINES
from traceana.errors import OutputError
from traceana.sources.limits import Limits
from traceana.sources.storage import is_url

if TYPE_CHECKING:  # loaded where they are needed: an answer that was kept needs none of them
    import polars as pl

    from traceana.pipeline import Options, Progress

__all__ = [
    "Place",
    "analysis_options",
    "default_out",
    "gate",
    "limits_option",
    "make_options",
    "no_limits",
    "parse_ranks",
    "progress",
    "use_color",
]

_LIFTED = "traceana.no_limits"
F = TypeVar("F", bound=Callable[..., Any])


class Place(click.Path):
    """A file or folder that exists, as a Path, or the URL of one on a storage, as it stands."""

    def __init__(self) -> None:
        super().__init__(exists=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See the class."""
        return value if is_url(value) else super().convert(value, param, ctx)


def parse_ranks(text: str) -> tuple[int, ...]:
    """`0-7`, `0,2,5` or `0-3,6` as ranks in order."""
    ranks: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise click.BadParameter(f"{text!r} is no list of ranks; write 0-7 or 0,2,5")
        top = int(high) if dash else int(low)
        if top < int(low) or top > 100_000:
            raise click.BadParameter(f"{part!r} is no range of ranks")
        ranks.update(range(int(low), top + 1))
    return tuple(sorted(ranks))


def analysis_options(function: F) -> F:
    """--ranks, --window, --assume, --no-limits, --no-cache, --engine, --strict and -v."""
    decorators = (
        click.option("--ranks", metavar="LIST", help="Only these ranks, for instance 0-7 or 0,3."),
        click.option(
            "--window", metavar="START..END", help="Only this part of the common window: ns, or like 12ms..40ms."
        ),
        click.option("--assume", metavar="CLOCK", help="Clock prior: same-host, ntp:MICROSECONDS or none."),
        limits_option,
        click.option("--no-cache", is_flag=True, help="Compute everything again, and keep nothing of it."),
        click.option("--engine", metavar="ENGINE", help=f"Where ranks are read: {ENGINES} [default: threads]."),
        click.option("--strict", is_flag=True, help="Exit 3 if anything was lost (warning or error)."),
        click.option("-v", "--verbose", count=True, help="Say what is being done."),
    )
    for decorate in reversed(decorators):
        function = decorate(function)
    return function


def limits_option(function: F) -> F:
    """--no-limits, which `no_limits` asks for."""
    return click.option(
        "--no-limits",
        is_flag=True,
        expose_value=False,
        callback=_keep_limits,
        help="Read files of any size, and gz files that unpack to very much more.",
    )(function)


def _keep_limits(context: click.Context, _parameter: click.Parameter, lifted: bool) -> None:
    context.meta[_LIFTED] = lifted


def no_limits() -> bool:
    """Whether --no-limits was given."""
    return bool(click.get_current_context().meta.get(_LIFTED))


def make_options(
    ranks: str | None, window: str | None, assume: str | None, no_cache: bool, engine: str | None
) -> Options:
    """The options of an analysis from the command line's words."""
    from traceana.pipeline import Options, parse_window

    return Options(
        ranks=parse_ranks(ranks) if ranks else None,
        window=parse_window(window) if window else None,
        assume=assume,
        cache=not no_cache,
        limits=Limits.lifted() if no_limits() else None,
        engine=engine,
    )


@contextmanager
def progress(verbose: int = 0) -> Generator[Progress, None, None]:
    """A function that says what is being done: a bar with an estimate on a terminal, lines with -v, else nothing."""
    if sys.stderr.isatty() and not verbose:
        from traceana.cli.bar import bar

        with bar() as say:
            yield say
    elif verbose:
        yield Lines()
    else:
        yield _nothing


class Lines:
    """Progress as one line a step, however far it is."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        """Prints `what` where it is new."""
        if what != self._last:
            click.echo(f"traceana: {what}", err=True)
        self._last = what


def _nothing(what: str, done: int = 0, total: int = 0) -> None:
    pass


def use_color() -> bool:
    """Colour on a terminal that has not said NO_COLOR."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def gate(losses: pl.DataFrame, strict: bool) -> None:
    """Raise GateError where --strict is set and something was lost."""
    lost = losses.filter(losses.get_column("severity").is_in(["warning", "error"]))
    if strict and lost.height:
        names = ", ".join(lost.get_column("name").unique(maintain_order=True).head(4).to_list())
        raise GateError(f"{lost.height} losses of severity warning or error: {names}")


def default_out(path: Path | str) -> Path:
    """`DIR/report` for a folder, a folder beside it for a file. Raises OutputError for a URL, and where a link stands
    there: a capture from somebody else must not choose what is written to."""
    if isinstance(path, str):
        raise OutputError("nowhere to write the report files", where=path, hint="give -o DIR, or --json or --no-files")
    out = path / "report" if path.is_dir() else path.with_name(path.name.split(".")[0] + "-report")
    if out.is_symlink():
        raise OutputError(
            "the report folder is a link", where=str(out), hint="remove the link, or name a folder with -o"
        )
    return out

"""Progress on a terminal: what is being done, how far it is, and how long the rest will take."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from traceana.pipeline import Progress as Say

__all__ = ["bar"]


@contextmanager
def bar(console: Console | None = None) -> Generator[Say, None, None]:
    """A function to tell the progress to. One line on stderr that goes away at the end; steps without a total show only
    their name."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console or Console(stderr=True), transient=True) as shown:
        task = shown.add_task("start", total=None)
        now = ""

        def say(what: str, done: int = 0, total: int = 0) -> None:
            nonlocal now
            if what != now:
                now = what
                shown.reset(task, total=total or None, completed=done, description=what)
            else:
                shown.update(task, total=total or None, completed=done)

        yield say

"""Progress: a bar with an estimate where stderr is a terminal, and nothing of it anywhere else."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from traceana.cli import run
from traceana.cli.bar import bar
from traceana.cli.common import progress
from traceana.demo_capture import demo_folder


def test_a_terminal_sees_what_is_done_how_far_it_is_and_how_long_it_takes() -> None:
    shown = io.StringIO()
    with bar(Console(file=shown, force_terminal=True, width=100)) as say:
        say("align clocks")
        say("read", 1, 4)
        say("read", 3, 4)
    text = shown.getvalue()
    assert "read" in text
    assert "3/4" in text
    assert ":" in text  # the estimate


def test_without_a_terminal_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(demo_folder()), "--json", "--no-cache"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert json.loads(said.out)["schema_version"] == 1


def test_verbose_says_each_step_once(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(1) as say:
        for done in range(3):
            say("read", done, 3)
        say("match messages")
    assert capsys.readouterr().err == "traceana: read\ntraceana: match messages\n"

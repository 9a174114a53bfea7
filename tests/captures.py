"""Captures that tests read: the bundled one, and the others where the checkout has them beside it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from traceana.demo_capture import demo_folder
from traceana.pipeline import Options, Report, analyse

REAL = Path(__file__).resolve().parent.parent.parent / "shared" / "traces" / "real"

PIPELINES = ("A", "B", "D", "G", "H", "I", "M", "Q")


def real(letter: str) -> Path:
    """Folder of a real capture by its letter; A is bundled. Skips where the others are not at hand."""
    if letter == "A":
        return demo_folder()
    found = sorted(REAL.glob(f"{letter}-*"))
    if not found:
        pytest.skip(f"real capture {letter} is not beside the checkout")
    return found[0]


@cache
def report_of(folder: Path) -> Report:
    """The report of a folder, made once."""
    return analyse(folder, Options(cache=False))

"""Captures that tests read: the bundled one (`demo`), and others where the checkout has them beside it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from traceana.demo_capture import demo_folder
from traceana.pipeline import Options, Report, analyse

REAL = Path(__file__).resolve().parent.parent.parent / "shared" / "traces" / "real"

PIPELINES = ("demo", "A", "B", "D", "G", "H", "I", "M", "Q")


def real(letter: str) -> Path:
    """Folder of a real capture by its letter. The bundled one has A's configuration and stands in for it; skips where
    the others are not at hand."""
    if letter == "demo":
        return demo_folder()
    found = sorted(REAL.glob(f"{letter}-*"))
    if not found and letter == "A":
        return demo_folder()
    if not found:
        pytest.skip(f"real capture {letter} is not beside the checkout")
    return found[0]


@cache
def report_of(folder: Path) -> Report:
    """The report of a folder, made once."""
    return analyse(folder, Options(cache=False))

"""What all tests share: 80 columns, a cache of their own, no colour, and where the captures are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# CI tries the same examples every time; runs by hand look for new ones. No example is timed: machines are shared.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("by_hand", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "by_hand")

ROOT = Path(__file__).resolve().parent.parent
REAL = ROOT.parent / "shared" / "traces" / "real"


@pytest.fixture(autouse=True)
def quiet_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """80 columns, no colour, and a cache folder that no other run knows."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    yield

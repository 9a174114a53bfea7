"""The cache is bounded: what was not used for longest goes first."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from traceana.sources.cache_room import make_room

HOUR = 3600


def entry(cache: Path, name: str, size: int, hours: float) -> Path:
    """A parsed trace of `size` bytes, last used that many hours ago."""
    place = cache / name[:2] / name[2:]
    place.mkdir(parents=True)
    (place / "claim.json").write_bytes(b"{}")
    (place / "device.parquet").write_bytes(bytes(size - 2))
    return aged(place, hours)


def answer(cache: Path, name: str, size: int, hours: float) -> Path:
    place = cache / "answers" / name[:2] / f"{name[2:]}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(bytes(size))
    return aged(place, hours)


def aged(place: Path, hours: float) -> Path:
    then = time.time() - hours * HOUR
    os.utime(place, (then, then))
    return place


def test_the_oldest_go_first_and_what_is_in_use_stays(tmp_path: Path) -> None:
    old, older, used = (entry(tmp_path, n, 100, h) for n, h in (("aa1", 5), ("aa2", 9), ("bb3", 0.5)))
    kept, gone = answer(tmp_path, "aa4", 100, 2), answer(tmp_path, "cc5", 100, 3)
    make_room(tmp_path, tables=200, answers=100)  # the folder is new
    assert older.exists()
    aged(tmp_path, 1)
    make_room(tmp_path, tables=200, answers=100)
    assert [p.exists() for p in (old, older, used, kept, gone)] == [True, False, True, True, False]
    make_room(tmp_path, tables=0, answers=0)  # just done
    assert old.exists()
    make_room(tmp_path, tables=0, answers=0, often_s=0)
    assert [p.exists() for p in (old, used, kept)] == [False, True, False]


def test_what_a_killed_run_left_goes_after_a_day(tmp_path: Path) -> None:
    entry(tmp_path / "run-1", "aa1", 10, 30)
    entry(tmp_path / "run-2", "aa1", 10, 1)
    aged(tmp_path / "run-1", 30)
    make_room(tmp_path, often_s=0)
    assert [p.name for p in tmp_path.glob("run-*")] == ["run-2"]


def test_a_cache_that_is_not_there_or_cannot_be_written_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_room(tmp_path / "none")
    kept = entry(tmp_path, "aa1", 100, 9)

    def refuse(self: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    make_room(tmp_path, tables=0, often_s=0)
    assert sorted(p.name for p in kept.iterdir()) == ["claim.json", "device.parquet"]

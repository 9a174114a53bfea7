"""Keeps the user's cache small: what was not used for longest goes first. Imports the standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["make_room"]

_TABLE_BYTES = 8 << 30
_ANSWER_BYTES = 256 << 20
_IN_USE_S = 3600  # what was used this lately may be being read
_LEFT_S = 24 * 3600  # what a killed run without cache has left
_OFTEN_S = 600


def make_room(
    cache: Path, *, tables: int = _TABLE_BYTES, answers: int = _ANSWER_BYTES, often_s: int = _OFTEN_S
) -> None:
    """Removes parsed traces beyond `tables` bytes and answers beyond `answers` bytes, those not used for longest first
    and none that was used within an hour, and what killed runs have left. Done `often_s` seconds after the folder
    itself was changed, which this does too. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        now = time.time()
        if 0 <= now - cache.stat().st_mtime < often_s:
            return
        os.utime(cache)
        left = [p for p in cache.glob("run-*") if now - p.stat().st_mtime > _LEFT_S]
        for place in left:
            shutil.rmtree(place, ignore_errors=True)
        _bound(_children(p for p in cache.iterdir() if len(p.name) == 2), tables, now)
        _bound(_children((cache / "answers").glob("??")), answers, now)


def _children(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        yield from folder.iterdir()


def _bound(entries: Iterable[Path], most: int, now: float) -> None:
    found = [(entry.stat().st_mtime, _size(entry), entry) for entry in entries]
    total = sum(size for _, size, _ in found)
    for used, size, entry in sorted(found):
        if total <= most or now - used < _IN_USE_S:
            return
        if entry.is_dir():
            (entry / "claim.json").unlink(missing_ok=True)  # without it the rest is no entry
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
        total -= size


def _size(entry: Path) -> int:
    if not entry.is_dir():
        return entry.stat().st_size
    with os.scandir(entry) as files:
        return sum(file.stat().st_size for file in files if file.is_file(follow_symlinks=False))

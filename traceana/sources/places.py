"""Where things lie: the folders of a capture, and the user's cache. Imports next to nothing, for runs that need no more."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache
from pathlib import Path

from traceana.sources.storage import is_url

__all__ = ["OTHER_FOLDERS", "TRACE_FOLDERS", "cache_folder", "code_stamp"]

TRACE_FOLDERS = ("", "trace", "ranks")
OTHER_FOLDERS = ("server", "nsys")
_PACKAGE = Path(__file__).parents[1]


def cache_folder() -> Path | str:
    """Where this user's cache lies: TRACEANA_CACHE_DIR (a folder, or the URL of one), or the platform's place."""
    if own := os.environ.get("TRACEANA_CACHE_DIR"):
        return own if is_url(own) else Path(own)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "traceana" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "traceana"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "traceana"


@cache
def code_stamp(*parts: str) -> str:
    """A stamp of traceana's own code, or of the named files and folders of it: what other code made is not reused."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts or ("",):
        place = _PACKAGE / part
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(f"{file.relative_to(_PACKAGE).as_posix()}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()

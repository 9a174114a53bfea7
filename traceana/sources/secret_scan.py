"""Secrets that an imported folder holds: which files, and under which names. Values are never kept or shown."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from traceana.errors import SourceError
from traceana.sources.losses import Loss, loss, losses_frame
from traceana.sources.nsys import export_secrets
from traceana.sources.secrets import find_in_text
from traceana.sources.sidecar import is_sqlite

__all__ = ["find_secrets"]

_PIECE = 4 << 20
_OVERLAP = 16 << 10  # a name and its value that lie across two pieces are seen in the second
_MOST_NAMES = 12


def find_secrets(path: Path) -> pl.DataFrame:
    """LOSSES rows `secret_in_capture` (warning), one per file of the folder or file `path` that holds secrets: count
    and names. nsys exports hold the environment of what was profiled. Packed files and nsys reports are not looked
    into; the latter are named (`secret_unreadable`, info). Links are not followed."""
    rows: list[Loss] = []
    for file in _files(path):
        where = str(file.relative_to(path)) if file != path else file.name
        try:
            if file.suffix in (".nsys-rep", ".qdstrm"):
                rows.append(
                    loss("secret_unreadable", "info", 1, f"{where} may hold the environment of what was profiled")
                )
                continue
            names = export_secrets(file) if is_sqlite(file) else sorted(_text_secrets(file))
        except (OSError, SourceError) as error:
            rows.append(loss("secret_unreadable", "info", 1, f"{where}: {error}"))
            continue
        if names:
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            rows.append(
                loss("secret_in_capture", "warning", len(names), f"{where}: {', '.join(names[:_MOST_NAMES])}{more}")
            )
    return losses_frame(rows)


def _files(path: Path) -> Iterator[Path]:
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in found:
        try:
            if stat.S_ISREG(file.lstat().st_mode):
                yield file
        except OSError:
            continue


def _text_secrets(file: Path) -> set[str]:
    """Names in a text file, a piece at a time; none in a binary one."""
    names: set[str] = set()
    rest = b""
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            if b"\0" in piece[:4096] or piece.startswith((b"\x1f\x8b", b"PAR1", b"PK\x03\x04")):
                return names
            names |= {s.name for s in find_in_text((rest + piece).decode("utf-8", "replace"))}
            rest = piece[-_OVERLAP:]
    return names

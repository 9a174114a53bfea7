"""What lies in a capture folder: traces, nsys exports and the files beside them, told by content, never by suffix."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from traceana.errors import SourceError
from traceana.sources.kineto import is_kineto
from traceana.sources.limits import Limits
from traceana.sources.losses import Loss, loss
from traceana.sources.places import OTHER_FOLDERS, TRACE_FOLDERS
from traceana.sources.sidecar import is_sqlite

__all__ = ["Listing", "list_files", "list_folder"]


@dataclass(frozen=True, slots=True)
class Listing:
    """`traces` are Kineto, `exports` SQLite databases, `beside` everything else; each sorted by path."""

    root: Path
    traces: tuple[Path, ...]
    exports: tuple[Path, ...]
    beside: tuple[Path, ...]
    losses: tuple[Loss, ...]


def list_folder(root: Path, limits: Limits) -> Listing:
    """The files of `root` and of its folders trace, ranks, server and nsys. A file is taken as itself. Where there is no
    trace, those that a capture's server has written and the capture, which was killed, has not brought in.

    Links that lead out of `root` are left out and counted. Raises SourceError where `root` cannot be read.
    """
    if not root.is_dir():
        return list_files([root], limits)
    losses: list[Loss] = []
    files: list[tuple[Path, bool]] = []
    try:
        home = root.resolve(strict=True)
        for name in (*TRACE_FOLDERS, *OTHER_FOLDERS):
            place = root / name
            if place.is_dir() and _inside(place, home, losses):
                found = [path for path in sorted(place.iterdir()) if _regular(path) and _inside(path, home, losses)]
                files += [(path, name in TRACE_FOLDERS) for path in found]
    except OSError as error:
        raise SourceError(
            f"cannot read the folder ({error.strerror})", where=str(root), hint="check its permissions"
        ) from error
    if len(files) > limits.files:
        raise SourceError(f"more than {limits.files} files", where=str(root), hint="give a capture's own folder")
    traces = [path for path, may in files if may and is_kineto(path, limits)]
    if not traces:
        traces = _left(root, home, limits, losses)
    rest = [path for path, _ in files if path not in set(traces)]
    exports = [path for path in rest if is_sqlite(path)]
    return Listing(root, tuple(traces), tuple(exports), tuple(p for p in rest if p not in exports), tuple(losses))


def _left(root: Path, home: Path, limits: Limits, losses: list[Loss]) -> list[Path]:
    """Traces in the newest folder of `incoming` that holds any."""
    try:
        places = sorted((p for p in (root / "incoming").iterdir() if p.is_dir()), reverse=True)
        for place in places[: limits.files]:
            found = [p for p in sorted(place.iterdir())[: limits.files] if _regular(p) and _inside(p, home, losses)]
            traces = [path for path in found if _inside(place, home, losses) and is_kineto(path, limits)]
            if traces:
                detail = (
                    f"the capture ended before it brought the traces in; those in {place.relative_to(root)} are read"
                )
                losses.append(loss("traces_not_brought_in", "info", len(traces), detail))
                return traces
    except OSError:  # there is none
        pass
    return []


def list_files(paths: Sequence[Path], limits: Limits) -> Listing:
    """The files `paths`, each of which must exist; those that are not nsys exports are taken as traces."""
    if not paths:
        raise SourceError("no files were given", hint="give a folder, or the traces in it")
    for path in paths:
        if not path.exists():
            raise SourceError("no such file or folder", where=str(path), hint="check the path")
        if not _regular(path):
            raise SourceError("not a regular file", where=str(path), hint="give a trace, or a folder of traces")
    exports = [path for path in paths if is_sqlite(path)]
    traces = [path for path in paths if path not in exports]
    return Listing(paths[0].parent, tuple(traces), tuple(exports), (), ())


def _regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode) and not path.name.startswith(".")
    except OSError:
        return False


def _inside(path: Path, home: Path, losses: list[Loss]) -> bool:
    if not path.is_symlink() or path.resolve().is_relative_to(home):
        return True
    losses.append(loss("link_left_out", "warning", 1, f"{path.name} leads out of the folder; give its target itself"))
    return False

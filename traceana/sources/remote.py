"""A capture folder on a storage, brought here as far as it must be: what lies beside the traces, and of each trace its
name. The traces themselves are fetched where they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from traceana.errors import SourceError
from traceana.sources.folder import Listing, list_files, list_folder
from traceana.sources.kineto import is_kineto
from traceana.sources.limits import Limits
from traceana.sources.places import OTHER_FOLDERS, TRACE_FOLDERS
from traceana.sources.storage import Remote

__all__ = ["stage"]

_HEAD = 1 << 20  # of a file is enough to see a trace; one that shows none is fetched whole


def stage(url: str, into: Path, limits: Limits) -> tuple[Listing, Mapping[Path, str]]:
    """The listing of the folder (or one file) `url` as of a copy at `into`, and the URL of each trace in it.

    In that copy traces may be cut short: only their names count. Raises SourceError where `url` cannot be read.
    """
    base = url.rstrip("/")
    try:
        if Remote.at(base).is_file():
            parent, _, name = base.rpartition("/")
            _bring(Remote.at(parent), name, 0, into, limits)
            return replace(list_files([into / name], limits), root=into), {into / name: base}
        remote, cut, count = Remote.at(base), dict[Path, str](), 0
        for folder in (*TRACE_FOLDERS, *OTHER_FOLDERS):
            for name, size in remote.files(folder):
                count += 1
                if count > limits.files:
                    raise SourceError(f"more than {limits.files} files", where=url, hint="give a capture's own folder")
                inner = f"{folder}/{name}" if folder else name
                if _bring(remote, inner, size if folder in TRACE_FOLDERS else 0, into, limits):
                    cut[into / inner] = f"{base}/{inner}"
    except OSError as error:
        raise SourceError(
            f"cannot read the folder ({error.strerror or error})", where=url, hint="check the URL and its permissions"
        ) from error
    if not count:
        raise SourceError("no file here", where=url, hint="check the URL")
    listing = list_folder(into, limits)
    traces = {path: cut.get(path, f"{base}/{path.relative_to(into)}") for path in listing.traces}
    return listing, traces


def _bring(remote: Remote, name: str, size: int, into: Path, limits: Limits) -> bool:
    """Copies a file, or only the start of a large one that shows itself to be a trace; true where it was cut."""
    here = into / name
    if size > _HEAD:
        here.parent.mkdir(parents=True, exist_ok=True)
        here.write_bytes(remote.read(name, _HEAD))
        if is_kineto(here, limits):
            return True
    remote.fetch(name, here)
    return False

"""Answers kept: the JSON document of a report, under everything that it was made from.

The key is the content of every file that a report of the folder may look at, the options, and traceana's own code; so
an answer that is found is the one that would be computed. It is kept in the user's cache and checked when it is read.
Nothing here imports more than the standard library: an answer that is there is printed before polars would be loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from traceana.sources.cache_room import make_room
from traceana.sources.places import OTHER_FOLDERS, TRACE_FOLDERS, cache_folder, code_stamp

__all__ = ["answer_key", "load_answer", "save_answer"]

_BLOCK = 1 << 20
_DIGEST = 32


def answer_key(folder: Path | str, options: Mapping[str, object]) -> str | None:
    """The key of the report on `folder` with `options`; None where there can be none (a URL, a file that cannot be
    read, a cache on a storage)."""
    if isinstance(folder, str) or isinstance(cache_folder(), str):
        return None
    digest = hashlib.sha256()
    # The zone, because a server's log has local times.
    facts = {"python": sys.version, "zone": os.environ.get("TZ"), "folder": str(folder.absolute()), **options}
    digest.update(f"{code_stamp()} {json.dumps(facts, sort_keys=True, default=str)}".encode())
    try:
        folder.stat()
        files = list(_files(folder))
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
            for (name, _), content in zip(files, pool.map(_content, [path for _, path in files]), strict=True):
                digest.update(f"\0{name}\0".encode(errors="surrogateescape"))
                digest.update(content)
    except OSError:
        return None
    return digest.hexdigest()


def load_answer(key: str) -> str | None:
    """The document kept under `key`, or None where there is none, or not a sound one."""
    place = _place(key)
    try:
        data = place.read_bytes()
    except OSError:
        return None
    with contextlib.suppress(OSError):
        os.utime(place)  # so that what is used can be told from what is not
    digest, text = data[:_DIGEST], data[_DIGEST:]
    return text.decode(errors="replace") if hashlib.sha256(text).digest() == digest else None


def save_answer(key: str, text: str) -> None:
    """Keeps `text` under `key`, whole or not at all; where that cannot be done the next run computes it again."""
    place, data = _place(key), text.encode()
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, made = tempfile.mkstemp(prefix=".new-", dir=place.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            Path(made).replace(place)
        except OSError:
            Path(made).unlink(missing_ok=True)
            raise
        make_room(Path(cache_folder()))


def _place(key: str) -> Path:
    return Path(cache_folder()) / "answers" / key[:2] / f"{key[2:]}.json"


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file that a report may look at, with what tells it from others; for links also where they lead."""
    if not folder.is_dir():
        yield folder.name, folder
        return
    brought = [folder / name for name in (*TRACE_FOLDERS, *OTHER_FOLDERS)]
    for place in (*brought, *sorted((folder / "incoming").glob("*"))):
        if not place.is_dir():
            continue
        for path in sorted(place.iterdir()):
            if path.is_symlink() or place.is_symlink():
                yield f"{path.relative_to(folder)} -> {path.resolve()}", path
            elif stat.S_ISREG(path.stat().st_mode):
                yield str(path.relative_to(folder)), path


def _content(path: Path) -> bytes:
    """The digest of a file's content; of what is no file, only that."""
    digest = hashlib.sha256()
    if not path.is_file():
        return b"no file"
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.digest()

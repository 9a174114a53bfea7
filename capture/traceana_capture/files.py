"""Trace files on their way: whose they are by name, whether they are complete, and moving them unchanged."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceana_capture.errors import CaptureError

__all__ = ["TraceName", "atomic_write", "disk_error", "fetch", "incomplete", "parse_name", "write_json"]

_NAME = re.compile(
    r"^(?:(?P<prefix>.+)-)?(?P<id>\d+\.\d+)-TP-(?P<tp>\d+)(?:-DP-(?P<dp>\d+))?(?:-PP-(?P<pp>\d+))?(?:-EP-(?P<ep>\d+))?"
    r"(?:-(?P<stage>EXTEND|DECODE|prefill|decode))?\.trace\.json(?:\.gz)?$"
)
_CHUNK = 1 << 20


@dataclass(frozen=True)
class TraceName:
    """What SGLang's file name says. A part that is not in the name is rank 0 of 1; `stage` is not to be trusted."""

    profile_id: str
    tp: int
    pp: int
    dp: int | None
    ep: int | None
    stage: str | None


def parse_name(name: str) -> TraceName | None:
    """The parts of a rank's trace file name; None for anything else (merged files, memory snapshots)."""
    found = _NAME.match(name)
    if found is None or name.startswith("merged-"):
        return None
    number = {k: None if found[k] is None else int(found[k]) for k in ("tp", "dp", "pp", "ep")}
    return TraceName(found["id"], number["tp"] or 0, number["pp"] or 0, number["dp"], number["ep"], found["stage"])


def incomplete(path: Path) -> str | None:
    """Why a trace file is not whole, or None: its gzip stream ends with a right checksum, and its JSON is closed.

    Reads the file once, without keeping it: about 0.3 GB/s of uncompressed trace.
    """
    try:
        with path.open("rb") as file:
            head = file.read(2)
            file.seek(0)
            if head == b"\x1f\x8b":
                return _gzip_fault(file)
            file.seek(max(os.fstat(file.fileno()).st_size - 64, 0))
            return _json_fault(file.read(64))
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _gzip_fault(file: Any) -> str | None:
    tail = b""
    unzip = zlib.decompressobj(31)
    while chunk := file.read(_CHUNK):
        try:
            while chunk:
                tail = (tail + unzip.decompress(chunk))[-64:]
                chunk = unzip.unused_data
                if unzip.eof:
                    if not chunk.strip(b"\0"):
                        break
                    unzip = zlib.decompressobj(31)  # a gzip file may have several members
        except zlib.error as error:
            return f"damaged ({error})"
    if not unzip.eof:
        return "truncated: the gzip stream has no end"
    return _json_fault(tail)


def _json_fault(tail: bytes) -> str | None:
    end = tail.rstrip()[-1:]
    if not end:
        return "empty"
    return None if end in (b"}", b"]") else "truncated: the JSON is not closed"


def fetch(source: Path, target: Path) -> None:
    """Bring a file to `target` with the bytes that the server wrote: a rename on one file system, else a copy that
    appears whole. An existing target is never replaced. Raises CaptureError for a full disk; the source then stays, and
    the error says where."""
    if target.exists():
        raise CaptureError("exists already", where=str(target), hint="-o with a new folder")
    partial = target.with_name(f".{target.name}.part")
    try:
        try:
            os.rename(source, target)
            return
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EACCES):
                raise
        shutil.copyfile(source, partial)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
        with contextlib.suppress(OSError):
            source.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        failed = disk_error(error, target)
        raise CaptureError(failed.what, where=failed.where, hint=f"make room there and copy {source} into it") from None


def disk_error(error: OSError, path: Path) -> CaptureError:
    """The same failure in words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CaptureError(
            "no space left",
            where=str(path.parent),
            hint="-o DIR on a disk with room; the server's own files stay where it wrote them",
        )
    return CaptureError(
        f"cannot be written ({error.strerror})", where=str(path), hint="-o DIR with a folder that this user may write"
    )


def atomic_write(path: Path, data: bytes) -> None:
    """The whole file or none: a temporary beside it, synced, then renamed over it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise disk_error(error, path) from None


def write_json(path: Path, document: object) -> None:
    """`document` as indented JSON, atomically."""
    atomic_write(path, (json.dumps(document, indent=1, default=str) + "\n").encode())

"""The server's log in the capture: what it said, without secrets."""

from __future__ import annotations

import os
from pathlib import Path

from traceana_capture.files import atomic_write
from traceana_capture.secrets import mask_text

__all__ = ["keep_log"]

_HEAD, _WHOLE = 8 << 20, 64 << 20


def keep_log(source: Path, target: Path, *, since: int = 0) -> int:
    """Copy a log with secrets masked; of more than 64 MB, the head (the server's start-up) and what came after byte
    `since`. Returns the bytes left out."""
    with source.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE:
            parts, left = [file.read()], 0
        else:
            head = file.read(_HEAD)
            start = max(since, size - _WHOLE, _HEAD)
            file.seek(start)
            parts, left = [head, b"\n", file.read()], start - _HEAD
    text = b"".join(parts).decode("utf-8", "replace")
    atomic_write(target, "".join(map(mask_text, text.splitlines(keepends=True))).encode())
    return left

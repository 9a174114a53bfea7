"""The server's log in the capture: what it said, without secrets."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from traceana_capture.files import atomic_write
from traceana_capture.secrets import mask_text

__all__ = ["decode_rates", "keep_log"]

_HEAD, _WHOLE = 8 << 20, 64 << 20
# The first stage's lines: every number of the label is 0 (` PP0`, ` DP0 TP0 PP0`, or no label at all).
_BATCH = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)?(?: [A-Z]+0)*\] (Decode|Prefill) batch")
_RATE = re.compile(r"gen throughput \(token/s\): (\d+(?:\.\d+)?)")


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


def decode_rates(source: Path, since: int, windows: Sequence[tuple[int, int]]) -> list[float]:
    """The `gen throughput` figures, in tokens per second, of the first stage's decode lines that lie wholly inside one
    of `windows` (epoch ns) and have no prefill between them and the decode line before: decode alone. The log prints
    this host's local time, to a second. Empty for a log without such lines."""
    with source.open("rb") as file:
        file.seek(since)
        text = file.read(_WHOLE).decode("utf-8", "replace")
    rates: list[float] = []
    pure = False
    for line in text.splitlines():
        found = _BATCH.match(line)
        if found is None:
            continue
        rate = _RATE.search(line) if found[2] == "Decode" else None
        if rate is not None and pure:
            at = round(time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S"))) * 10**9
            if any(start <= at and at + 10**9 <= end for start, end in windows):
                rates.append(float(rate[1]))
        pure = found[2] == "Decode"
    return rates

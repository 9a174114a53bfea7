"""Read one torch.profiler (Kineto) trace: header facts and events as columns.

    read_kineto(path) -> RawTrace

Times stay what the file says (decimal microseconds) until `traceana.tables.build` makes epoch nanoseconds of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from isal import igzip

from traceana.errors import SourceError
from traceana.sources.kineto_fast import EVENT_CUT, EVENT_SCHEMA, parse_plain

__all__ = ["RawTrace", "read_kineto"]

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_END = re.compile(rb"\}\s*\]\s*(,\s*\"[^\"]*\"\s*:|\}\s*$)")
_WANTED = re.compile(
    rb'"cat"\s*:\s*"(?:kernel|gpu_memcpy|gpu_memset|cuda_runtime|cuda_driver|cpu_op|user_annotation|'
    rb'gpu_user_annotation|overhead)"'
)
CHUNK = 8 << 20


@dataclass(frozen=True, slots=True)
class RawTrace:
    """One trace as read: `header` is everything beside the events, `metadata` the process and thread names."""

    path: Path
    header: Mapping[str, Any]
    events: pa.Table
    metadata: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def read_kineto(path: Path) -> RawTrace:
    """The trace in `path`, gz or plain. Raises SourceError where it cannot be read."""
    raw = path.read_bytes()
    data = igzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    start = _EVENTS.search(data)
    if start is None:
        raise SourceError("not a Kineto trace", where=str(path), hint="a trace holds a list called traceEvents")
    lo = start.end()
    tail = max(len(data) - 65536, lo)
    end = _END.search(data, tail) or _END.search(data, lo)
    stop = end.start() + 1 if end else len(data)
    close = data.index(b"]", stop) if end else len(data)
    header = json.loads(data[: start.end()] + data[close:])
    tables: list[pa.Table] = []
    metadata: list[dict[str, Any]] = []
    while lo < stop:
        cut = EVENT_CUT.search(data, min(lo + CHUNK, stop), stop)
        hi = cut.start() + 1 if cut else stop
        kept: list[bytes] = []
        for event in EVENT_CUT.split(data[lo:hi].strip().lstrip(b"{").lstrip().removeprefix(b'"').removesuffix(b"}")):
            if _WANTED.search(event):
                kept.append(event.replace(b"\n", b" "))
            elif b'"M"' in event:
                metadata.append(json.loads(b'{"' + event + b"}"))
        if kept:
            tables.append(parse_plain(b'{"' + b'}\n{"'.join(kept) + b"}"))
        lo = hi + 1
    return RawTrace(path, header, pa.concat_tables(tables) if tables else EVENT_SCHEMA.empty_table(), metadata)

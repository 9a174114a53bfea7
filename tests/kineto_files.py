"""Small Kineto traces for tests: events, the layouts writers use, and what a reader must get from them."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

BASE_NS = 1_790_857_026_000_000_000
LAYOUTS = ("compact", "tight", "indented", "kineto")

_NUMBER = re.compile(r'"@@([^@"]*)@@"')

Event = dict[str, Any]


class Number(str):
    """A number with exactly these digits: `Number("5112787626616.992")`, which a float would not keep."""


def us(ns: int) -> Number:
    """`ns` nanoseconds as Kineto writes them: microseconds with three decimals."""
    sign = "-" if ns < 0 else ""
    return Number(f"{sign}{abs(ns) // 1000}.{abs(ns) % 1000:03}")


def span(cat: str, name: str, ts: int, dur: int, *, pid: int = 7, tid: int = 7, **args: object) -> Event:
    """A complete event; `ts` and `dur` in nanoseconds since the base."""
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": us(ts), "dur": us(dur), "args": args}


def kernel(
    name: str, ts: int, dur: int, correlation: int, *, stream: int = 7, device: int = 0, **args: object
) -> Event:
    """A kernel, as Kineto gives it: its process is the GPU and its thread the stream."""
    fields = {"External id": correlation, "device": device, "context": 1, "stream": stream, "correlation": correlation}
    return span("kernel", name, ts, dur, pid=device, tid=stream, **fields, grid=[1, 1, 1], **args)


def launch(ts: int, dur: int, correlation: int, name: str = "cudaLaunchKernel", pid: int = 7) -> Event:
    """A runtime call that launches."""
    fields = {"External id": correlation, "cbid": 211, "correlation": correlation}
    return span("cuda_runtime", name, ts, dur, pid=pid, tid=pid, **fields)


def header(rank: int | None = 0, world: int = 1, base: int = BASE_NS, **more: object) -> dict[str, Any]:
    """What stands beside the events."""
    found: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "GPU"}]}
    if rank is not None:
        found["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world}
    return {**found, "baseTimeNanoseconds": base, **more}


def text(
    events: Sequence[Mapping[str, object]], head: Mapping[str, object], layout: str = "kineto", *, escaped: bool = True
) -> str:
    """The trace in one of LAYOUTS; `escaped` writes what is not ASCII as JSON escapes, and not as UTF-8."""
    how: dict[str, Any] = {"ensure_ascii": escaped}
    if layout == "compact":
        return _dump({**head, "traceEvents": events}, **how)
    if layout == "tight":
        return _dump({**head, "traceEvents": events}, separators=(",", ":"), **how)
    if layout == "indented":
        return _dump({**head, "traceEvents": events}, indent=1, **how)
    rows = ",\n".join(_kineto_event(event, how) for event in events)
    facts = "".join(f"  {json.dumps(key)}: {_dump(value)},\n" for key, value in head.items())
    return f'\n{{\n{facts}  "traceEvents": [\n{rows}\n  ],\n  "traceName": "t.json"\n}}'


def _dump(value: object, **how: Any) -> str:
    return _NUMBER.sub(r"\1", json.dumps(_marked(value), **how))


def _marked(value: object) -> object:
    if isinstance(value, Number):
        return f"@@{value}@@"
    if isinstance(value, Mapping):
        return {key: _marked(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(one) for one in value]
    return value


def _kineto_event(event: Mapping[str, object], how: Mapping[str, Any]) -> str:
    rows = ", ".join(f"{json.dumps(k)}: {_dump(v, **how)}" for k, v in event.items() if k not in ("ts", "dur", "args"))
    times = ", ".join(f"{json.dumps(k)}: {_dump(event[k])}" for k in ("ts", "dur") if k in event)
    body = "  {\n    " + ",\n    ".join(filter(None, [rows, times]))
    args = event.get("args")
    if isinstance(args, dict):
        inner = _dump(args, **how)[1:-1]
        body += ',\n    "args": {\n      ' + inner + "\n    }"
    return body + "\n  }"


def write(
    path: Path, events: Sequence[Mapping[str, object]], head: Mapping[str, object] | None = None, layout: str = "kineto"
) -> Path:
    """Writes the trace, packed where the name ends in gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text(events, header() if head is None else head, layout).encode()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    return path


def in_ns(value: object) -> int:
    """A time of the file in nanoseconds, by decimal arithmetic."""
    return int(Decimal(str(value)) * 1000)

"""Sound captures that mutations start from, small enough that thousands of them can be tried in a minute."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kineto_files as kf
from nsys_export import Export, pid_of, tid_of

from traceana.demo_capture import demo_folder
from tracegen import build

__all__ = ["Files", "beside", "exports", "tiny", "traces"]

Files = dict[str, bytes]
"""A capture: path in its folder -> bytes."""

Event = dict[str, Any]

_BEFORE = 4  # visits of a real trace that are left out before the excerpt
_VISITS = 3
_LINES = 60
_KEPT = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "user_annotation", "gpu_user_annotation", "overhead")
_EXTRA = "TRACEANA_FUZZ_CAPTURES"  # more captures for a run by hand, separated as in PATH


@cache
def traces() -> tuple[Files, ...]:
    """Captures of traces only: worlds derived by hand, and excerpts of the bundled real capture and of those that
    TRACEANA_FUZZ_CAPTURES names."""
    found = [_generated(name) for name in ("hand_late_sender", "hand_blocked_send")]
    more = [Path(p) for p in os.environ.get(_EXTRA, "").split(os.pathsep) if p]
    return (*found, *(_excerpt(folder) for folder in (demo_folder(), *more)))


@cache
def tiny() -> Files:
    """Two ranks of a few dozen events, which a reader takes milliseconds for."""
    events = [
        event
        for n in range(12)
        for event in (
            kf.span("user_annotation", "recv_requests", 900 * n, 100),
            kf.span("user_annotation", "run_batch", 900 * n + 200, 300),
            kf.launch(900 * n + 210, 50, n + 1),
            kf.kernel(f"gemm_{n % 3}", 900 * n + 300, 400, n + 1, est=kf.Number("0.5")),
        )
    ]
    names = ("1795969813.5867767-TP-0-PP-0.trace.json", "1795969813.5867767-TP-0-PP-1.trace.json")
    layouts = ("kineto", "tight")
    texts = (kf.text(events, kf.header(rank, 2), layouts[rank]).encode() for rank in range(2))
    return {f"trace/{name}": text for name, text in zip(names, texts, strict=True)}


@cache
def beside() -> Files:
    """What lies beside the traces of the bundled capture, the long files cut, and a manifest."""
    found: Files = {}
    for path in sorted(demo_folder().rglob("*")):
        if path.is_file() and path.suffix != ".gz":
            data = path.read_bytes()
            if path.suffix in (".log", ".csv") or path.name.startswith("metrics"):
                data = b"".join(data.splitlines(keepends=True)[: _LINES if path.suffix != ".txt" else 400])
            if path.name == "client.json":
                document = json.loads(data)
                data = json.dumps({"load": document["load"], "requests": document["requests"][-20:]}).encode()
            found[path.name] = data
    command = shlex.join(json.loads(found["manifest.json"])["command"])
    return found | {"manifest.json": json.dumps(_manifest()).encode(), "command.txt": command.encode()}


@cache
def exports() -> tuple[bytes, ...]:
    """nsys exports as bytes: two processes on two GPUs, with ranges and messages; the second without ranges."""
    return tuple(_export(ranges) for ranges in (True, False))


def _generated(name: str) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        build(name, Path(folder))
        return _files(Path(folder))


def _files(folder: Path) -> Files:
    found = sorted((folder / "trace").iterdir())
    return {f"trace/{p.name.removesuffix('.gz')}": gzip.decompress(p.read_bytes()) for p in found}


def _excerpt(folder: Path) -> Files:
    """A few visits of every rank of a real capture."""
    files: Files = {}
    window: tuple[float, float] | None = None
    for path in sorted(folder.glob("*/[0-9]*.json.gz")):  # trace/ or ranks/
        document = json.loads(gzip.decompress(path.read_bytes()))
        events: list[Event] = document["traceEvents"]
        window = window or _window(events)
        document["traceEvents"] = list(_inside(events, window))
        document["deviceProperties"] = document["deviceProperties"][:1]
        files[f"trace/{path.name.removesuffix('.gz')}"] = json.dumps(document).encode()
    return files


def _window(events: Sequence[Event]) -> tuple[float, float]:
    starts = (
        sorted(e["ts"] for e in events if e.get("name") == "recv_requests")
        or sorted(e["ts"] for e in events if e.get("cat") == "kernel")[::200]
    )
    return starts[_BEFORE], starts[min(_BEFORE + _VISITS, len(starts) - 1)]


def _inside(events: Sequence[Event], window: tuple[float, float]) -> Iterator[Event]:
    low, high = window
    for event in events:
        if event.get("ph") == "M" or (
            event.get("ph") == "X" and event.get("cat") in _KEPT and low <= event["ts"] <= high
        ):
            yield event


def _manifest() -> dict[str, object]:
    """What `traceana capture` writes beside traces."""
    names = ["1795969813.5867767-TP-0-PP-0.trace.json.gz", "1795969813.5867767-TP-0-PP-1.trace.json.gz"]
    return {
        "schema_version": 1,
        "versions": {"traceana": "0.1.0", "torch": "2.11.0", "sglang": "0.5.16"},
        "command": ["python", "-m", "sglang.launch_server", "--pp-size", "2", "--max-running-requests", "16"],
        "ranks": [
            {"rank": n, "pp": n, "tp": 0, "host": "h", "pid": 100 + n, "gpu": n, "file": f"ranks/{name}"}
            for n, name in enumerate(names)
        ],
        "profile_request": {"num_steps": 30, "activities": ["CPU", "GPU"]},
        "clock_probes": [{"host": "h", "realtime_ns": 1_795_969_813_000_000_000, "monotonic_ns": 5, "width_ns": 80}],
        "steady_window": {"start_ns": 1_795_969_800_000_000_000, "end_ns": 1_795_969_806_000_000_000},
        "windows": [
            {"name": "steady", "start_ns": 10**18, "end_ns": 10**18 + 10**9, "decode_tokens": 900, "prefill_tokens": 9}
        ],
        "throughput": {"before": 952.0, "during": 700.5, "after": None},
        "problems": [{"name": "gpu_not_sampled", "severity": "warning", "rank": 0, "count": 1, "detail": "no NVML"}],
    }


def _export(ranges: bool) -> bytes:
    export = Export()
    for pid, device in ((100, 0), (101, 1)):
        export.add("PROCESSES", globalPid=pid_of(pid), pid=pid, name=f"sglang::scheduler_PP{device}")
        for n in range(24):
            at = 10_000 * n + 700 * device
            launch = export.call(pid, at, at + 50, "cudaLaunchKernel_v7000")
            export.kernel(pid, device, at + 60, at + 2_000, f"gemm_{n % 3}(int)", launch)
            if ranges:
                export.range(pid, at, at + 4_000, "recv_requests")
                export.range(pid, at + 4_000, at + 9_000, "run_batch")
                export.p2p(pid, device, at + 5_000, ["ncclSend" if device == 0 else "ncclRecv"])
        copy = export.call(pid, 900, 930, "cudaMemcpyAsync_v3020")
        export.add(
            "CUPTI_ACTIVITY_KIND_MEMCPY", start=2_100, end=2_200, deviceId=device, streamId=7, correlationId=copy,
            globalPid=pid_of(pid), bytes=4096, copyKind=1, srcKind=1, dstKind=2,
        )  # fmt: skip
        export.add("PROFILER_OVERHEAD", start=5, end=9, globalTid=tid_of(pid, pid), nameId=export.string("Flush"))
    with tempfile.TemporaryDirectory() as folder:
        path = export.write(Path(folder) / "r.sqlite")
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA page_size = 1024")
            database.commit()
            database.execute("VACUUM")
        database.close()
        return path.read_bytes()

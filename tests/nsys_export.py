"""Writes small nsys exports: the tables and columns of nsys 2023.4 (`old`) or 2026.2, with rows given by a test."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Export", "pid_of", "tid_of"]

_HEAD = "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER, contextId INTEGER, streamId INTEGER, "
_DDL = {
    "META_DATA_EXPORT": "name TEXT, value TEXT",
    "META_DATA_CAPTURE": "name TEXT, value TEXT",
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "ProcessStreams": "globalPid INTEGER, filenameId INTEGER, contentId INTEGER",
    "PROCESSES": "globalPid INTEGER, pid INTEGER, name TEXT",
    "TARGET_INFO_SYSTEM_ENV": "globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER, value TEXT",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
    "ANALYSIS_DETAILS": "globalVid INTEGER, duration INTEGER, startTime INTEGER, stopTime INTEGER",
    "ENUM_CUDA_MEM_KIND": "id INTEGER, name TEXT, label TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": _HEAD
    + "correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": _HEAD + "correlationId INTEGER, globalPid INTEGER, graphId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": _HEAD
    + "correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER, dstKind INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": _HEAD + "correlationId INTEGER, globalPid INTEGER, bytes INTEGER, memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER, "
    "correlationId INTEGER, nameId INTEGER, returnValue INTEGER",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": _HEAD + "correlationId INTEGER, globalPid INTEGER, syncType INTEGER",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, textId INTEGER, "
    "domainId INTEGER, jsonText TEXT",
    "PROFILER_OVERHEAD": "start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER, returnValue INTEGER",
}


def pid_of(pid: int) -> int:
    """globalPid of a process on the first machine."""
    return (1 << 48) + (pid << 24)


def tid_of(pid: int, tid: int) -> int:
    """globalTid of a thread."""
    return pid_of(pid) + tid


@dataclass
class Export:
    """Collects rows, then writes them. Times are nanoseconds of the session."""

    rows: list[tuple[str, dict[str, object]]] = field(default_factory=list[tuple[str, dict[str, object]]])
    strings: dict[str, int] = field(default_factory=dict[str, int])
    correlation: int = 0

    def string(self, value: str) -> int:
        return self.strings.setdefault(value, 100 + len(self.strings))

    def add(self, table: str, **row: object) -> None:
        self.rows.append((table, row))

    def call(self, pid: int, start: int, end: int, name: str, tid: int | None = None) -> int:
        """One runtime call; returns its correlation."""
        self.correlation += 1
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=start,
            end=end,
            globalTid=tid_of(pid, tid or pid),
            correlationId=self.correlation,
            nameId=self.string(name),
        )
        return self.correlation

    def kernel(self, pid: int, device: int, start: int, end: int, name: str, correlation: int, stream: int = 7) -> None:
        self.add(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            start=start,
            end=end,
            deviceId=device,
            streamId=stream,
            correlationId=correlation,
            globalPid=pid_of(pid),
            demangledName=self.string(name),
            shortName=self.string(name.split("(")[0]),
        )

    def range(self, pid: int, start: int, end: int | None, text: str | None, **row: object) -> None:
        """One NVTX push/pop range; `jsonText` carries a payload."""
        row.setdefault("eventType", 59)
        self.add("NVTX_EVENTS", start=start, end=end, text=text, globalTid=tid_of(pid, pid), domainId=1, **row)

    def p2p(self, pid: int, device: int, at: int, ops: Sequence[str], *, payload: str | None = None) -> None:
        """An NCCL group at `at` that launches one SendRecv kernel of 50 ns, 200 ns later."""
        self.range(pid, at, at + 2, "ncclGroupStart")
        for i, op in enumerate(ops):
            self.range(pid, at + 10 + 5 * i, at + 13 + 5 * i, op, jsonText=payload)
        self.range(pid, at + 60, at + 90, "ncclGroupEnd")
        launch = self.call(pid, at + 65, at + 80, "cuLaunchKernelEx")
        self.kernel(
            pid, device, at + 200, at + 250, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", launch, 9
        )

    def write(self, path: Path, *, epoch_ns: int | None = 1_000_000, without: Sequence[str] = ()) -> Path:
        """The database at `path`, without the tables named."""
        self.add("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2026.2.1.210")
        if epoch_ns is not None:
            self.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=epoch_ns)
        with sqlite3.connect(path) as database:
            for table, columns in _DDL.items():
                if table not in without:
                    database.execute(f"CREATE TABLE {table} ({columns})")
            if "StringIds" not in without:
                database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, v) for v, i in self.strings.items()])
            for table, row in self.rows:
                if table not in without:
                    marks = ",".join("?" * len(row))
                    database.execute(f"INSERT INTO {table} ({','.join(row)}) VALUES ({marks})", tuple(row.values()))
        database.close()
        return path

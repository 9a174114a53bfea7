"""Nsight Systems exports (`nsys export --type sqlite`): raw columns of the tables traceana uses, read in place.

Every version of nsys has other columns; what an export lacks is null. The environment and the output of the profiled
processes, which an export holds as well, are never read into a table; `export_secrets` only names what it finds there.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from traceana.errors import SourceError
from traceana.sources.losses import Loss, loss
from traceana.sources.secrets import find_in_text

__all__ = ["NsysExport", "export_secrets", "process_of", "read_export"]

_KERNEL, _GRAPH = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_ACTIVITIES = (_KERNEL, _GRAPH, "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
_RANGES = (59, 60, 70, 71)  # NVTX push/pop and start/end ranges; the second pair imported from text
_ROWS_AT_ONCE = 200_000
_LONGEST_NS = 1 << 61
# What sqlite3 raises while it reads: the second where a damaged schema holds names that are no UTF-8.
_DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)
_HINT = "export the report again with `nsys export --type sqlite --force-overwrite=true REPORT.nsys-rep`"

# Table -> columns to read; all integers. Names are ids of StringIds.
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    _KERNEL: ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "demangledName", "shortName"),
    _GRAPH: ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "graphId"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "bytes", "copyKind", "srcKind", "dstKind",
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": (
        "start", "end", "deviceId", "streamId", "correlationId", "globalPid", "bytes", "memKind",
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("start", "end", "globalTid", "correlationId", "nameId"),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": ("start", "end", "correlationId", "globalPid", "syncType"),
    "NVTX_EVENTS": ("start", "end", "eventType", "globalTid", "textId", "domainId"),
    "PROFILER_OVERHEAD": ("start", "end", "globalTid", "nameId"),
    "CUPTI_ACTIVITY_KIND_OVERHEAD": ("start", "end", "globalTid", "nameId"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NsysExport:
    """Raw frames by nsys' own table and column names (int64, null where the export lacks it), and what says whose they
    are. `start` and `end` are nanoseconds since `epoch_ns`, the start of the session (None: the export lacks it); what
    was open at `stop_ns`, when recording stopped, ends then."""

    path: Path
    tables: Mapping[str, pl.DataFrame]
    strings: pl.DataFrame  # id, value: the names in use
    epoch_ns: int | None
    stop_ns: int | None
    processes: Mapping[int, tuple[int, str]]  # globalPid -> pid, name
    memory_kinds: Mapping[int, str]
    host: str | None
    version: str | None
    losses: list[Loss] = field(default_factory=list[Loss])


def process_of(global_tid: pl.Expr) -> pl.Expr:
    """globalPid of a globalTid: the thread is its lowest 24 bits."""
    return global_tid - global_tid % (1 << 24)


def read_export(path: Path) -> NsysExport:
    """The export at `path`. Raises SourceError where it is damaged, no SQLite file, or no export with GPU activity."""
    losses: list[Loss] = []
    with _opened(path) as database:
        tables = _tables(database)
        if not {"StringIds", "META_DATA_EXPORT"} & tables:
            raise SourceError("an SQLite file, but no export of nsys", where=str(path), hint=_HINT)
        if not tables & set(_ACTIVITIES):
            raise SourceError(
                "the export holds no GPU activity", where=str(path), hint="record with `nsys profile -t cuda,nvtx`"
            )
        frames: dict[str, pl.DataFrame] = {}
        for name in _COLUMNS:
            try:
                frames[name] = _read(database, name, losses) if name in tables else _empty(name)
            except _DAMAGE as error:
                if name == _KERNEL:
                    raise
                losses.append(loss("nsys_table_damaged", "error", 1, f"{path.name}: {name}: {error}"))
                frames[name] = _empty(name)
        used = [frames[t].get_column(c) for t, c in _names()]
        processes = _rows(database, tables, "PROCESSES", "SELECT globalPid, pid, name FROM PROCESSES", losses)
        kinds = _rows(database, tables, "ENUM_CUDA_MEM_KIND", "SELECT id, label FROM ENUM_CUDA_MEM_KIND", losses)
        epoch = _rows(database, tables, "TARGET_INFO_SESSION_START_TIME",
                      "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME", losses)  # fmt: skip
        stop = _rows(database, tables, "ANALYSIS_DETAILS", "SELECT max(duration) FROM ANALYSIS_DETAILS", losses)
        host = _rows(database, tables, "TARGET_INFO_SYSTEM_ENV",
                     "SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname'", losses)  # fmt: skip
        version = _rows(database, tables, "META_DATA_EXPORT",
                        "SELECT value FROM META_DATA_EXPORT WHERE name = 'EXPORT_PRODUCT_VERSION'", losses)  # fmt: skip
        return NsysExport(
            path=path,
            tables=frames,
            strings=_strings(database, tables, used, losses),
            epoch_ns=_time(epoch),
            stop_ns=_time(stop),
            processes={
                r[0]: (r[1], str(r[2] or "")) for r in processes if isinstance(r[0], int) and isinstance(r[1], int)
            },
            memory_kinds={r[0]: str(r[1]) for r in kinds if isinstance(r[0], int)},
            host=next((str(r[0]) for r in host), None),
            version=next((str(r[0]) for r in version), None),
            losses=losses,
        )


def export_secrets(path: Path) -> list[str]:
    """Names of the secrets in an export: in the environment, the arguments and the output of what was profiled."""
    losses: list[Loss] = []
    with _opened(path) as database:
        tables = _tables(database)
        texts: list[str] = []
        words = _rows(database, tables, "META_DATA_CAPTURE", "SELECT name, value FROM META_DATA_CAPTURE", losses)
        texts += [str(value) for name, value in words if ":ARGUMENT_" not in str(name)]
        texts.append(" ".join(str(value) for name, value in words if ":ARGUMENT_" in str(name)))
        about = _rows(database, tables, "TARGET_INFO_SYSTEM_ENV", "SELECT value FROM TARGET_INFO_SYSTEM_ENV", losses)
        texts += [str(value) for (value,) in about]
        if "StringIds" in tables:
            streams = "SELECT value FROM StringIds WHERE id IN (SELECT contentId FROM ProcessStreams)"
            texts += [str(value) for (value,) in _rows(database, tables, "ProcessStreams", streams, losses)]
    return sorted({secret.name for text in texts for secret in find_in_text(text)})


@contextmanager
def _opened(path: Path) -> Generator[sqlite3.Connection, None, None]:
    """The database, never written and never locked: `immutable` reads it even where another program holds it."""
    try:
        database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    except sqlite3.Error as error:
        raise SourceError(
            "cannot open the nsys export", where=str(path), hint=f"{error}; check that it exists"
        ) from error
    try:
        database.execute("PRAGMA trusted_schema = OFF")  # a database may bring functions of its own
        database.text_factory = lambda data: data.decode("utf-8", "replace")
        yield database
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise SourceError(f"damaged nsys export: {error}", where=str(path), hint=_HINT) from error
    finally:
        database.close()


def _tables(database: sqlite3.Connection) -> set[str]:
    """Plain tables: a view or a virtual table under one of the names is not what nsys writes."""
    rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'")
    return {str(row[0]) for row in rows}


def _rows(
    database: sqlite3.Connection, tables: set[str], table: str, query: str, losses: list[Loss]
) -> list[Sequence[object]]:
    """The rows of a small table; none where the export lacks it or it cannot be read."""
    if table not in tables:
        return []
    try:
        return database.execute(query).fetchall()
    except _DAMAGE as error:
        losses.append(loss("nsys_table_damaged", "warning", 1, f"{table}: {error}"))
        return []


def _time(rows: Sequence[Sequence[object]]) -> int | None:
    return next((r[0] for r in rows if isinstance(r[0], int) and 0 <= r[0] <= _LONGEST_NS), None)


def _schema(table: str) -> dict[str, pl.DataType]:
    columns: dict[str, pl.DataType] = dict.fromkeys(_COLUMNS[table], pl.Int64())
    return columns | ({"text": pl.String(), "jsonText": pl.String()} if table == "NVTX_EVENTS" else {})


def _empty(table: str) -> pl.DataFrame:
    return pl.DataFrame(schema=_schema(table))


def _read(database: sqlite3.Connection, table: str, losses: list[Loss]) -> pl.DataFrame:
    there = {str(row[1]) for row in database.execute(f'PRAGMA table_info("{table}")')}
    columns = _schema(table)
    # SQLite keeps any type in any column; a text where a number belongs must not become a number.
    picked = [
        f"CASE typeof({c}) WHEN '{'text' if dtype == pl.String() else 'integer'}' THEN {c} END"
        if c in there
        else "NULL"
        for c, dtype in columns.items()
    ]
    where = f" WHERE eventType IN {_RANGES}" if table == "NVTX_EVENTS" and "eventType" in there else ""
    cursor = database.execute(f'SELECT {", ".join(picked)} FROM "{table}"{where}')
    # In pieces: the rows of a long recording, as Python tuples, would take gigabytes.
    parts = [_empty(table)]
    while rows := cursor.fetchmany(_ROWS_AT_ONCE):
        parts.append(pl.DataFrame(rows, schema=columns, orient="row"))
    frame = pl.concat(parts)
    good = frame.drop_nulls("start" if table == "NVTX_EVENTS" else ["start", "end"])
    # Beyond decades of the session a time is none, and the epoch added to it could pass the largest integer.
    possible = (pl.col(c).is_between(-_LONGEST_NS, _LONGEST_NS).fill_null(True) for c in ("start", "end"))
    good = good.filter((pl.col("end") >= pl.col("start")).fill_null(True), *possible)
    if good.height < frame.height:
        detail = f"{table}: rows without a start, or without an end after it"
        losses.append(loss("event_negative_duration", "warning", frame.height - good.height, detail))
    return good


def _names() -> Iterator[tuple[str, str]]:
    for table, columns in _COLUMNS.items():
        for column in columns:
            if column in ("demangledName", "shortName", "nameId", "textId"):
                yield table, column


def _strings(
    database: sqlite3.Connection, tables: set[str], used: Sequence[pl.Series], losses: list[Loss]
) -> pl.DataFrame:
    """id and value of the strings in use: an export holds many more, among them the processes' output."""
    ids: list[int] = pl.concat(used).drop_nulls().unique().sort().to_list()
    rows: list[Sequence[object]] = []
    for at in range(0, len(ids), 500):
        some = ",".join(map(str, ids[at : at + 500]))
        query = f"SELECT CAST(id AS INTEGER), CAST(value AS TEXT) FROM StringIds WHERE id IN ({some})"
        rows += _rows(database, tables, "StringIds", query, losses)
    return pl.DataFrame(rows, schema={"id": pl.Int64(), "value": pl.String()}, orient="row", strict=False)

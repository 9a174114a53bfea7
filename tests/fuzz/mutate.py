"""Damage: of bytes, of JSON trees, of trace events, of lines of text, of the cells of a database."""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any, cast

__all__ = ["damage_bytes", "damage_database", "damage_events", "damage_json", "damage_lines", "pack"]

Event = dict[str, Any]

HOSTILE: tuple[object, ...] = (
    0, -1, 1, 2, 7, 255, -(2**31), 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30,
    0.5, -0.5, 0.0001, 1e-300, 1e18, 1e300, float("nan"), float("inf"), float("-inf"), True, False, None, "", " ", "0",
    "-1", "1.5", "NaN", "1e999", "null", "x" * 5000, "\u0000", "\ud800", "\u202e\u2066", "\x1b[31mred\x1b]0;t\x07",
    "<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "=HYPERLINK(1)", "@SUM(1)", "../../etc/passwd",
    "%s%n{}{0}", "'; DROP TABLE x; --", "\u0661\u0662", "１２", [], {}, [[]], [1, "a", None], {"": {}}, {"a": {"b": [1]}},
)  # fmt: skip
JUNK = (
    b"", b"\0", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b'"', b"'", b"\\", b"\\u12", b"{", b"}", b"[", b"]", b",", b":", b"NaN",
    b"-Infinity", b"nan", b"1e9999", b"-", b"null", b"\n", b"\r\n", b"\x1b[2J", b"{}", b"},{", b'"traceEvents": [', b"]}",
    b"/* */", b"9" * 40, b"[" * 600, b'{"a":' * 300, b"\xef\xbb\xbf", b"\x1f\x8b\x08",
)  # fmt: skip
NAMES = (
    "recv_requests", "run_batch", "scheduler.run_batch", "step[DECODE bs=8]", "step[EXTEND bs=0 toks=-3]", "step[", "gloo:send",
    "gloo:recv", "nccl:send 0->1", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "cudaGraphLaunch",
    "cudaLaunchKernel", "cudaEventSynchronize", "cudaStreamWaitEvent", "cudaEventRecord", "Memcpy DtoH (Device -> Pageable)",
    "get_next_batch_to_run", "process_batch_result", "recv_res_dict_from_prev_stage", "fused_moe_kernel",
)  # fmt: skip
CATEGORIES = (
    "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver", "user_annotation", "gpu_user_annotation", "cpu_op",
    "overhead", "Trace", "unknown", "",
)  # fmt: skip
_NUMBER = re.compile(rb"\d+(?:\.\d+)?")


def hostile(random: Random) -> Any:
    """A value that no writer would put there, the caller's own."""
    return deepcopy(random.choice(HOSTILE))


def damage_bytes(data: bytes, random: Random, most: int = 4) -> bytes:
    """`data` with one to `most` stretches changed, cut, doubled, moved or filled with junk."""
    for _ in range(random.randint(1, most)):
        at = random.randrange(len(data) + 1)
        length = int(min(random.paretovariate(0.6), len(data), 1 << 16))
        end = min(at + length, len(data))
        piece = data[at:end]
        way = random.randrange(7)
        if way == 0:
            put = random.choice(JUNK)
        elif way == 1:
            put = piece + random.choice(JUNK)
        elif way == 2:
            put = piece * 2
        elif way == 3:
            put = bytes(c ^ (1 << random.randrange(8)) for c in piece[:4]) + piece[4:]
        elif way == 4:
            other = random.randrange(len(data) + 1)
            put = data[other : other + length]
        elif way == 5:
            put = b""
        else:
            data, put, end = data[: max(end, 1)], piece, max(end, 1)
        data = data[:at] + put + data[end:]
    return data


def damage_json(document: object, random: Random, most: int = 4) -> object:
    """`document` (changed in place where it can be) with one to `most` values replaced, removed, doubled or wrapped."""
    for _ in range(random.randint(1, most)):
        holder: Any = document
        if not isinstance(holder, (dict, list)) or not holder:
            return hostile(random)
        while True:
            key = random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
            child = cast("Any", holder[key])
            if not isinstance(child, (dict, list)) or not child or random.random() < 0.15:
                break
            holder = child
        way = random.randrange(6)
        if way == 0:
            del holder[key]
        elif way == 1 and isinstance(holder, list):
            holder.insert(random.randrange(len(holder) + 1), child)
        elif way == 1 and isinstance(holder, dict):
            holder[str(hostile(random))] = child
        elif way == 2:
            holder[key] = [child] if random.random() < 0.5 else {"a": child}
        elif way == 3 and isinstance(child, (int, float)):
            holder[key] = child * random.choice((-1, 2, 1000, 0.001, 10**9))
        else:
            holder[key] = hostile(random)
    return document


def damage_events(events: list[Event], random: Random, most: int = 6) -> None:
    """Changes `events` of one trace in place: impossible times, wrong links, odd names, missing and doubled ones."""
    ways: Sequence[Callable[[list[Event], Random], None]] = (
        _field, _field, _argument, _argument, _absent, _double, _swap, _shift, _stretch, _rename, _retype, _thin, _collide, _nest,
    )  # fmt: skip
    for _ in range(random.randint(1, most)):
        if not events:
            return
        random.choice(ways)(events, random)


def _field(events: list[Event], random: Random) -> None:
    event = random.choice(events)
    event[random.choice(("ts", "dur", "ts", "dur", "pid", "tid", "name", "cat", "ph", "args"))] = hostile(random)


def _argument(events: list[Event], random: Random) -> None:
    with_args = [e for e in events if isinstance(e.get("args"), dict) and e["args"]] or [{"args": {"x": 1}}]
    args = random.choice(with_args)["args"]
    args[random.choice(list(args))] = hostile(random)


def _absent(events: list[Event], random: Random) -> None:
    event = random.choice(events)
    if event:
        del event[random.choice(list(event))]


def _double(events: list[Event], random: Random) -> None:
    at = random.randrange(len(events))
    events[at:at] = [dict(e) for e in events[at : at + random.choice((1, 1, 5, 50))]]


def _swap(events: list[Event], random: Random) -> None:
    if random.random() < 0.3:
        random.shuffle(events)
        return
    a, b = random.randrange(len(events)), random.randrange(len(events))
    key = random.choice(("ts", "dur", "name", "tid", "args"))
    one, two = events[a], events[b]
    if key in one and key in two:
        one[key], two[key] = two[key], one[key]


def _shift(events: list[Event], random: Random) -> None:
    """Some events earlier or later; all of a kind, or all after one."""
    by = random.choice((-1, 1)) * 10.0 ** random.randint(-3, 16)
    category = random.choice((None, "kernel", "cuda_runtime", "user_annotation"))
    first = random.randrange(len(events))
    for event in events[first : first + random.choice((1, 20, len(events)))]:
        if isinstance(event.get("ts"), (int, float)) and category in (None, event.get("cat")):
            event["ts"] = round(event["ts"] + by, 3)


def _stretch(events: list[Event], random: Random) -> None:
    factor = random.choice((-1.0, 0.0, 0.001, 3.0, 1000.0, 1e9))
    first = random.randrange(len(events))
    for event in events[first : first + random.choice((1, 10, len(events)))]:
        if isinstance(event.get("dur"), (int, float)):
            event["dur"] = round(event["dur"] * factor, 3)


def _rename(events: list[Event], random: Random) -> None:
    name = random.choice(NAMES) if random.random() < 0.7 else hostile(random)
    first = random.randrange(len(events))
    for event in events[first : first + random.choice((1, 1, 30))]:
        event["name"] = name


def _retype(events: list[Event], random: Random) -> None:
    first = random.randrange(len(events))
    for event in events[first : first + random.choice((1, 1, 30))]:
        event["cat"] = random.choice(CATEGORIES)


def _thin(events: list[Event], random: Random) -> None:
    """Events of a kind, of a name, or of a stretch gone."""
    chosen = random.choice(events)
    key = random.choice(("cat", "name", "tid", "ph"))
    value = chosen.get(key)
    share = random.choice((0.1, 0.5, 1.0))
    events[:] = [e for e in events if e.get(key) != value or random.random() >= share]


def _collide(events: list[Event], random: Random) -> None:
    """Several events share one correlation, stream or start."""
    key = random.choice(("correlation", "stream", "device", "External id"))
    value = random.choice((0, 1, -1, 2**31, 2**40))
    first = random.randrange(len(events))
    for event in events[first : first + random.choice((2, 40, len(events)))]:
        if isinstance(event.get("args"), dict) and key in event["args"]:
            event["args"][key] = value


def _nest(events: list[Event], random: Random) -> None:
    """A value deep inside others."""
    deep: object = 1
    for _ in range(random.choice((3, 60, 400))):
        deep = [deep] if random.random() < 0.5 else {"a": deep}
    random.choice(events)["args"] = deep


def damage_lines(data: bytes, random: Random, most: int = 6) -> bytes:
    """`data` with lines removed, doubled, moved or cut, and numbers replaced."""
    lines = data.splitlines(keepends=True)
    for _ in range(random.randint(1, most)):
        if not lines:
            break
        at = random.randrange(len(lines))
        way = random.randrange(6)
        if way == 0:
            del lines[at : at + random.choice((1, 1, 10))]
        elif way == 1:
            lines.insert(at, random.choice(lines))
        elif way == 2:
            random.shuffle(lines)
        elif way == 3:
            lines[at] = lines[at][: random.randrange(len(lines[at]) + 1)]
        else:
            value = str(hostile(random)).encode(errors="replace")
            found = list(_NUMBER.finditer(lines[at]))
            if found:
                number = random.choice(found)
                lines[at] = lines[at][: number.start()] + value + lines[at][number.end() :]
    return b"".join(lines)


def damage_database(path: Path, random: Random, most: int = 5) -> None:
    """Changes cells, rows, columns and tables of the SQLite file at `path`."""
    with closing(sqlite3.connect(path)) as database:
        for _ in range(random.randint(1, most)):
            try:
                _damage_table(database, random)
            except (sqlite3.Error, OverflowError, UnicodeEncodeError):
                continue
        database.commit()


def _damage_table(database: sqlite3.Connection, random: Random) -> None:
    tables = [r[0] for r in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    table = random.choice(tables)
    columns = [r[1] for r in database.execute(f'PRAGMA table_info("{table}")')]
    column, other = random.choice(columns), random.choice(columns)
    some = random.choice(("1", "rowid % 5 = 0", f"rowid = {random.randint(1, 30)}"))
    value = hostile(random)
    if isinstance(value, (list, dict)):
        value = json.dumps(value).encode()
    way = random.randrange(9)
    if way < 4:
        database.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE {some}', (value,))
    elif way == 4:
        database.execute(f'UPDATE "{table}" SET "{column}" = "{other}" WHERE {some}')
    elif way == 5:
        database.execute(f'DELETE FROM "{table}" WHERE {some}')
    elif way == 6:
        database.execute(f'INSERT INTO "{table}" SELECT * FROM "{table}" WHERE {some}')
    elif way == 7:
        database.execute(f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{column}x"')
    else:
        database.execute(f'DROP TABLE "{table}"')


def pack(data: bytes, random: Random) -> bytes:
    """`data` as it is, packed, packed in two members, or packed and then damaged."""
    way = random.randrange(8)
    if way < 5:
        return data
    cut = random.randrange(len(data) + 1)
    packed = gzip.compress(data[:cut], 1) + gzip.compress(data[cut:], 1) if way == 5 else gzip.compress(data, 1)
    return damage_bytes(packed, random, 2) if way == 7 else packed

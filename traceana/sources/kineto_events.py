"""What a Kineto event is to traceana: which are kept, which fields of them, and the columns both parsers fill."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = [
    "ANNOTATION",
    "CALL",
    "COLUMNS",
    "COMMUNICATION",
    "GPU_ANNOTATION",
    "INTS",
    "KERNEL",
    "KIND_OF",
    "MAX_DURATION",
    "MAX_TIME",
    "MEMCPY",
    "MEMSET",
    "NULL",
    "OP",
    "OVERHEAD",
    "Events",
    "Ints",
    "Lost",
    "impossible_ranks",
    "join_events",
    "possible_talks",
    "talk_frame",
]

Ints = npt.NDArray[np.int64]

NULL = np.iinfo(np.int64).min
"""Stands for a missing integer until `traceana.tables.build` makes nulls of it."""

MAX_TIME, MAX_DURATION = 5 * 10**15, 2 * 10**15
"""Microseconds a time stamp and a duration stay below (158 and 63 years): their sum and a base fit 64 bits of ns."""

KERNEL, MEMCPY, MEMSET, CALL, OP, ANNOTATION, GPU_ANNOTATION, OVERHEAD = range(8)
KIND_OF: Mapping[str, int] = {
    "kernel": KERNEL,
    "gpu_memcpy": MEMCPY,
    "gpu_memset": MEMSET,
    "cuda_runtime": CALL,
    "cuda_driver": CALL,
    "cpu_op": OP,
    "user_annotation": ANNOTATION,
    "gpu_user_annotation": GPU_ANNOTATION,
    "overhead": OVERHEAD,
    # torch before 1.13
    "Kernel": KERNEL,
    "Memcpy": MEMCPY,
    "Memset": MEMSET,
    "Runtime": CALL,
    "Operator": OP,
}
"""Categories that a table holds. Everything else (flows, instants, python_function) is counted and left out."""

INTS = {
    "External id": "external_id",
    "correlation": "correlation",
    "device": "device",
    "stream": "stream",
    "bytes": "bytes",
}
COMMUNICATION: Mapping[str, tuple[str, pl.DataType]] = {
    "Collective name": ("collective", pl.String()),
    "Src Rank": ("src_rank", pl.Int64()),
    "Dst Rank": ("dst_rank", pl.Int64()),
    "In msg nelems": ("in_elements", pl.Int64()),
    "Out msg nelems": ("out_elements", pl.Int64()),
    "dtype": ("dtype", pl.String()),
    "Process Group Name": ("group", pl.String()),
    "Process Group Description": ("group_desc", pl.String()),
    "Group size": ("group_size", pl.Int64()),
    "Seq": ("seq", pl.Int64()),
}
_COUNTED = ("src_rank", "dst_rank", "group_size")  # ranks, of which no job has 2**31
COLUMNS: Mapping[str, type[np.generic]] = {
    "kind": np.uint8,
    "pid": np.int64,
    "tid": np.int64,
    "ts": np.int64,
    "dur": np.int64,
    **{column: np.int64 for column in INTS.values()},
    "finished": np.bool_,
}
"""What is kept of an event beside its name; `ts` and `dur` in nanoseconds as the file counts them (no base added)."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Something of the file that is not in the events: why, how many, and the bytes of the uncompressed text."""

    name: str
    severity: str
    count: int
    start: int = -1
    stop: int = -1
    note: str = ""


@dataclass(slots=True)
class Events:
    """What one stretch of a trace holds, in file order: `columns` (see COLUMNS) and `names` of the events kept, `talks`
    (`talk_frame`) of those that carry a message, metadata rows as decoded, how many events of which category or phase
    were left out, and what was lost."""

    columns: dict[str, npt.NDArray[Any]]
    names: pl.Series
    talks: pl.DataFrame = field(default_factory=lambda: _NO_TALKS)
    metadata: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    unused: Counter[str] = field(default_factory=Counter[str])
    lost: list[Lost] = field(default_factory=list[Lost])

    @property
    def size(self) -> int:
        """The number of events kept."""
        return self.names.len()


def join_events(parts: Sequence[Events]) -> Events:
    """`parts` one after the other. Their columns are taken out of them: both at once are the most that reading holds."""
    if not parts:
        nothing = {name: np.empty(0, dtype=dtype) for name, dtype in COLUMNS.items()}
        return Events(nothing, pl.Series("name", [], dtype=pl.Categorical()))
    joined = Events(
        {name: np.concatenate([part.columns.pop(name) for part in parts]) for name in COLUMNS},
        pl.concat([part.names for part in parts]),
    )
    first = 0
    talks = [joined.talks]
    for part in parts:
        if part.talks.height:
            talks.append(part.talks.with_columns(pl.col("row") + first))
        joined.metadata += part.metadata
        joined.unused += part.unused
        joined.lost += part.lost
        first += part.size
    joined.talks = pl.concat(talks)
    return joined


def talk_frame(talks: Sequence[tuple[int, Mapping[str, object]]]) -> pl.DataFrame:
    """The rows and arguments of events that carry a message as typed columns: `row`, then those of COMMUNICATION. What
    is missing or of another type is null."""
    if not talks:
        return _NO_TALKS
    columns = [pl.Series("row", [row for row, _ in talks], dtype=pl.Int64())]
    for key, (name, dtype) in COMMUNICATION.items():
        kind = int if dtype == pl.Int64() else str
        columns.append(pl.Series(name, [_typed(args.get(key), kind) for _, args in talks], dtype=dtype))
    return pl.DataFrame(columns)


_NO_TALKS: pl.DataFrame = pl.DataFrame(schema={"row": pl.Int64(), **dict(COMMUNICATION.values())})


def possible_talks(talks: pl.DataFrame) -> pl.DataFrame:
    """`talks` with null for ranks and group sizes beyond every job."""
    return talks.with_columns(pl.when(~_impossible(name)).then(pl.col(name)).alias(name) for name in _COUNTED)


def impossible_ranks(talks: pl.DataFrame) -> int:
    """How many of `talks` name a rank or a group size beyond every job."""
    return talks.filter(reduce(operator.or_, (_impossible(name).fill_null(False) for name in _COUNTED))).height


def _impossible(name: str) -> pl.Expr:
    return ~pl.col(name).is_between(-(1 << 31), (1 << 31) - 1)


def _typed(value: object, kind: type[int] | type[str]) -> object:
    if kind is str:
        return None if value is None or isinstance(value, (dict, list)) else str(value)
    if isinstance(value, str) and value.strip().removeprefix("-").isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63 else None

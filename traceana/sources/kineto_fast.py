"""The fast path: a run of whole events as JSON text, straight into Arrow columns with exact decimal times.

It accepts only what it can read without doubt and says so by raising `NotPlain`; the tolerant path then takes the same
bytes. Nothing here looks at one event at a time.
"""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.json as pj

__all__ = ["EVENT_CUT", "EVENT_SCHEMA", "NotPlain", "parse_plain"]

# Microseconds with three decimals are nanoseconds; six digits leave room for writers that say more.
TIME = pa.decimal128(28, 6)
ARGS = pa.struct(
    [
        ("External id", pa.int64()),
        ("correlation", pa.int64()),
        ("device", pa.int64()),
        ("stream", pa.int64()),
        ("bytes", pa.int64()),
        ("finished", pa.bool_()),
        ("Collective name", pa.string()),
        ("Src Rank", pa.int64()),
        ("Dst Rank", pa.int64()),
        ("In msg nelems", pa.int64()),
        ("Out msg nelems", pa.int64()),
        ("dtype", pa.string()),
        ("Process Group Name", pa.string()),
        ("Process Group Description", pa.string()),
        ("Group size", pa.int64()),
        ("Seq", pa.int64()),
    ]
)
EVENT_SCHEMA = pa.schema(
    [
        ("ph", pa.string()),
        ("cat", pa.string()),
        ("name", pa.string()),
        ("pid", pa.int64()),
        ("tid", pa.int64()),
        ("ts", TIME),
        ("dur", TIME),
        ("args", ARGS),
    ]
)

EVENT_CUT = re.compile(rb'\},\s*\{\s*"')


class NotPlain(Exception):
    """The bytes are not plain Kineto events; the tolerant path must read them."""


def parse_plain(events: bytes) -> pa.Table:
    """Whole events separated by newlines -> a table of EVENT_SCHEMA, one row an event. Raises NotPlain."""
    try:
        return pj.read_json(
            pa.BufferReader(events),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(events) + 16),
            parse_options=pj.ParseOptions(explicit_schema=EVENT_SCHEMA, unexpected_field_behavior="ignore"),
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise NotPlain(str(error)) from error

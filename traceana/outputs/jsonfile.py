"""The JSON document of a report: one line of JSON, integers as integers, nothing that JSON cannot hold."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from traceana.outputs.files import new_file

__all__ = ["to_json", "write_json"]


def to_json(document: Mapping[str, object], *, indent: int | None = None) -> str:
    """`document` as JSON text. NaN and infinities, which JSON has no word for, become null; halves of surrogate pairs,
    which no encoding can hold, become JSON's escapes."""
    text = json.dumps(_plain(document), ensure_ascii=False, allow_nan=False, indent=indent, default=str)
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write the document to `path`, whole or not at all."""
    with new_file(path) as temporary:
        temporary.write_text(to_json(document, indent=1) + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value

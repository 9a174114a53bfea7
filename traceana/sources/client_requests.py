"""What clients recorded: one object per request, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import cast

import polars as pl

from traceana import schema
from traceana.sources.losses import Loss, loss
from traceana.sources.sidecar import Sidecar, to_ns

__all__ = ["read_requests"]

# Other tools' names of the same things, the clearest first.
_START = ("start_ns", "start", "start_time")
_END = ("end_ns", "end", "end_time")
_LENGTH = ("latency_ns", "e2e", "latency", "e2e_latency")
_INPUT = ("input_tokens", "prompt", "prompt_tokens", "prompt_len", "input_len")
_OUTPUT = ("output_tokens", "out", "completion_tokens", "output_len")


def read_requests(sidecar: Sidecar) -> tuple[pl.DataFrame, list[Loss]]:
    """A REQUESTS frame in order of start, and the requests left out because their times make no sense."""
    document = sidecar.json
    if isinstance(document, dict):
        document = cast("dict[str, object]", document).get("requests")
    rows = cast("list[object]", document) if isinstance(document, list) else []
    good = [row for row in map(_request, rows) if row is not None]
    losses: list[Loss] = []
    if len(good) < len(rows):
        losses.append(
            loss(
                "request_malformed",
                "warning",
                len(rows) - len(good),
                f"{sidecar.path.name}: no start or no end after it",
            )
        )
    return schema.REQUESTS.frame(good).sort("start_ns", "end_ns", maintain_order=True), losses


def _request(row: object) -> dict[str, object] | None:
    if not isinstance(row, dict):
        return None
    fields = cast("dict[str, object]", row)
    start, end, length = _time(fields, _START), _time(fields, _END), _time(fields, _LENGTH)
    if start is not None and end is None and length is not None:
        end = start + length
    if start is None or end is None or end < start:
        return None
    status = fields.get("status")
    failed = bool(fields.get("err") or fields.get("error")) or False in (fields.get("success"), fields.get("ok"))
    return {
        "start_ns": start,
        "end_ns": end,
        "ok": not failed and status in (None, 200, "200", "ok"),
        "input_tokens": _count(fields, _INPUT),
        "output_tokens": _count(fields, _OUTPUT),
    }


def _time(fields: Mapping[str, object], names: tuple[str, ...]) -> int | None:
    """The first of `names` as integer nanoseconds: `*_ns` already is, all others are seconds."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, (int, Decimal)) and not isinstance(value, bool):
            return to_ns(value, per_second=10**9 if name.endswith("_ns") else 1)
    return None


def _count(fields: Mapping[str, object], names: tuple[str, ...]) -> int | None:
    values = (fields.get(n) for n in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**63), None)

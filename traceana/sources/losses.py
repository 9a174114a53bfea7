"""Rows of the `losses` table, made one at a time while files are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import polars as pl

from traceana import schema

__all__ = ["SEVERITIES", "Loss", "Severity", "loss", "losses_frame"]

Loss = dict[str, object]
Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")


def loss(name: str, severity: Severity, count: int, detail: str, rank: int | None = None) -> Loss:
    """One row: what was lost (`name`), how much of it (`count`), and where, in words (`detail`)."""
    # Names of files and of events may hold halves of surrogate pairs, which no table and no file can.
    name, detail = (text.encode(errors="backslashreplace").decode() for text in (name, detail))
    return {"name": name, "severity": severity, "rank": rank, "count": count, "detail": detail}


def losses_frame(rows: Sequence[Loss]) -> pl.DataFrame:
    """`rows` as a LOSSES frame, in the order given."""
    return schema.LOSSES.frame(list(rows))

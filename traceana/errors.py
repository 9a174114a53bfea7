"""The exception tree. Only `cli.main` turns one into `traceana: error: <what>: <where>` and `hint: <do this>`.

TraceanaError
├── SourceError    a file is missing, unreadable, not a trace, or two files contradict each other
├── SchemaError    a table lacks a column or holds a value its schema forbids
├── ClockError     ranks cannot be related, or what relates them is contradictory
├── ModelError     ranks are missing, or nothing could be matched
├── OutputError    an output exists, or cannot be written
└── EngineError    work cannot be run where it was asked for, or storage cannot be reached
"""

from __future__ import annotations

__all__ = ["ClockError", "EngineError", "ModelError", "OutputError", "SchemaError", "SourceError", "TraceanaError"]


class TraceanaError(Exception):
    """Something the user can act on: `what` happened, `where` (a file, rank or option), `hint` what to do."""

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what if where is None else f"{what}: {where}")
        self.what = what
        self.where = where
        self.hint = hint


class SourceError(TraceanaError):
    """A file is missing, unreadable, not a trace, or contradicts another one."""


class SchemaError(TraceanaError):
    """A table lacks a column or holds a value its schema forbids."""


class ClockError(TraceanaError):
    """Ranks cannot be related to one clock, or what relates them is contradictory."""


class ModelError(TraceanaError):
    """Ranks are missing, or nothing could be matched."""


class OutputError(TraceanaError):
    """An output exists already, or cannot be written."""


class EngineError(TraceanaError):
    """An engine or a storage cannot be reached, or what it needs is not installed."""

"""What the capture raises. A driver turns it into `traceana: error: <what>: <where>` and `hint: <do this>`."""

from __future__ import annotations

__all__ = ["CaptureError", "Interrupted", "Unreachable"]


class CaptureError(Exception):
    """Something the user can act on: `what` happened, `where` (a URL, file or option), `hint` what to do."""

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what if where is None else f"{what}: {where}")
        self.what = what
        self.where = where
        self.hint = hint


class Unreachable(CaptureError):
    """The server does not answer (any more)."""


class Interrupted(CaptureError):
    """Ctrl-C or SIGTERM: what was recorded until then is kept."""

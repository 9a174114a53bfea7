"""manifest.json: what was recorded, by whom and how; always a whole document, also after a kill."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from pathlib import Path
from typing import Any

from traceana_capture import __version__
from traceana_capture.files import atomic_write, write_json
from traceana_capture.profile import Outcome

__all__ = ["SCHEMA_VERSION", "Manifest", "say_to_stderr"]

SCHEMA_VERSION = 1

_ROOM = 1 << 18  # kept free for the last manifest, whatever else fills the disk meanwhile


class Manifest:
    """The document, and the problems met on the way. A problem is shaped like a row of the report's losses."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "manifest.json"
        self._room = folder / ".manifest-room"
        self.document: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "kind": "traceana-capture",
            "status": "running",
            "tool": {"name": "traceana_capture", "version": __version__, "python": platform.python_version()},
            "arguments": None,
            "created_ns": time.time_ns(),
            "finished_ns": None,
            "versions": {},
            "server": {},
            "command": [],
            "ranks": [],
            "profiles": [],
            "profile_request": None,
            "windows": [],
            "steady_window": None,
            "throughput": {},
            "load": None,
            "settings": {},
            "gpus": [],
            "gpu_samples": None,
            "clock": {"hosts": [], "round_trips": []},
            "problems": [],
        }

    def problem(self, name: str, severity: str, detail: str, *, rank: int | None = None, count: int = 1) -> None:
        """Something lost, doubtful or worth knowing: info, warning or error."""
        self.document["problems"].append(
            {"name": name, "severity": severity, "rank": rank, "count": count, "detail": detail}
        )

    def add_profile(self, request: dict[str, Any], outcome: Outcome, *, via: str, throw_away: bool) -> None:
        """One profile: what was asked for, when, and how it ended."""
        self.document["profiles"].append(
            {
                "via": via,
                "throw_away": throw_away,
                "request": request,
                "requested_ns": outcome.requested_ns,
                "replied_ns": outcome.replied_ns,
                "complete_ns": outcome.complete_ns,
                "ended_by": outcome.ended_by,
            }
        )

    def add_ranks(self, rows: dict[int, dict[str, Any]], outcome: Outcome, names: dict[int, str]) -> None:
        """One row per selected rank with its file; a rank without a whole file is a problem, named."""
        for found in outcome.ranks:
            row = rows[found.key.rank]
            row["file"] = names.get(found.key.rank)
            row["bytes"] = found.size
            row["state"] = found.state
            row["ep_rank"] = row["ep_rank"] if row["ep_rank"] is not None else found.ep
            if found.fault is not None:
                place = f"rank {found.key.rank} (PP{found.key.pp} TP{found.key.tp})"
                self.problem(
                    f"rank_{found.state}", "error", f"{place}: {found.fault}; {outcome.ended_by}", rank=found.key.rank
                )
        self.document["ranks"] = [rows[k] for k in sorted(rows)]

    def start(self) -> None:
        """Write the document for the first time, and keep room for the last time."""
        self.write()
        atomic_write(self._room, bytes(_ROOM))

    def finish(self, status: str) -> None:
        """Set the status (complete, partial, failed, interrupted) and write."""
        with contextlib.suppress(OSError):
            self._room.unlink()
        self.document["status"] = status
        self.document["finished_ns"] = time.time_ns()
        self.write()

    def write(self) -> None:
        """Write the document as it is now."""
        write_json(self.path, self.document)

    @property
    def worst(self) -> str:
        """The gravest severity among the problems: error, warning or info."""
        found = {p["severity"] for p in self.document["problems"]}
        return next((s for s in ("error", "warning") if s in found), "info")


def say_to_stderr(text: str) -> None:
    """A line of progress for a person."""
    sys.stderr.write(f"traceana: {text}\n")
    sys.stderr.flush()

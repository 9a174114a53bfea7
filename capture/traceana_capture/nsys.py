"""Recording with Nsight Systems: how the server is started under it, its report, and an export without secrets."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from traceana_capture.errors import CaptureError
from traceana_capture.files import fetch
from traceana_capture.measure import Poller
from traceana_capture.profile import Outcome, Profile
from traceana_capture.secrets import allowed_environment, mask_text, mask_value

__all__ = ["NsysRecording", "find_nsys", "mask_export", "under_nsys"]

_INSTALL = (
    "install Nsight Systems (nsight-systems-cli; in Debian nsight-systems and nsight-systems-target), or --nsys PATH"
)
_ENVIRONMENT_LINES = re.compile(r"(?m)^[A-Za-z_]\w*=")


def find_nsys(given: str | None) -> str:
    """The nsys to use. Raises CaptureError that says what to install."""
    found = shutil.which(given or "nsys")
    if found is None:
        raise CaptureError("nsys is not here", where=given or "PATH", hint=_INSTALL)
    return found


def under_nsys(nsys: str, report: Path, command: Sequence[str]) -> list[str]:
    """The server's command under nsys: cudaProfilerStart/Stop bound the recording, graphs show their kernels."""
    return [
        nsys, "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true", f"--output={report}",
        *command,
    ]  # fmt: skip


class NsysRecording:
    """A profile whose recorder is the nsys around the server. The report itself holds the server's whole environment,
    so it stays outside the capture folder (`private`); the capture gets the export, with secrets masked."""

    def __init__(self, nsys: str, private: Path, folder: Path, *, pause: Callable[[float], None]) -> None:
        self.report = private / "report"
        self.document: dict[str, Any] = {"nsys": nsys, "report": None, "export": None}
        self._nsys = nsys
        self._folder = folder
        self._pause = pause

    def run(self, profile: Profile, poller: Poller, *, timeout_s: float, died: Callable[[], str | None]) -> Outcome:
        """Ask the server for a cudaProfiler range and wait for the report."""
        profile.request.update(activities=["CUDA_PROFILER"])
        outcome = Outcome([], requested_ns=time.time_ns())
        profile.start()
        outcome.replied_ns = time.time_ns()
        end, sizes = time.monotonic() + timeout_s, (-1, -1)
        try:
            while time.monotonic() < end and died() is None:
                poller.poll()
                found = (_size(self.report, ".nsys-rep"), _size(self.report, ".qdstrm"))
                if max(found) > 0 and found == sizes and profile.already_running() is not True:
                    profile.running = False
                    break
                sizes = found
                self._pause(1.0)
            else:
                outcome.ended_by = died() or f"{timeout_s:.0f} s were over"
        finally:
            profile.stop()
        outcome.complete_ns = time.time_ns()
        return outcome

    def export(self) -> str:
        """nsys export to SQLite, masked, into the capture folder; returns its name there. Raises CaptureError that says
        what is missing."""
        report, stream = self.report.with_suffix(".nsys-rep"), self.report.with_suffix(".qdstrm")
        if not report.exists() and stream.exists():
            self.document["report"] = str(stream)
            importer = _importer(self._nsys)
            if importer is None:
                raise CaptureError(
                    "nsys wrote a .qdstrm and has no importer here",
                    where=str(stream),
                    hint=_INSTALL + "; or import it where the host part is: QdstrmImporter -i FILE -o report.nsys-rep",
                )
            _run([str(importer), "-i", str(stream), "-o", str(report)], {"LD_LIBRARY_PATH": str(importer.parent)})
        if not report.exists():
            raise CaptureError(
                "nsys left no report",
                where=str(report),
                hint="see server/server.log; the server must be stopped by the capture, not killed",
            )
        self.document["report"] = str(report)
        database = report.with_suffix(".sqlite")
        _run([self._nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(report)], {})
        mask_export(database)
        target = self._folder / "nsys" / "report.sqlite"
        target.parent.mkdir(parents=True, exist_ok=True)
        fetch(database, target)
        self.document["export"] = "nsys/report.sqlite"
        return "nsys/report.sqlite"


def mask_export(database: Path) -> int:
    """Take secrets out of an nsys SQLite export, in place: environment dumps keep allowed variables only, everything
    else is searched. Returns how many values were changed."""
    changed = 0
    connection = sqlite3.connect(database)
    try:
        tables = [str(r[0]) for r in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            if table.startswith(("ENUM_", "CUPTI_", "sqlite_")):
                continue
            columns = [(str(r[1]), str(r[2]).upper()) for r in connection.execute(f'PRAGMA table_info("{table}")')]
            names = [name for name, _ in columns]
            texts = [name for name, kind in columns if kind == "TEXT"]
            for column in texts:
                key = "name" if "name" in names and column == "value" else "NULL"
                rows = connection.execute(f'SELECT rowid, {key}, "{column}" FROM "{table}"')
                for rowid, name, text in rows.fetchall():
                    clean = _clean(str(name or ""), text) if isinstance(text, str) else text
                    if clean != text:
                        connection.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = ?', (clean, rowid))
                        changed += 1
        connection.commit()
        if changed:
            connection.execute("VACUUM")  # the old values would stay in free pages
    except sqlite3.DatabaseError as error:
        raise CaptureError(
            f"the export cannot be masked ({error})", where=str(database), hint="export it again, or leave it out"
        ) from None
    finally:
        connection.close()
    return changed


def _clean(name: str, text: str) -> str:
    lines = text.splitlines()
    if len(lines) > 3 and len(_ENVIRONMENT_LINES.findall(text)) > len(lines) // 2:
        kept = allowed_environment(dict(line.split("=", 1) for line in lines if "=" in line))
        return "\n".join(f"{k}={v}" for k, v in kept.items())
    return str(mask_value(name.rsplit(":", 1)[-1], text)) if name else mask_text(text)


def _importer(nsys: str) -> Path | None:
    # Debian splits the package: /usr/bin/nsys leads to /usr/lib/<machine>/nsight-systems, the importer is elsewhere.
    bases = [Path(os.path.realpath(nsys)).parent.parent, Path("/usr/lib/nsight-systems")]
    return next((p for base in bases for p in sorted(base.glob("host-linux*/QdstrmImporter"))), None)


def _run(command: list[str], environment: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=600, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CaptureError(f"{Path(command[0]).name} does not run ({error})", where=command[0], hint=_INSTALL) from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise CaptureError(
            f"{Path(command[0]).name} failed: {said[0][:200]}", where=" ".join(command[1:2]), hint=_INSTALL
        )


def _size(report: Path, suffix: str) -> int:
    try:
        return report.with_suffix(suffix).stat().st_size
    except OSError:
        return 0

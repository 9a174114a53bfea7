"""One capture per server and host at a time: a lock that a dead holder loses by itself, and what it left undone.

The lock is a file that the holder keeps open under `flock`, so that the system frees it with the process, however it
ends. Its content says who holds it and what must be put right if the holder dies: a setting to restore, a profile that
may still run. The next capture of the server reads that and does it.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import re
import socket
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from traceana_capture.errors import CaptureError

__all__ = ["CaptureLock"]


class CaptureLock:
    """Held while a capture works on a server. `left_behind` is what an earlier capture that died had noted, or None."""

    def __init__(self, server: str, *, folder: Path | None = None) -> None:
        self.server = server
        self.left_behind: dict[str, Any] | None = None
        self._folder = folder or Path(tempfile.gettempdir()) / "traceana-capture"
        self._path = self._folder / (re.sub(r"[^\w.-]+", "_", server.split("://", 1)[-1]) + ".lock")
        self._fd = -1
        self._note: dict[str, Any] = {}

    def __enter__(self) -> CaptureLock:
        try:
            self._folder.mkdir(mode=0o1777, parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                self._folder.chmod(0o1777)  # other users' captures of the same server must see the lock
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(OSError):
                os.fchmod(self._fd, 0o666)
        except OSError as error:
            raise CaptureError(
                f"cannot lock the server ({error.strerror})",
                where=str(self._path),
                hint="set TMPDIR to a folder that this user may write",
            ) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = self._read()
            os.close(self._fd)
            self._fd = -1
            raise CaptureError(
                f"another capture of this server is running ({_who(holder)})",
                where=self.server,
                hint="wait for it, or end it with Ctrl-C: it then stops the profiler",
            ) from None
        earlier = self._read()
        if earlier:
            self.left_behind = earlier
        self._note = {"pid": os.getpid(), "user": _user(), "host": socket.gethostname(), "since_ns": time.time_ns()}
        self._write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            if not {"restore", "profile_id"} & set(self._note):
                os.ftruncate(self._fd, 0)  # nothing left to put right
            os.close(self._fd)
            self._fd = -1

    def note(self, **facts: object) -> None:
        """Remember facts for whoever finds the lock after this process died; None forgets one."""
        self._note.update(facts)
        self._note = {k: v for k, v in self._note.items() if v is not None}
        self._write()

    def _write(self) -> None:
        data = json.dumps(self._note, default=str).encode()
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads(os.pread(self._fd, 1 << 16, 0))
        except (OSError, ValueError):
            return {}
        return cast("dict[str, Any]", document) if isinstance(document, dict) else {}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _who(holder: dict[str, Any]) -> str:
    if not holder:
        return "it has not said who"
    since = holder.get("since_ns")
    age = f", for {(time.time_ns() - since) // 10**9} s" if isinstance(since, int) else ""
    place = f"on {holder.get('host')}, into {holder.get('folder', '?')}"
    return f"process {holder.get('pid')} of {holder.get('user')} {place}{age}"

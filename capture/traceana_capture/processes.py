"""The server's processes on this host: who listens, which process is which rank, and starting and stopping a server."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from traceana_capture.errors import CaptureError

__all__ = [
    "Child",
    "Scheduler",
    "command_of",
    "environment_of",
    "is_local",
    "listening_pid",
    "schedulers",
    "torch_version",
]

_PROC = Path("/proc")
_TITLE = re.compile(r"sglang::scheduler(?P<place>(?:_[A-Z_]*\d+)*)")
_GRACE_S = 20.0


@dataclass(frozen=True)
class Scheduler:
    """A scheduler process and the place its title gives it (0 where the title has no such part)."""

    pid: int
    pp: int
    tp: int
    dp: int | None
    ep: int | None


def is_local(host: str) -> bool:
    """Whether `host` names this machine: its loopback, or an address of its own, on which only it can listen (a server
    there has its processes here, or in a container here)."""
    if host in ("localhost", "::1", "0.0.0.0") or host.startswith("127."):
        return True
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as one:
                one.bind(address)
                return True
    return False


def listening_pid(port: int) -> int | None:
    """The process of this host that listens on a TCP port; None where none is visible to this user."""
    inodes: set[str] = set()
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / table).read_text().splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for pid in _pids():
        try:
            for fd in os.listdir(_PROC / str(pid) / "fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(_PROC / str(pid) / "fd" / fd) in inodes:
                        return pid
        except OSError:
            continue
    return None


def schedulers(root: int) -> list[Scheduler]:
    """The scheduler processes below `root`, by rank, as their process titles say."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(pid)
    found: list[Scheduler] = []
    waiting, seen = [root], {root}
    while waiting:
        pid = waiting.pop()
        waiting += [c for c in children.get(pid, []) if c not in seen]
        seen |= set(children.get(pid, []))
        title = _TITLE.match(" ".join(command_of(pid)))
        if title:
            place = {k: int(v) for k, v in re.findall(r"_([A-Z_]*?)(\d+)", title["place"])}
            found.append(Scheduler(pid, place.get("PP", 0), place.get("TP", 0), place.get("DP"), place.get("EP")))
    return sorted(found, key=lambda s: (s.dp or 0, s.pp, s.tp))


def command_of(pid: int) -> list[str]:
    """A process's command line; empty where it cannot be read."""
    try:
        text = (_PROC / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return []
    return [word for word in text.split("\0") if word]


def environment_of(pid: int) -> dict[str, str]:
    """A process's environment as it was started, unfiltered (see secrets.allowed_environment); empty if unreadable."""
    try:
        text = (_PROC / str(pid) / "environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def torch_version(pid: int) -> str | None:
    """The version of the torch that a process has loaded, from the package beside its library; None if not visible."""
    try:
        maps = (_PROC / str(pid) / "maps").read_text()
        library = re.search(r"(/\S+/torch)/lib/libtorch_(?:cpu|python)\.so", maps)
        if library is None:
            return None
        text = Path(f"{_PROC}/{pid}/root{library[1]}/version.py").read_text()
    except OSError:
        return None
    found = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", text)
    return found[1] if found else None


class Child:
    """A command started in a process group of its own, its output in a file. Stopping ends the whole group."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.command = list(command)
        self.log = log
        merged = {**os.environ, **(environment or {})}
        merged.setdefault("PYTHONUNBUFFERED", "1")
        try:
            with log.open("ab") as out:
                self._process = subprocess.Popen(
                    self.command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=merged,
                    start_new_session=True,
                )
        except OSError as error:
            raise CaptureError(
                f"cannot start the command ({error.strerror})", where=self.command[0], hint="is it on PATH?"
            ) from None
        self.pid = self._process.pid

    def died(self) -> str | None:
        """Why it is no longer running, or None."""
        code = self._process.poll()
        if code is None:
            return None
        return f"{self.command[0]} ended with {f'signal {-code}' if code < 0 else f'exit status {code}'}"

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, or None after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, *, grace_s: float = _GRACE_S) -> None:
        """SIGTERM to the first process, so that it can end its own children in order; after `grace_s`, or once it has
        ended, SIGKILL to what is left of the group."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            self.wait(grace_s)
        end = time.monotonic() + 2.0
        while _group_alive(self.pid) and self._process.poll() is not None and time.monotonic() < end:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(10.0)


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _pids() -> list[int]:
    try:
        return [int(e) for e in os.listdir(_PROC) if e.isdigit()]
    except OSError:
        return []

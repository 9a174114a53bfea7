"""Wall time, CPU time and peak memory of a command, children included."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cost", "measure"]

_SAMPLE_S = 0.05
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of wall and CPU time, megabytes (10**6) at the peak, and how the command ended."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    status: int
    said: str = ""


def measure(command: Sequence[str], env: Mapping[str, str] | None = None, limit_s: float = 3600) -> Cost:
    """Runs `command` once. The peak is the kernel's own for one process; where there are children, the largest sum of
    their resident sets that was sampled, if that is more."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, **(env or {})})
        peak = [0.0]
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, peak, done), daemon=True)
        watcher.start()
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        timer.cancel()
        done.set()
        watcher.join()
        err.seek(0)
        said = err.read()[-400:].decode(errors="replace").strip()
        return Cost(
            wall, used.ru_utime + used.ru_stime, max(used.ru_maxrss * 1024 / 1e6, peak[0]), process.returncode, said
        )


def _watch(root: int, peak: list[float], done: threading.Event) -> None:
    while not done.wait(_SAMPLE_S):
        family = _family(root)
        if len(family) > 1:
            peak[0] = max(peak[0], sum(_resident_mb(pid) for pid in family))


def _family(root: int) -> list[int]:
    found, at = [root], 0
    while at < len(found):
        with suppress(OSError):  # it may have ended just now
            for task in Path(f"/proc/{found[at]}/task").glob("*/children"):
                found += map(int, task.read_text().split())
        at += 1
    return found


def _resident_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_MB
    except (OSError, IndexError):
        return 0.0

"""Clock probes of one host: wall clock against monotonic clock, and what the system says about its synchronisation."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["host_clock", "paired_reading", "system_state"]

_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_STATES = ("ok", "insert_second", "delete_second", "leap_second", "wait", "unsynchronised")
_STA_UNSYNC, _STA_NANO, _STA_PPS = 0x0040, 0x2000, 0x0100


class _Timex(ctypes.Structure):
    """`struct timex` of Linux on 64 bits; adjtimex with `modes` 0 only reads it."""

    _fields_ = [
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("constant", ctypes.c_long),
        ("precision", ctypes.c_long), ("tolerance", ctypes.c_long), ("time_s", ctypes.c_long),
        ("time_us", ctypes.c_long), ("tick", ctypes.c_long), ("ppsfreq", ctypes.c_long), ("jitter", ctypes.c_long),
        ("shift", ctypes.c_int), ("stabil", ctypes.c_long), ("jitcnt", ctypes.c_long), ("calcnt", ctypes.c_long),
        ("errcnt", ctypes.c_long), ("stbcnt", ctypes.c_long), ("tai", ctypes.c_int), ("padding", ctypes.c_int * 11),
    ]  # fmt: skip


def paired_reading(
    tries: int = 64, *, wall: Callable[[], int] = time.time_ns, steady: Callable[[], int] = time.monotonic_ns
) -> dict[str, int]:
    """CLOCK_REALTIME bracketed by two readings of CLOCK_MONOTONIC, the tightest of `tries`:
    `realtime_ns` was read between `monotonic_low_ns` and `monotonic_high_ns`."""
    best: tuple[int, int, int] | None = None
    for _ in range(max(tries, 1)):
        low, now, high = steady(), wall(), steady()
        if best is None or high - low < best[2] - best[1]:
            best = (now, low, high)
    assert best, "at least one try"
    return {"realtime_ns": best[0], "monotonic_low_ns": best[1], "monotonic_high_ns": best[2]}


def system_state() -> dict[str, Any]:
    """What the kernel and chrony say about the wall clock: source, synchronised or not, estimated and largest error.
    A key is missing where the system does not tell."""
    state: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        state["clocksource"] = _SOURCE.read_text().strip()
    state.update(_adjtimex())
    chrony = _chrony()
    if chrony:
        state["chrony"] = chrony
    return state


def host_clock(when: str) -> dict[str, Any]:
    """One probe of this host: `when` (before, during, after), a paired reading, and the system's state."""
    return {"host": socket.gethostname(), "when": when, "pid": os.getpid(), **paired_reading(), "state": system_state()}


def _adjtimex() -> dict[str, Any]:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        timex = _Timex()
        state = int(libc.adjtimex(ctypes.byref(timex)))
    except (OSError, AttributeError):
        return {}
    if state < 0:
        return {}
    to_ns = 1 if timex.status & _STA_NANO else 1000
    return {
        "kernel": _STATES[state] if state < len(_STATES) else str(state),
        "synchronised": not timex.status & _STA_UNSYNC,
        "offset_ns": int(timex.offset) * to_ns,
        "frequency_ppb": int(timex.freq) * 1000 // 65536,
        "estimated_error_ns": int(timex.esterror) * 1000,
        "largest_error_ns": int(timex.maxerror) * 1000,
    }


def _chrony() -> str | None:
    program = shutil.which("chronyc")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "-n", "-c", "tracking"], capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()[:500] or None if done.returncode == 0 else None

"""How much memory a piece of work adds to this process at its peak."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

__all__ = ["Peak"]

_STATUS, _REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """`with Peak() as peak`: then `bytes` is the resident peak inside, less what was resident before.

    Linux counts the peak and can start it anew (proc(5): clear_refs); elsewhere, or where that is refused, `known` is
    false and `bytes` stays 0.
    """

    bytes = 0

    def __enter__(self) -> Peak:
        self.known = sys.platform == "linux"
        if self.known:
            try:
                _REFS.write_text("5")
            except OSError:
                self.known = False
            else:
                self._before = _kilobytes("VmRSS")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.known:
            self.bytes = (_kilobytes("VmHWM") - self._before) << 10


def _kilobytes(name: str) -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines[name].split()[0])

"""The folder that the server writes its traces into: made for it, seen from here, checked for room, and swept."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from traceana_capture.errors import CaptureError
from traceana_capture.facts import LocalServer

__all__ = ["Incoming", "check_room"]

_STEP_BYTES = 250_000  # generous: a step of 32 layers took 22 kB gzipped
_STEP_TEMPORARY_BYTES = 1_500_000  # torch writes the plain text into the temporary folder first
_STACKS = 5  # times as much with stacks


@dataclass(frozen=True)
class Incoming:
    """`told` is the path as the server is told it; `seen` is where its files can appear for this process."""

    told: str
    seen: tuple[Path, ...]

    @classmethod
    def new(cls, folder: Path, local: LocalServer, server_dir: str | None) -> Incoming:
        """A folder of its own for one profile. By default inside the capture folder; for a server of this host that
        sees another file system (a container), also where its own root holds that path."""
        name = f"incoming-{time.time_ns()}"
        if server_dir:
            there, _, here = server_dir.partition(":")
            seen = Path(here or there) / name
            with contextlib.suppress(OSError):  # the server makes it itself, where this process may not
                seen.mkdir(parents=True)
                seen.chmod(0o777)
            return cls(f"{there.rstrip('/')}/{name}", (seen,))
        told = folder.resolve() / "incoming" / name
        told.mkdir(parents=True)
        told.chmod(0o777)  # the server may run as another user
        pid = local.schedulers[0].pid if local.schedulers else local.pid
        return cls(str(told), (told,) if pid is None else (told, Path(f"/proc/{pid}/root{told}")))

    def sweep(self, folder: Path) -> None:
        """Remove what is empty. Files that were left out stay where the server wrote them."""
        for path in (*self.seen, folder / "incoming"):
            with contextlib.suppress(OSError):
                path.rmdir()


def check_room(folder: Path, *, steps: int, ranks: int, stacks: bool, local: bool) -> None:
    """Raises CaptureError where the traces may not fit: a full disk ends the scheduler that exports, and the server."""
    factor = steps * (_STACKS if stacks else 1)
    needs = [(folder, _STEP_BYTES * factor * ranks)]
    if local:
        needs.append((Path(tempfile.gettempdir()), _STEP_TEMPORARY_BYTES * factor * min(ranks, 8)))
    for path, needed in needs:
        try:
            free = shutil.disk_usage(path).free
        except OSError:
            continue
        if free < needed:
            raise CaptureError(
                f"{free >> 20} MB are free, {steps} steps of {ranks} ranks may need {needed >> 20} MB, "
                "and a full disk would end the server",
                where=str(path),
                hint="-o or --server-dir on a disk with room, or fewer --steps",
            )

"""The folder that the server writes its traces into: made for it, seen from here, checked for room, and swept."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from traceana_capture.errors import CaptureError
from traceana_capture.facts import LocalServer
from traceana_capture.files import disk_error

__all__ = ["Incoming", "check_room"]

_STEP_BYTES = 250_000  # generous: a step of 32 layers took 22 kB gzipped
_STEP_TEMPORARY_BYTES = 1_500_000  # torch writes the plain text into the temporary folder first
_STACKS = 5  # times as much with stacks
_TIGHT = 1 << 30  # a disk with less free than this may be filled by others while the server writes


@dataclass(frozen=True)
class Incoming:
    """`told` is the path as the server is told it; `seen` is where its files can appear for this process."""

    told: str
    seen: tuple[Path, ...]

    @classmethod
    def new(cls, folder: Path, local: LocalServer, server_dir: str | None, *, one_host: bool) -> Incoming:
        """A folder of its own for one profile. By default inside the capture folder; where that disk is nearly full and
        the whole server runs on this host (`one_host`), in the temporary folder, which torch needs anyway: the scheduler that exports to a
        full disk dies. For a server that sees another file system (a container), also where its own root holds that path.
        Raises CaptureError where it cannot be made."""
        name = f"incoming-{time.time_ns()}"
        if server_dir:
            there, _, here = server_dir.partition(":")
            seen = Path(here or there) / name
            with contextlib.suppress(OSError):  # the server makes it itself, where this process may not
                seen.mkdir(parents=True)
                seen.chmod(0o777)
            return cls(f"{there.rstrip('/')}/{name}", (seen,))
        told = folder.resolve() / "incoming" / name
        temporary = Path(tempfile.gettempdir()).resolve()
        if one_host and local.pid is not None and _free(folder) < min(_TIGHT, _free(temporary)):
            told = temporary / f"traceana-{name}"
        try:
            told.mkdir(parents=True)
            told.chmod(0o777)  # the server may run as another user
        except OSError as error:
            raise disk_error(error, told) from None
        pid = local.schedulers[0].pid if local.schedulers else local.pid
        return cls(str(told), (told,) if pid is None else (told, Path(f"/proc/{pid}/root{told}")))

    def sweep(self, folder: Path) -> None:
        """Remove what is empty. Files that were left out stay where the server wrote them."""
        for path in (*self.seen, folder / "incoming"):
            with contextlib.suppress(OSError):
                path.rmdir()


def check_room(folders: Iterable[Path], *, steps: int, ranks: int, stacks: bool, local: bool) -> None:
    """Raises CaptureError where the traces may not fit into one of `folders` (where the server writes, where they end):
    a full disk ends the scheduler that exports, and the server."""
    factor = steps * (_STACKS if stacks else 1)
    needs = [(folder, _STEP_BYTES * factor * ranks) for folder in folders]
    if local:
        needs.append((Path(tempfile.gettempdir()), _STEP_TEMPORARY_BYTES * factor * min(ranks, 8)))
    for path, needed in needs:
        free = _free(path)
        if free < needed:
            raise CaptureError(
                f"{free >> 20} MB are free, {steps} steps of {ranks} ranks may need {needed >> 20} MB, "
                "and a full disk would end the server",
                where=str(path),
                hint="-o or --server-dir on a disk with room, or fewer --steps",
            )


def _free(path: Path) -> int:
    """Bytes free where `path` is; more than any need where that cannot be told."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 1 << 62

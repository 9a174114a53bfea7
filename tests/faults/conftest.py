"""A small capture, and folders that run full or refuse writes: for real where we are root, by limits and modes else."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tracegen import build


@pytest.fixture(scope="session")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, a few messages: half a second to analyse."""
    folder = tmp_path_factory.mktemp("capture") / "c"
    build("hand_late_sender", folder)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that no other test fills."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRACEANA_CACHE_DIR", str(folder))
    return folder


@contextmanager
def mounted(folder: Path, options: str) -> Generator[Path, None, None]:
    """A tmpfs at `folder`. Skips where only root may mount and we are not."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


_LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from traceana.cli import run
raise SystemExit(run(sys.argv[2:]))
"""


class FullDisk:
    """A folder with room for `size` bytes: a tmpfs, or a limit on the size of files where nobody may mount. The limit is
    one of the whole process, its standard output too, so `run` has a process of its own."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind, self.size = folder, kind, 0
        self.mount: AbstractContextManager[Path] | None = None

    @property
    def why(self) -> str:
        """What the system says of a write that does not fit."""
        return "File too large" if self.kind == "limit" else "No space left on device"

    def make(self, size: int) -> Path:
        """The folder."""
        self.size = size
        if self.kind == "limit":
            self.folder.mkdir()
        else:
            self.mount = mounted(self.folder, f"size={size}")
            self.mount.__enter__()
        return self.folder

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """`traceana` with these words."""
        limit = self.size if self.kind == "limit" else resource.RLIM_INFINITY
        command = [sys.executable, "-c", _LIMITED, str(limit), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(params=["tmpfs", "limit"])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FullDisk]:
    """A disk that its test makes with too little room."""
    disk = FullDisk(tmp_path / "disk", request.param)
    yield disk
    if disk.mount is not None:
        disk.mount.__exit__(None, None, None)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """A function that copies a folder to a place that refuses every write: a read-only tmpfs for root, whom modes do
    not stop, else a folder without the mode to write."""
    place = tmp_path / "read-only"

    def make(folder: Path) -> Path:
        shutil.copytree(folder, place / "c")
        if os.geteuid() == 0:
            subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        else:
            (place / "c").chmod(0o555)
        return place / "c"

    if os.geteuid() == 0:
        with mounted(place, "size=8m"):
            yield make
    else:
        place.mkdir()
        yield make
        (place / "c").chmod(0o755)

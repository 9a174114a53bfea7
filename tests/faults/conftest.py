"""A small capture, and folders that run full or refuse writes: for real where we are root, by limits and modes else."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
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


@pytest.fixture(params=["tmpfs", "limit"])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A function that gives a folder with room for so many bytes: a tmpfs, or a limit on the size of files, which
    stands in where nobody may mount."""
    with _Room(tmp_path / "disk", request.param) as room:
        yield room.make


class _Room:
    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.mount: AbstractContextManager[Path] | None = None

    def __enter__(self) -> _Room:
        return self

    def make(self, size: int) -> Path:
        if self.kind == "limit":
            self.folder.mkdir()
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, self.before[1]))
        else:
            self.mount = mounted(self.folder, f"size={size}")
            self.mount.__enter__()
        return self.folder

    def __exit__(self, *error: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)
        if self.mount is not None:
            self.mount.__exit__(None, None, None)


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

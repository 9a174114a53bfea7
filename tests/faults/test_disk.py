"""A full disk and a read-only folder: outputs are whole or absent, and the message says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from traceana.cli import run

if TYPE_CHECKING:
    from faults.conftest import FullDisk


def everything(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, hidden ones too."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def size(capture: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Bytes of a whole report of the capture: more than half of it is the trace, in one file."""
    out = tmp_path_factory.mktemp("whole") / "r"
    assert run(["report", str(capture), "--no-cache", "-o", str(out)]) == 0
    return sum(map(len, everything(out).values()))


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_a_report_that_does_not_fit_leaves_nothing(capture: Path, size: int, full_disk: FullDisk, share: float) -> None:
    disk = full_disk.make(int(size * share) // 4096 * 4096 + 4096)
    done = full_disk.run("report", capture, "--no-cache", "-o", disk / "r")
    assert done.returncode == 1
    told = f"error: cannot write ({full_disk.why}): {disk}/r\nhint: name another place with -o, or make room\n"
    assert told in done.stderr
    assert everything(disk) == {}
    assert list(disk.iterdir()) == []


def test_a_report_that_does_not_fit_leaves_the_old_one(capture: Path, size: int, full_disk: FullDisk) -> None:
    disk = full_disk.make(int(size * 0.3) // 4096 * 4096)
    (disk / "r").mkdir()
    (disk / "r" / "report.json").write_text("old")
    assert full_disk.run("report", capture, "--no-cache", "-o", disk / "r").returncode == 1
    assert everything(disk) == {"r/report.json": b"old"}


def test_a_merged_trace_that_does_not_fit_leaves_the_old_one(capture: Path, full_disk: FullDisk) -> None:
    disk = full_disk.make(16384)
    (disk / "m.pftrace").write_text("old")
    done = full_disk.run("merge", capture, "--no-cache", "-o", disk / "m.pftrace")
    assert done.returncode == 1
    assert "hint: name another place with -o" in done.stderr
    assert everything(disk) == {"m.pftrace": b"old"}


def test_a_cache_on_a_full_disk_is_done_without(
    capture: Path, full_disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = full_disk.make(4096)
    monkeypatch.setenv("TRACEANA_CACHE_DIR", str(disk / "cache"))
    done = full_disk.run("check", capture)
    assert done.returncode == 0
    assert "cache_not_written" in done.stdout
    assert everything(disk) == {}


def test_standard_output_on_a_full_disk_is_an_error_in_words(capture: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "traceana", "check", str(capture), "--json"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "traceana: error: No space left on device"
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_read_only_capture_is_read_and_the_report_goes_elsewhere(
    capture: Path, read_only: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = read_only(capture)
    before = everything(folder)
    assert run(["report", str(folder)]) == 1
    why = "Permission denied" if os.geteuid() else "Read-only file system"
    assert f"error: cannot write ({why}): {folder}/report\nhint: " in capsys.readouterr().err
    assert run(["report", str(folder), "-o", str(tmp_path / "r")]) == 0
    assert run(["check", str(folder)]) == 0
    assert everything(folder) == before


def test_a_read_only_cache_is_done_without(
    capture: Path, read_only: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("TRACEANA_CACHE_DIR", str(read_only(tmp_path / "empty")))
    assert run(["check", str(capture)]) == 0
    assert "cache_not_written" in capsys.readouterr().out


def test_an_output_that_is_a_folder_or_below_a_file_is_refused(
    capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "m.pftrace").mkdir()
    assert run(["report", str(capture), "-o", str(tmp_path / "file")]) == 1
    assert run(["report", str(capture), "-o", str(tmp_path / "file" / "r")]) == 1
    assert run(["merge", str(capture), "-o", str(tmp_path / "m.pftrace")]) == 1
    assert capsys.readouterr().err.count("hint: name another place") == 3
    assert (tmp_path / "file").read_text() == "x"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "cache") == ["file", "m.pftrace"]


def test_a_cache_folder_that_is_gone_in_mid_run_is_no_error(capture: Path, own_cache: Path) -> None:
    assert run(["check", str(capture)]) == 0
    shutil.rmtree(own_cache)
    assert run(["check", str(capture)]) == 0
    assert any(own_cache.rglob("claim.json"))

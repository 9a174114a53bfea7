"""SIGKILL in mid-write, again and again: what is there is whole, what is not whole is not there, the next run heals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from traceana.cli import run
from traceana.outputs import files
from traceana.outputs.files import new_file, new_folder
from traceana.tables import store
from traceana.tables.read import read_capture

# A writer that never ends, on its own: nothing of it is heavy to import. Every file ends with a mark.
_FILES = """
import sys; from pathlib import Path; from traceana.outputs.files import new_file, new_folder
root = Path(sys.argv[1]); block = b"x" * 65536; n = 0
def fill(path):
    with path.open("wb", buffering=0) as file:
        for _ in range(40):
            file.write(block)
        file.write(b"end")
print("ready", flush=True)
while True:
    n += 1
    with new_file(root / "one.bin") as file:
        fill(file)
    with new_folder(root / f"out{n % 400}") as folder:
        fill(folder / "a"); (folder / "t").mkdir(); fill(folder / "t" / "b")
"""
_MERGE = """
import sys; from pathlib import Path
from traceana.cli.report_files import write_merged; from traceana.pipeline import Options, analyse
report = analyse(Path(sys.argv[2]), Options(cache=False)); n = 0
print("ready", flush=True)
while True:
    n += 1
    write_merged(Path(sys.argv[1]) / f"{n % 400}.pftrace", report)
"""
_CACHE = """
import shutil, sys; from pathlib import Path
from traceana.tables.read import read_capture; from traceana.tables.store import cache_folder
print("ready", flush=True)
while True:
    read_capture(Path(sys.argv[2]))
    for entry in cache_folder().glob("??/*"):
        away = Path(sys.argv[1]) / entry.name
        shutil.rmtree(away, ignore_errors=True)  # a run that was killed here left half of it
        entry.rename(away); shutil.rmtree(away)
"""


def killed(code: str, *arguments: Path, after_s: float) -> None:
    """Runs the endless `code` and kills it `after_s` seconds after it has begun to write."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"ready\n", process.stderr.read()
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def test_files_and_folders_are_whole_or_absent(tmp_path: Path) -> None:
    random = Random(7)
    left = 0
    for _ in range(12):
        killed(_FILES, tmp_path, after_s=random.uniform(0.001, 0.05))
        if (tmp_path / "one.bin").exists():
            assert (tmp_path / "one.bin").read_bytes().endswith(b"end")
        for folder in tmp_path.glob("out*"):
            assert sorted(p.name for p in folder.rglob("*")) == ["a", "b", "t"]
            assert all(p.read_bytes().endswith(b"end") for p in (folder / "a", folder / "t" / "b"))
        left += sum(1 for _ in tmp_path.glob(".*.part"))
    assert left  # the kills did hit writes


@pytest.mark.parametrize("make", [new_file, new_folder])
def test_what_killed_runs_left_goes_after_an_hour(tmp_path: Path, make: object) -> None:
    old, young, other = (tmp_path / f".{n}.part" for n in ("out.1", "out.2", "mine.1"))
    for path in (old, young, other):
        path.mkdir()
    then = time.time() - files._ABANDONED_S - 60
    os.utime(old, (then, then))
    os.utime(other, (then, then))
    with (new_file if make is new_file else new_folder)(tmp_path / "out") as temporary:
        (temporary if make is new_file else temporary / "x").write_text("new")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine.1.part", ".out.2.part", "out"]


def test_a_merged_trace_is_whole_or_absent(tmp_path: Path, capture: Path) -> None:
    assert run(["merge", str(capture), "-o", str(tmp_path / "whole")]) == 0
    whole = (tmp_path / "whole").read_bytes()
    for after_s in (0.02, 0.11):
        killed(_MERGE, tmp_path, capture, after_s=after_s)
        assert all(p.read_bytes() == whole for p in tmp_path.glob("*.pftrace"))


def test_the_cache_is_whole_or_absent_and_heals(tmp_path: Path, capture: Path, own_cache: Path) -> None:
    random = Random(3)
    for _ in range(3):
        killed(_CACHE, tmp_path, capture, after_s=random.uniform(0.05, 0.4))
        for entry in own_cache.glob("??/*"):
            if not entry.name.startswith("."):
                assert store.Store(own_cache).load(entry.parent.name + entry.name) is not None
    for left in own_cache.glob("??/.new-*"):
        then = time.time() - store._ABANDONED_S - 60
        os.utime(left, (then, then))
    for entry in own_cache.glob("??/[!.]*"):
        (entry / "claim.json").unlink()  # the runs left whole entries; this one is not
    assert len(read_capture(capture).ranks) == 2
    assert list(own_cache.glob("??/.new-*")) == []
    assert len(list(own_cache.glob("??/*/claim.json"))) == 2


def test_a_killed_report_can_be_made_again(tmp_path: Path, capture: Path) -> None:
    out = tmp_path / "r"
    command = [sys.executable, "-m", "traceana", "report", str(capture), "-v", "-o", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "write merged.pftrace" in line:
                process.kill()
                break
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    assert run(["report", str(capture), "-o", str(out)]) == 0
    assert json.loads((out / "report.json").read_text())["stages"]

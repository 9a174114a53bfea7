"""Ctrl-C, two runs at once, files that change or vanish while they are read, stale entries of the cache."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kineto_files as kf
import pytest

from traceana.cli import cli, run
from traceana.sources.kineto import read_kineto
from traceana.tables import read, store
from traceana.tables.read import read_capture

EVENTS = [kf.launch(0, 5, 1), kf.kernel("k", 10, 50, 1)]


@pytest.mark.parametrize("at", ["match messages", "write merged.pftrace"])
def test_ctrl_c_exits_130_and_leaves_nothing(tmp_path: Path, capture: Path, at: str) -> None:
    out = tmp_path / "r"
    command = [sys.executable, "-m", "traceana", "report", str(capture), "-v", "-o", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if at in line:
                process.send_signal(signal.SIGINT)
                break
        told = process.stderr.read()
    # A shell shows 130 for both: an exit, and Python's own end by the signal where it struck inside an import.
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in told and "traceana: interrupted" in told
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == []


@pytest.mark.parametrize("lost", ["another error", "in a finalizer"])
def test_ctrl_c_counts_where_its_exception_is_lost(
    lost: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def interrupted(**how: Any) -> int:
        if lost == "in a finalizer":
            Finalized()
            time.sleep(60)
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RuntimeError("a panic in place of the interrupt")

    monkeypatch.setattr(cli, "main", interrupted)
    handler, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    assert run(["demo"]) == 130
    assert capsys.readouterr().err == "traceana: interrupted\n"
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == (handler, hook)


def test_two_runs_at_once_on_one_folder(tmp_path: Path, capture: Path, own_cache: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(capture, folder)
    command = [sys.executable, "-m", "traceana", "report", str(folder)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert told[0][0] == told[1][0]
    report = folder / "report"
    assert sorted(p.name for p in report.iterdir()) == ["merged.pftrace", "report.html", "report.json", "tables"]
    assert json.loads((report / "report.json").read_text())["losses"] is not None
    assert list(folder.glob(".*")) == [] and list(own_cache.rglob(".new-*")) == []


def test_a_file_written_to_while_it_is_read_is_said_and_not_cached(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kf.write(tmp_path / "x" / "rank0.json", EVENTS)
    first = path.read_bytes()

    def grows(trace: Path, **how: Any) -> object:
        trace.write_bytes(kf.text([*EVENTS, kf.kernel("l", 90, 5, 2)], kf.header()).encode())
        return read_kineto(trace, **how)

    monkeypatch.setattr(read, "read_kineto", grows)
    [rank] = read_capture(tmp_path / "x").ranks
    assert rank.losses.filter(severity="warning")["name"].to_list() == ["file_changed_while_read"]
    assert list(own_cache.rglob("claim.json")) == []
    monkeypatch.undo()
    monkeypatch.setenv("TRACEANA_CACHE_DIR", str(own_cache))
    path.write_bytes(first)
    assert read_capture(tmp_path / "x").ranks[0].device.height == 1


def test_a_file_cut_or_gone_while_it_is_read_takes_no_other_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kf.write(tmp_path / "rank0.json", EVENTS, kf.header(0, 2))
    kf.write(tmp_path / "rank1.json", EVENTS, kf.header(1, 2))

    def vanishes(trace: Path, **how: Any) -> object:
        if trace.name == "rank1.json":
            trace.unlink()
        return read_kineto(trace, **how)

    monkeypatch.setattr(read, "read_kineto", vanishes)
    capture = read_capture(tmp_path, cache=False)
    assert [r.info.rank for r in capture.ranks] == [0]
    assert {"rank_not_read", "ranks_missing"} <= set(capture.losses["name"])


def test_an_entry_made_by_other_code_is_stale(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kf.write(tmp_path / "rank0.json", EVENTS)
    before = store.trace_key(path)
    monkeypatch.setattr(store, "_code", lambda: "another checkout")
    assert store.trace_key(path) != before


def test_a_pipe_in_the_folder_blocks_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kf.write(tmp_path / "x" / "rank0.json", EVENTS)
    os.mkfifo(tmp_path / "x" / "rank1.json")
    os.mkfifo(tmp_path / "x" / "server.log")
    assert run(["check", str(tmp_path / "x"), "--no-cache"]) == 0
    assert run(["check", str(tmp_path / "x" / "rank1.json")]) == 1
    assert "not a regular file" in capsys.readouterr().err

"""The cache: the same tables as a fresh parse, keyed by content, and nothing that can break a run."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import kineto_files as kf
import polars as pl
import pytest

from traceana import demo_capture
from traceana.tables import store
from traceana.tables.capture import CaptureTables
from traceana.tables.read import read_capture
from traceana.tables.store import Store

EVENTS = [kf.launch(0, 5, 1), kf.kernel("k", 10, 50, 1), kf.span("user_annotation", "a", 0, 99)]
TABLES = ("device", "calls", "annotations", "gpu_annotations", "ops", "overheads", "losses")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRACEANA_CACHE_DIR", str(folder))
    return folder


def entries(cache: Path) -> list[Path]:
    return sorted(path.parent for path in cache.rglob("claim.json"))


def same(one: CaptureTables, two: CaptureTables) -> None:
    assert [r.info for r in one.ranks] == [r.info for r in two.ranks]
    for a, b in zip(one.ranks, two.ranks, strict=True):
        for name in TABLES:
            assert getattr(a, name).equals(getattr(b, name))
            assert getattr(a, name).schema == getattr(b, name).schema


def test_the_second_run_reads_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(demo_capture.__file__).parent / "capture"
    fresh = read_capture(folder)
    assert len(entries(cache)) == 2
    monkeypatch.setattr("traceana.tables.read.read_kineto", None)  # a parse would fail
    same(fresh, read_capture(folder))


def test_ranks_read_in_other_processes_are_the_same(tmp_path: Path) -> None:
    folder = Path(demo_capture.__file__).parent / "capture"
    merge = [{**event, "pid": f"[TP00-PP0{n % 2}] {event['pid']}"} for n, event in enumerate(EVENTS)]
    kf.write(tmp_path / "merge.json", merge)
    (tmp_path / "broken.trace.json").write_bytes(b"")
    files = [*sorted((folder / "ranks").glob("*.json.gz")), tmp_path / "merge.json", tmp_path / "broken.trace.json"]
    here = read_capture(files, cache=False)
    assert sorted(here.losses["name"]) == ["merged_trace_left_out", "rank_not_read"]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        there = read_capture(files, cache=False, executor=processes)
    same(here, there)
    assert here.losses.equals(there.losses)


def test_content_is_the_key(tmp_path: Path, cache: Path) -> None:
    kf.write(tmp_path / "a" / "rank0.json", EVENTS)
    read_capture(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "rank0.json").rename(tmp_path / "b" / "other.json")
    capture = read_capture(tmp_path / "b")
    assert len(entries(cache)) == 1  # one trace, under two names
    assert capture.ranks[0].info.file == tmp_path / "b" / "other.json"
    kf.write(tmp_path / "a" / "rank0.json", [*EVENTS, kf.kernel("l", 90, 5, 2)])
    assert read_capture(tmp_path / "a").ranks[0].device.height == 2
    assert len(entries(cache)) == 2


def test_ranks_by_order_are_not_cached_as_facts(tmp_path: Path) -> None:
    kf.write(tmp_path / "one" / "b.json", EVENTS, kf.header(None))
    assert read_capture(tmp_path / "one").ranks[0].info.rank == 0
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    kf.write(tmp_path / "two" / "a.json", EVENTS[:2], kf.header(None))
    capture = read_capture(tmp_path / "two")
    assert [(r.info.rank, r.info.file.name) for r in capture.ranks] == [(0, "a.json"), (1, "b.json")]


@pytest.mark.parametrize("damage", ["truncate", "garbage", "missing", "rows", "claim", "version"])
def test_a_damaged_or_stale_entry_is_ignored_and_written_anew(
    tmp_path: Path, cache: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kf.write(tmp_path / "x" / "rank0.json", EVENTS)
    fresh = read_capture(tmp_path / "x")
    [entry] = entries(cache)
    device = entry / "device.parquet"
    if damage == "truncate":
        device.write_bytes(device.read_bytes()[:-20])
    elif damage == "garbage":
        device.write_bytes(os.urandom(500))
    elif damage == "missing":
        device.unlink()
    elif damage == "rows":
        shutil.copy(entry / "overheads.parquet", device)
    elif damage == "claim":
        (entry / "claim.json").write_text('{"claim": {}}')
    else:
        monkeypatch.setattr(store, "__version__", "999")
    same(fresh, read_capture(tmp_path / "x"))
    assert all(Store(cache).load(e.parent.name + e.name) is not None for e in entries(cache))
    assert len(entries(cache)) == (2 if damage == "version" else 1)


def test_a_cache_that_cannot_be_written_is_a_note(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    kf.write(tmp_path / "x" / "rank0.json", EVENTS)
    capture = read_capture(tmp_path / "x")
    assert capture.ranks[0].device.height == 1
    assert capture.losses.select("name", "severity").rows() == [("cache_not_written", "info")]


def test_a_full_disk_leaves_no_entry(tmp_path: Path, cache: Path) -> None:
    """A limit on the size of files stands in for the full disk."""
    kf.write(tmp_path / "x" / "rank0.json", [kf.kernel(f"kernel {n}", 10 * n, 5, n) for n in range(4000)])
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "from traceana.tables.read import read_capture\n"
        "c = read_capture(Path(sys.argv[1])); print(c.ranks[0].device.height, c.losses['name'].to_list())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x"], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "4000 ['cache_not_written']", done.stderr
    assert entries(cache) == []
    assert [p for p in cache.rglob("*") if p.is_file()] == []
    assert resource.RLIMIT_FSIZE and signal.SIGXFSZ


def test_two_runs_at_once_agree(tmp_path: Path, cache: Path) -> None:
    kf.write(tmp_path / "x" / "rank0.json", EVENTS)
    found: list[CaptureTables] = []
    threads = [threading.Thread(target=lambda: found.append(read_capture(tmp_path / "x"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for other in found[1:]:
        same(found[0], other)
    assert len(entries(cache)) == 1
    assert Store(cache).load(entries(cache)[0].parent.name + entries(cache)[0].name) is not None


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACEANA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setattr(sys, "platform", "linux")
    assert store.cache_folder() == Path("/somewhere/traceana")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert store.cache_folder() == Path.home() / "Library" / "Caches" / "traceana"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert store.cache_folder() == Path("/local/traceana/cache")


def test_no_cache_writes_nothing(tmp_path: Path, cache: Path) -> None:
    kf.write(tmp_path / "x" / "rank0.json", EVENTS)
    capture = read_capture(tmp_path / "x", cache=False)
    assert isinstance(capture.ranks[0].device, pl.DataFrame)
    assert not cache.exists()

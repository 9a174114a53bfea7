"""Engines: the same report to the byte, wherever the ranks are read and whatever becomes of a worker."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import fsspec
import pytest

from traceana.cli import run
from traceana.demo_capture import demo_folder
from traceana.engine import open_engine
from traceana.errors import EngineError, SourceError
from traceana.model import blame
from traceana.outputs.jsonfile import to_json
from traceana.pipeline import Options, analyse, check
from traceana.sources.kineto import read_kineto
from traceana.tables import read
from traceana.tables.memory import Memory
from traceana.tables.read import read_capture
from tracegen import Load, Model, build_model

BIN = Path(sys.executable).parent

# A worker that kills itself, as the kernel does when memory is short, in the middle of the first trace it reads.
DOOMED = """
import os, signal
from traceana.tables import read
def dead(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
read.read_kineto = dead
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRACEANA_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    build_model(Model(pp=4, steps=24, load=Load(preload=(4,) * 4)), folder)
    (folder / "truth.json").unlink()
    return folder


@pytest.fixture(scope="module")
def report(pipeline: Path) -> str:
    """The report of `pipeline` as the threads of this process make it."""
    return to_json(analyse(pipeline, Options(cache=False)).document)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The address of a Dask scheduler and three workers, the first of which kills itself at work."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    doomed = tmp_path / "doomed.py"
    doomed.write_text(DOOMED)
    dask = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    commands = [[*dask, "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"]]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", f"tcp://127.0.0.1:{port}"]
    worker += ["--no-nanny", "--nthreads", "1", "--no-dashboard", "--local-directory", str(tmp_path / "dask")]
    commands += [[*worker, "--preload", str(doomed)], worker, worker]
    with (tmp_path / "log").open("wb") as log:
        found = [subprocess.Popen(c, stdout=log, stderr=log) for c in commands]
    try:
        yield f"dask://127.0.0.1:{port}", found
    finally:
        for process in found:
            process.kill()
        for process in found:
            process.wait()


def wait_for_workers(engine: str, count: int) -> None:
    from distributed import Client

    with Client(engine.replace("dask", "tcp"), timeout=20, set_as_default=False) as client:
        client.wait_for_workers(count, timeout=30)


def test_a_cluster_that_loses_a_worker_gives_the_same_report(
    cluster: tuple[str, list[subprocess.Popen[bytes]]], pipeline: Path, report: str, cache: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    engine, (scheduler, doomed, *others) = cluster
    wait_for_workers(engine, 3)
    monkeypatch.setenv("TRACEANA_CACHE_DIR", cache.as_uri())
    assert run(["report", pipeline.as_uri(), "--json", "--engine", engine]) == 0
    assert capsys.readouterr().out == report + "\n"
    assert doomed.wait(10) == -signal.SIGKILL  # it had been given work
    assert [p.poll() for p in (scheduler, *others)] == [None] * 3
    assert len(list(cache.rglob("claim.json"))) == 4  # whole entries only
    for other in others:
        other.kill()
    time.sleep(0.1)


@pytest.mark.parametrize(("threads", "block"), [(1, 1 << 15), (3, 1 << 24)])
def test_neither_threads_nor_chunks_change_the_report(
    threads: int, block: int, pipeline: Path, report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "read_kineto", partial(read_kineto, block=block))
    with ThreadPoolExecutor(threads) as pool:
        monkeypatch.setattr("traceana.pipeline.open_engine", lambda _: nullcontext(pool))
        assert to_json(analyse(pipeline, Options(cache=False)).document) == report


@pytest.mark.parametrize("most", [1, 100])
def test_neither_chains_nor_pieces_at_a_time_change_the_report(
    most: int, pipeline: Path, report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blame, "_CHAINS_AT_A_TIME", 700 * most)
    monkeypatch.setattr(blame, "_PIECES_AT_A_TIME", 500 * most)
    assert to_json(analyse(pipeline, Options(cache=False)).document) == report


def test_processes_give_the_same_report(pipeline: Path, report: str, cache: Path) -> None:
    assert to_json(analyse(pipeline, Options(cache=False, engine="processes")).document) == report
    assert list(cache.glob("run-*/*/*")) == []


def test_a_capture_in_memory_storage(pipeline: Path, report: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(pipeline), "/captures/one", recursive=True)
    monkeypatch.setenv("TRACEANA_CACHE_DIR", "memory://cache")
    assert to_json(analyse("memory://captures/one").document) == report
    assert len(memory.glob("/cache/**/claim.json")) == 4
    monkeypatch.setattr(read, "read_kineto", None)  # a parse would fail
    assert to_json(analyse("memory://captures/one/").document) == report
    stored = read_capture("memory://captures/one", memory=Memory(0))
    assert stored.ranks[2].device.height > 0
    name = memory.ls("/captures/one/trace", detail=False)[1].rpartition("/")[2]
    assert read_capture(f"memory://captures/one/trace/{name}").ranks[0].info.file.name == name
    _, losses = check("memory://captures/one")
    assert "secrets_not_searched" in losses["name"].to_list()


def test_the_report_does_not_say_where_the_capture_lies(pipeline: Path, tmp_path: Path) -> None:
    one = tmp_path / "one" / "capture"
    shutil.copytree(pipeline, one)
    (one / "server").mkdir(exist_ok=True)
    for name, data in (("a.json", b"{"), ("b.log", b""), ("c.txt", b"what is this"), ("d.txt", b"what is this")):
        (one / "server" / name).write_bytes(data)
    (one / "manifest.json").write_bytes(b"[")
    shutil.copytree(one, tmp_path / "another" / "capture")
    fsspec.filesystem("memory").put(str(one), "/captures/odd", recursive=True)
    places = (one, tmp_path / "another" / "capture", one.as_uri(), "memory://captures/odd")
    texts = [to_json(analyse(place, Options(cache=False)).document) for place in places]
    assert "server/a.json: not JSON" in texts[0]
    assert str(tmp_path) not in texts[0]
    assert len(set(texts)) == 1


def test_large_traces_on_a_storage_are_told_by_their_heads(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(pipeline / "trace"), "/captures/heads", recursive=True)
    monkeypatch.setattr("traceana.sources.remote._HEAD", 4096)
    capture = read_capture("memory://captures/heads", cache=False)
    assert [r.info.rank for r in capture.ranks] == [0, 1, 2, 3]
    assert capture.losses.height == read_capture(pipeline / "trace", cache=False).losses.height


def test_a_run_without_cache_leaves_nothing_on_a_storage(pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEANA_CACHE_DIR", "memory://left")
    capture = read_capture(pipeline, cache=False, memory=Memory(0))
    assert capture.ranks[0].device.height > 0
    assert fsspec.filesystem("memory").find("/left") != []
    del capture
    assert fsspec.filesystem("memory").find("/left") == []


@pytest.mark.parametrize(
    ("name", "what"),
    [("spark", "no such engine"), ("dask://nowhere", "no such engine"), ("dask://127.0.0.1:9", "no Dask scheduler")],
)
def test_engines_that_cannot_be_had(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceana.engine._CONNECT_S", 1)
    with pytest.raises(EngineError, match=what) as caught, open_engine(name):
        pass
    assert caught.value.hint


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert run(["report", str(demo_folder()), "--json", "--engine", "dask://127.0.0.1:8786"]) == 1
    assert "pip install 'traceana[dask]'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert run(["report", "s3://bucket/capture", "--json"]) == 1
    assert "pip install 'traceana[s3]'" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["memory://nothing/here", "nosuch://bucket/x", "file:///nothing/here"])
def test_storages_without_a_capture_are_errors(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", url]) == 1
    err = capsys.readouterr().err
    assert err.startswith("traceana: error: ")
    assert url in err
    assert "hint: " in err


def test_a_report_of_a_url_needs_a_place_for_its_files(pipeline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", pipeline.as_uri()]) == 1
    assert "give -o DIR" in capsys.readouterr().err


def test_tables_that_do_not_arrive_are_an_error_that_says_what_to_share(
    pipeline: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceana.tables.read.Store.open", lambda *_: None)
    with pytest.raises(EngineError, match="not to be found here") as caught:
        read_capture(pipeline, memory=Memory(0))
    assert "TRACEANA_CACHE_DIR" in str(caught.value.hint)


class _Processes(ProcessPoolExecutor):
    """Starts none: runs what it is given in threads, and knows how much of it at once. All `together` wait for each
    other."""

    def __init__(self, together: int) -> None:
        super().__init__(1)
        self.threads, self.most = ThreadPoolExecutor(8), 0
        self.now, self.lock, self.all = 0, threading.Lock(), threading.Barrier(together, timeout=10)

    def submit(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> Future[object]:  # type: ignore[override]
        def work() -> object:
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)
            self.all.wait()
            found = fn(*args, **kwargs)
            with self.lock:
                self.now -= 1
            return found

        return self.threads.submit(work)


@pytest.mark.parametrize(("text", "together"), [(1, 1), (1 << 40, 4)])
@pytest.mark.parametrize("stored", [False, True])
def test_processes_read_no_more_text_at_once_than_memory_has_room_for(
    text: int, together: int, stored: bool, pipeline: Path
) -> None:
    place: Path | str = pipeline / "trace"
    if stored:
        place = f"memory://captures/in-turn-{together}"
        fsspec.filesystem("memory").put(str(pipeline / "trace"), place, recursive=True)
    with _Processes(together) as pool, pool.threads:
        read_capture(place, executor=pool, memory=Memory(text=text), cache=not stored)
    assert pool.most == together


class _Broken(ThreadPoolExecutor):
    def submit(self, *_: object, **__: object) -> object:  # type: ignore[override]
        raise RuntimeError("the pool is gone")


def test_an_engine_that_breaks_is_an_error(pipeline: Path) -> None:
    with pytest.raises(EngineError, match="lost the work"), _Broken(1) as pool:
        read_capture(pipeline, executor=pool)


def test_a_broken_rank_on_a_storage_is_a_loss(pipeline: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(pipeline / "trace"), "/captures/broken", recursive=True)
    first = memory.ls("/captures/broken", detail=False)[0]
    memory.pipe_file(first, b"\x28\xb5\x2f\xfd not ours")
    capture = read_capture("memory://captures/broken", cache=False)
    assert len(capture.ranks) == 3
    assert "rank_not_read" in capture.losses["name"].to_list()
    with pytest.raises(SourceError) as caught:
        read_capture(f"memory:/{first}", cache=False)
    assert caught.value.where == f"memory:/{first}"
    assert os.environ["TRACEANA_CACHE_DIR"]

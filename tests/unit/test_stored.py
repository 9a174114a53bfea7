"""Tables that stay in the store: the same as those in memory, and the same report."""

from __future__ import annotations

import shutil
from pathlib import Path

import kineto_files as kf
import polars as pl
import pytest

from traceana.demo_capture import demo_folder
from traceana.errors import SourceError
from traceana.outputs.jsonfile import to_json
from traceana.pipeline import Options, analyse
from traceana.tables import read
from traceana.tables.capture import FRAMES, RankInfo
from traceana.tables.memory import Memory
from traceana.tables.read import read_capture
from traceana.tables.stored import Kept, StoredTables


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRACEANA_CACHE_DIR", str(folder))
    return folder


@pytest.mark.parametrize("cached", [True, False])
def test_without_memory_for_them_the_tables_are_the_same(cached: bool, cache: Path) -> None:
    held = read_capture(demo_folder(), cache=cached)
    stored = read_capture(demo_folder(), cache=cached, memory=Memory(0))
    for one, two in zip(held.ranks, stored.ranks, strict=True):
        assert isinstance(two, StoredTables)
        assert not isinstance(one, StoredTables)
        assert one.info == two.info
        assert one.losses.equals(two.losses)
        for name in FRAMES:
            assert getattr(one, name).equals(getattr(two, name))
            assert getattr(one, name).schema == getattr(two, name).schema


def test_the_report_does_not_depend_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before = to_json(analyse(demo_folder(), Options(cache=False)).document)
    monkeypatch.setattr(read, "Memory", lambda: Memory(3 << 20))  # room for one of the two ranks
    assert to_json(analyse(demo_folder(), Options(cache=False)).document) == before


def test_what_was_stored_for_one_run_goes_with_it(cache: Path) -> None:
    capture = read_capture(demo_folder(), cache=False, memory=Memory(0))
    assert list(cache.glob("run-*/*/*/device.parquet"))
    del capture
    assert list(cache.glob("run-*")) == []


def test_a_store_that_goes_away_is_an_error_that_says_so(tmp_path: Path, cache: Path) -> None:
    kf.write(tmp_path / "x" / "rank0.json", [kf.launch(0, 5, 1), kf.kernel("k", 10, 50, 1)])
    capture = read_capture(tmp_path / "x", memory=Memory(0))
    shutil.rmtree(cache)
    with pytest.raises(SourceError, match="cannot be read back"):
        _ = capture.ranks[0].device


def test_frames_are_kept_up_to_a_size_and_read_again_beyond_it() -> None:
    reads: list[str] = []

    def frame(name: str) -> pl.DataFrame:
        reads.append(name)
        return pl.DataFrame({"ts_ns": range(1000), "name": [name] * 1000})

    most = int(frame("calls").estimated_size() * 5 // 2)
    tables = StoredTables(RankInfo(0, Path("r")), pl.DataFrame(), frame, Kept(most))
    reads.clear()
    for name in ("calls", "ops", "calls", "device", "ops"):
        assert getattr(tables, name)["name"][0] == name
    assert reads == ["calls", "ops", "device", "ops"]
    moved = tables.mapped(lambda name, f: f.with_columns(pl.col("ts_ns") + len(name)))
    assert (moved.ops["ts_ns"] - tables.ops["ts_ns"]).unique().to_list() == [3]
    with pytest.raises(AttributeError):
        getattr(tables, "nothing")  # noqa: B009

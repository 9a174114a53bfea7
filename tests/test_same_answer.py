"""One capture has one answer: to the byte, for every size of chunk, number of threads and path, cached or not."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from traceana.demo_capture import demo_folder
from traceana.outputs.jsonfile import to_json
from traceana.pipeline import Options, analyse
from traceana.sources.kineto import read_kineto
from traceana.sources.kineto_index import NotPlain


@pytest.fixture(scope="module")
def answer() -> str:
    return to_json(analyse(demo_folder(), Options(cache=False)).document)


def _never(*_: Any) -> Any:
    raise NotPlain("not asked")


@pytest.mark.parametrize(
    ("block", "threads", "by_keys"), [(1 << 16, 1, True), (77_777, 3, True), (1 << 30, 2, True), (1 << 17, 2, False)]
)
def test_chunks_and_threads(
    answer: str, monkeypatch: pytest.MonkeyPatch, block: int, threads: int, by_keys: bool
) -> None:
    def read(path: Path, *, pool: Executor | None, **how: Any) -> object:
        with ThreadPoolExecutor(threads) as chunks:
            return read_kineto(path, block=block, pool=chunks if threads > 1 else None, **how)

    monkeypatch.setattr("traceana.tables.read.read_kineto", read)
    if not by_keys:
        monkeypatch.setattr("traceana.sources.kineto.parse_keys", _never)
    assert to_json(analyse(demo_folder(), Options(cache=False)).document) == answer


def test_tables_from_the_cache(answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEANA_CACHE_DIR", str(tmp_path))
    assert to_json(analyse(demo_folder(), Options()).document) == answer
    monkeypatch.setattr("traceana.tables.read.read_kineto", None)  # a parse would fail
    assert to_json(analyse(demo_folder(), Options()).document) == answer

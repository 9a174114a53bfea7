"""What must not change an attribution: the order and names of the files, a clock that is off by a constant, and where a
window is cut. On real captures; chunk sizes and threads are in test_kineto.py."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from shutil import copy

import polars as pl
import pytest
from captures import real

from traceana.model.model import Model
from traceana.pipeline import Options, load_model

COLUMNS = ["rank", "ts_ns", "end_ns", "cause", "root_rank", "detail", "crossed_token_return", "visit", "gap", "chain"]


def traces(letter: str) -> list[Path]:
    return sorted((real(letter) / "trace").glob("*.trace.json.gz"))


def model_of(folder: Path, *, assume: str | None = None, window: tuple[int, int] | None = None) -> Model:
    return load_model(folder, Options(assume=assume, window=window, cache=False))[0]


def stretches(model: Model) -> pl.DataFrame:
    """States and causes of every nanosecond, counted from the window's start."""
    start = model.trace.window.start_ns
    idle = model.blame.attribution.select(COLUMNS)
    states = pl.concat([s.states for s in model.states.values()]).select(
        "rank", "ts_ns", "end_ns", "state", "kernel_class"
    )
    both = pl.concat([idle, states], how="diagonal").with_columns(pl.col("ts_ns") - start, pl.col("end_ns") - start)
    return both.sort("rank", "ts_ns", "state", nulls_last=True)


def test_names_and_order_of_files_change_nothing(tmp_path: Path) -> None:
    plain, renamed = tmp_path / "plain", tmp_path / "renamed"
    for folder in (plain, renamed):
        folder.mkdir()
    first, second = traces("B")
    for source, name in ((first, "b"), (second, "a")):
        copy(source, plain / source.name)
        copy(source, renamed / f"{name}.json.gz")
    one, other = (stretches(model_of(folder, assume="same-host")) for folder in (plain, renamed))
    assert one.equals(other)


@pytest.mark.parametrize("offset_ns", [123_456_789, -3_000_000_001])
def test_a_clock_that_is_off_changes_nothing(offset_ns: int, tmp_path: Path) -> None:
    """Without a prior the messages alone tell the offset, and tell all of it."""
    first, second = traces("B")
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for folder in (right, wrong):
        folder.mkdir()
        copy(first, folder / first.name)
    copy(second, right / second.name)
    text = gzip.decompress(second.read_bytes()).decode()
    moved, n = re.subn(r'("baseTimeNanoseconds": )(\d+)', lambda m: f"{m[1]}{int(m[2]) + offset_ns}", text)
    assert n == 1
    (wrong / second.name).write_bytes(gzip.compress(moved.encode(), 1))
    one, other = (model_of(folder, assume="none") for folder in (right, wrong))
    assert stretches(one).equals(stretches(other))
    here, there = (dict(m.trace.clock.select("rank", "offset_ns").iter_rows()) for m in (one, other))
    assert there[1] - here[1] == offset_ns


@pytest.mark.parametrize(("letter", "part"), [("A", 0.37), ("B", 0.5)])
def test_windows_cut_in_two_add_up_to_the_whole(letter: str, part: float) -> None:
    """Every table of nanoseconds: states by class, causes, and the blame matrix with its details."""
    whole = model_of(real(letter))
    length = whole.trace.window.duration_ns
    cut = int(length * part)
    halves = [model_of(real(letter), window=window) for window in ((0, cut), (cut, length))]
    keys = ["rank", "state", "kernel_class", "cause", "root_rank", "detail", "crossed_token_return", "visit"]
    ns = (pl.col("end_ns") - pl.col("ts_ns")).sum().alias("ns")

    def summed(models: list[Model]) -> pl.DataFrame:
        every = pl.concat([stretches(m) for m in models])
        # The states say which forward the GPU is in, the causes which one is waited for.
        return every.group_by(keys).agg(ns).sort(keys, nulls_last=True)

    assert summed(halves).equals(summed([whole]))

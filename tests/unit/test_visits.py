"""What the step annotations of a scheduler's visits say, and what they cannot say."""

from __future__ import annotations

from pathlib import Path

import kineto_files as kf
import polars as pl
import pytest

from traceana.matching.marks import visit_offsets
from traceana.matching.visits import find_visits, number_slots, slots_by_marks
from traceana.tables.read import read_capture


@pytest.mark.parametrize(
    ("step", "batch"),
    [("step[DECODE bs=8]", 8), (f"step[DECODE bs={10**12}]", None), ("step[DECODE bs=\u0661\u0662]", None)],
)
def test_a_batch_size_that_cannot_be_is_unknown(tmp_path: Path, step: str, batch: int | None) -> None:
    events = [
        kf.span("user_annotation", "scheduler.recv_requests", 0, 5),
        kf.span("user_annotation", "scheduler.run_batch", 6, 900),
        kf.span("user_annotation", step, 10, 800),
        kf.launch(100, 5, 1),
        kf.kernel("k", 200, 50, 1),
    ]
    kf.write(tmp_path / "rank0.json", events, kf.header())
    (rank,) = read_capture(tmp_path, cache=False).ranks
    found = find_visits(rank)
    assert found.filter(pl.col("step").is_not_null()).select("step", "batch_size").rows() == [(step, batch)]


def marked(first: int, *numbers: int) -> pl.DataFrame:
    return pl.DataFrame({"visit": range(first, first + len(numbers)), "number": numbers})


def test_the_hooks_numbers_say_how_far_apart_ordinals_are() -> None:
    marks = {0: marked(1, 7, 8, 9), 1: marked(3, 7, 8, 9), 2: marked(0, 8, 9)}
    assert visit_offsets(marks) == ({0: 2, 1: 0, 2: 4}, [])
    assert visit_offsets({0: marked(1, 7), 1: marked(1)}) == ({0: 0}, [])  # a rank without marks


def test_marks_that_contradict_themselves_or_share_no_step_are_named() -> None:
    jump = pl.DataFrame({"visit": [1, 5], "number": [7, 8]})
    assert visit_offsets({0: marked(1, 7, 8), 1: jump, 2: marked(1, 70)}) == ({0: 0}, [1, 2])


@pytest.mark.parametrize("slots", [3, None])
def test_slots_are_what_the_hook_says_and_counted_on_where_no_batch_ran(tmp_path: Path, slots: int | None) -> None:
    events = [kf.launch(100, 5, 1), kf.kernel("k", 200, 50, 1)]
    for i, slot in enumerate((2, None, 1)):
        events.append(kf.span("user_annotation", "recv_requests", 1000 * i, 5))
        if slot is not None:
            mark = f"traceana.slot[mb={slot} stage=0 EXTEND bs=4 toks=99 n={40 + i}]"
            events.append(kf.span("user_annotation", mark, 1000 * i + 10, 500))
            events.append(kf.span("user_annotation", "run_batch", 1000 * i + 20, 400))
    events.append(kf.span("user_annotation", "traceana.slot[mb=x]", 2900, 5))
    kf.write(tmp_path / "rank0.json", events, kf.header())
    (rank,) = read_capture(tmp_path, cache=False).ranks
    found = find_visits(rank, slots=slots).filter(pl.col("visit") > 0)
    empty = 0 if slots else None
    assert found.get_column("slot").to_list() == [2, empty, 1]
    assert found.select("mode", "batch_size", "tokens").rows() == [
        ("extend", 4, 99),
        (None, None, None),
        ("extend", 4, 99),
    ]


def turns(slots: int, first: int, visits: int, filled: range, *, idle: range = range(0)) -> pl.DataFrame:
    """Visits 0.. of a loop that begins at slot `first`; those of `filled` slots are marked, but for the laps `idle`."""
    at = [first + v for v in range(visits)]
    slot = [a % slots if a % slots in filled and a // slots not in idle else None for a in at]
    return pl.DataFrame({"visit": range(visits), "slot": slot}, schema={"visit": pl.Int64, "slot": pl.Int32})


def test_the_number_of_slots_is_told_by_the_marks_that_come_again() -> None:
    """As on two H200 at async depth 6: 5 of 8 slots hold requests, and only those are marked."""
    first, second = turns(8, 5, 30, range(2, 7)), turns(8, 5, 29, range(2, 7), idle=range(2, 3))
    assert slots_by_marks([first, second]) == 8
    assert number_slots(first, 8).get_column("slot").to_list() == [(5 + v) % 8 for v in range(30)]
    assert slots_by_marks([turns(8, 2, 5, range(2, 7))]) is None  # less than one turn
    assert slots_by_marks([turns(8, 0, 30, range(0))]) is None  # nothing is marked
    assert slots_by_marks([pl.DataFrame({"visit": [0, 1, 2], "slot": [3, 3, 4]})]) is None  # not in turn
    assert number_slots(first, None).get_column("slot").null_count() == 30

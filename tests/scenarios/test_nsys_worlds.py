"""An nsys recording with the hook's spans says what a torch profile of the same run says, to the nanosecond."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from nsys_of_torch import record
from scenarios.test_worlds import KEYS, exact_model, found

from traceana.tables.read import read_capture
from tracegen import build

WORLDS = [("pp2_depth2", 4), ("pp4_mixed", 6), ("tp2_pp4", 4)]


@pytest.mark.parametrize(("name", "slots"), WORLDS)
def test_the_same_attribution(name: str, slots: int, tmp_path: Path) -> None:
    build(name, tmp_path / "torch")
    torch = exact_model(tmp_path / "torch")
    record(read_capture(tmp_path / "torch", cache=False), tmp_path / "nsys", slots=slots)
    nsys = exact_model(tmp_path / "nsys")
    assert found(nsys).equals(found(torch))
    assert nsys.trace.topology == torch.trace.topology
    columns = ["rank", "visit", "slot", "mode", "batch_size", "tokens"]
    assert nsys.trace.visits.select(columns).equals(torch.trace.visits.select(columns))


def test_ranks_that_are_recorded_from_other_visits_on(tmp_path: Path) -> None:
    """nsys begins on all ranks at once: the hook's numbers say which visits belong together."""
    build("pp4_empty_slots", tmp_path / "torch")
    capture = read_capture(tmp_path / "torch", cache=False)
    torch = exact_model(tmp_path / "torch")
    record(capture, tmp_path / "nsys", slots=4, late={0: 3_000_000, 1: 9_000_000, 3: 6_000_000})
    nsys = exact_model(tmp_path / "nsys")
    window = nsys.trace.window
    assert window.start_ns > torch.trace.window.start_ns and window.end_ns == torch.trace.window.end_ns
    one, other = (_inside(found(m), window.start_ns, window.end_ns) for m in (torch, nsys))
    assert one.equals(other) and one.height > 1000


def _inside(table: pl.DataFrame, start: int, end: int) -> pl.DataFrame:
    """The part of a table of stretches in [start, end), neighbours of one kind joined."""
    kept = table.with_columns(pl.col("ts").clip(start, end), pl.col("end").clip(start, end))
    kept = kept.filter(pl.col("end") > pl.col("ts")).sort("rank", "ts")
    kind = pl.struct("rank", *KEYS)
    run = (kind != kind.shift(1)).fill_null(True).cum_sum().alias("run")
    grouped = kept.with_columns(run).group_by("run", maintain_order=True)
    return grouped.agg(pl.col("rank", "ts", *KEYS).first(), pl.col("end").last()).drop("run")

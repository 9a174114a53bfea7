"""What the step annotations of a scheduler's visits say, and what they cannot say."""

from __future__ import annotations

from pathlib import Path

import kineto_files as kf
import polars as pl
import pytest

from traceana.matching.visits import find_visits
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

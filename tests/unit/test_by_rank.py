"""The rows of each rank of a frame."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceana.arrays import narrow
from traceana.tables.by_rank import ByRank


@given(st.lists(st.integers(0, 4)), st.booleans())
def test_each_rank_has_its_rows_in_order(ranks: list[int], ordered: bool) -> None:
    ranks = sorted(ranks) if ordered else ranks
    frame = pl.DataFrame({"rank": ranks, "n": range(len(ranks))}, schema={"rank": pl.Int32, "n": pl.Int64})
    parts = ByRank(frame)
    assert set(parts) == set(ranks)
    for rank in range(6):
        assert parts[rank].equals(frame.filter(pl.col("rank") == rank))


@pytest.mark.parametrize(("values", "size"), [([], 1), ([-1, 127], 1), ([128], 2), ([-1, 40000], 4), ([1 << 40], 8)])
def test_narrow_keeps_every_number(values: list[int], size: int) -> None:
    kept = narrow(np.array(values, dtype=np.int64))
    assert (kept.tolist(), kept.dtype.itemsize) == (values, size)

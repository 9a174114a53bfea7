"""HolisticTraceAnalysis as an oracle: what `to_hta()` opens, and the busy time of each rank, where definitions agree.

HTA's temporal breakdown counts any activity on any stream of a trace, from the first one's start to the last one's end,
by default in whole microseconds, which takes most of one off each of the captures' many short kernels: that is turned off.
"""

from __future__ import annotations

import warnings

import numpy as np
import polars as pl
import pytest
from captures import real

import traceana
from traceana.intervals import union

hta = pytest.importorskip(
    "hta.trace_analysis",
    reason="HolisticTraceAnalysis is not installed, so nothing is compared with it: pip install 'traceana[hta]'",
)


@pytest.mark.parametrize("letter", ["A", "F"])
def test_busy_and_idle_time_of_each_rank_are_htas(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    capture = traceana.load(real(letter))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # HTA's own, of pandas
        table = capture.to_hta().get_temporal_breakdown(visualize=False)
    theirs = {int(row["rank"]): row for row in table.to_dict("records")}
    assert set(theirs) == set(capture.ranks)
    for rank, tables in capture.ranks.items():
        device = tables.device.filter(pl.col("stream").is_not_null())
        start, end = device.get_column("ts_ns").to_numpy(), device.get_column("end_ns").to_numpy()
        span = int(end.max() - start.min())
        busy = union(start, end)
        idle = span - int(np.sum(busy.end - busy.start))
        assert theirs[rank]["kernel_time(us)"] == pytest.approx(span / 1000, abs=0.5)
        assert theirs[rank]["idle_time(us)"] == pytest.approx(idle / 1000, abs=0.5)

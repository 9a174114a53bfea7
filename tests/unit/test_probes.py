"""The probes: small traces with an exact answer for one flaw each. The right number, or a clear message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from traceana.errors import SourceError
from traceana.tables.capture import CaptureTables, RankTables
from traceana.tables.read import read_capture

PROBES = Path(__file__).parents[1] / "probes"
NAMES = sorted(path.name for path in PROBES.iterdir())
REFUSED = {"18_same_rank"}
WARNED = {
    "04_dur_overflow": "event_absurd_duration",
    "05_ts_zero": "event_zero_timestamp",
    "06_neg_dur": "event_negative_duration",
    "11_backslash": "event_repaired",
    "13_bad_utf8": "bad_utf8",
    "14_truncated": "trace_truncated",
    "15_unescaped_quote": "event_repaired",
    "27_empty": "no_device_events",
}


def read(name: str) -> CaptureTables:
    return read_capture(PROBES / name, cache=False)


def expect(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PROBES / name / "expect.json").read_text())
    return found


def busy_ns(rank: RankTables) -> int:
    """Length of the union of all device activities."""
    ts, end = rank.device["ts_ns"].to_numpy(), rank.device["end_ns"].to_numpy()
    reach = np.maximum.accumulate(end)
    before = np.concatenate((ts[:1], reach[:-1]))
    return int(np.maximum(end - np.maximum(ts, before), 0).sum())


def warnings(capture: CaptureTables) -> set[str]:
    rows = pl.concat([capture.losses, *(rank.losses for rank in capture.ranks)])
    return set(rows.filter(pl.col("severity") != "info")["name"])


@pytest.mark.parametrize("name", [n for n in NAMES if n not in REFUSED])
def test_answer(name: str) -> None:
    said, capture = expect(name), read(name)
    device = capture.ranks[0].device
    if "busy_us" in said:
        assert busy_ns(capture.ranks[0]) == round(said["busy_us"] * 1000)
    if "span_us" in said:
        assert device["end_ns"].max() - device["ts_ns"].min() == round(said["span_us"] * 1000)  # type: ignore[operator]
    if "ranks" in said:
        assert [r.info.rank for r in capture.ranks] == said["ranks"]
        assert {r.info.rank_source for r in capture.ranks} == {"name"}
    assert warnings(capture) == ({WARNED[name]} if name in WARNED else set())


def test_sub_microsecond_kernels_keep_their_length() -> None:
    device = read("02_sub_us").ranks[0].device
    assert (device["end_ns"] - device["ts_ns"]).unique().to_list() == [200]
    assert device.height == 1000


def test_the_absurd_duration_is_kept_out() -> None:
    capture = read("04_dur_overflow")
    assert busy_ns(capture.ranks[0]) == 400_000
    [detail] = capture.ranks[0].losses.filter(pl.col("name") == "event_absurd_duration")["detail"].to_list()
    assert "huge" in detail


def test_one_graph_launch_and_its_kernels_share_a_correlation() -> None:
    rank = read("08_cuda_graph").ranks[0]
    launches = rank.calls.filter(pl.col("name").cast(pl.String()) == "cudaGraphLaunch")
    assert launches.height == expect("08_cuda_graph")["graph_launches"]
    assert rank.device["correlation"].unique().to_list() == launches["correlation"].to_list()
    assert rank.device.height == expect("08_cuda_graph")["kernels"]


def test_the_orphan_is_counted_and_kept() -> None:
    rank = read("09_orphan_kernel").ranks[0]
    assert rank.losses.filter(pl.col("name") == "kernel_without_launch")["count"].to_list() == [1]


def test_the_truncated_trace_says_where_it_ends() -> None:
    [row] = read("14_truncated").ranks[0].losses.filter(pl.col("name") == "trace_truncated").to_dicts()
    size = (PROBES / "14_truncated" / "rank0_trace.json").stat().st_size
    assert f"to {size}" in row["detail"]


def test_one_rank_twice_is_refused_with_both_names() -> None:
    with pytest.raises(SourceError, match=r"rank 0: rank0_trace\.json and rank1_trace\.json"):
        read("18_same_rank")


def test_base_times_make_ranks_simultaneous() -> None:
    one, two = read("20_base_time").ranks
    assert one.info.base_time_ns != two.info.base_time_ns
    assert one.device["ts_ns"].to_list() == two.device["ts_ns"].to_list()


def test_sends_and_receives_carry_their_peers() -> None:
    first, second = read("21_pp_recv_wait").ranks
    sends = first.device.filter(pl.col("collective").cast(pl.String()) == "send")
    receives = second.device.filter(pl.col("collective").cast(pl.String()) == "recv")
    assert sends.height == receives.height == 5
    assert sends["dst_rank"].to_list() == [1] * 5
    assert receives["src_rank"].to_list() == [0] * 5


def test_epoch_times_are_not_based_twice() -> None:
    rank = read("29_epoch_ns").ranks[0]
    assert rank.device["ts_ns"][0] == 1_755_000_000_000_100_100
    assert rank.losses["name"].to_list() == ["base_time_not_added"]

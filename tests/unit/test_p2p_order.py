"""Messages without spans: two streams that only their order and the clocks relate."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pytest

from traceana.matching.p2p import Endpoints, pair_p2p
from traceana.matching.topology import Topology

TOPOLOGY = Topology(2, {0: 0, 1: 1}, {0: 1, 1: 0}, {0: 1, 1: 0}, "test")


def stream(rank: int, side: str, times: Sequence[tuple[int, int]], size: int | None) -> Endpoints:
    count = len(times)
    return pl.DataFrame(
        {
            "rank": [rank] * count, "row": range(count), "side": [side] * count, "src": [0] * count, "dst": [1] * count,
            "kind": ["other"] * count, "visit": [None] * count, "index": range(count),
            "ts_ns": [a for a, _ in times], "end_ns": [b for _, b in times], "bytes": [size] * count,
            "dtype": [None] * count,
        },
        schema_overrides={
            "rank": pl.Int32, "src": pl.Int32, "dst": pl.Int32, "visit": pl.Int64, "bytes": pl.Int64, "dtype": pl.String,
            "row": pl.Int64, "index": pl.Int64,
        },
    )  # fmt: skip


@pytest.mark.parametrize("size", [4096, None])
def test_a_receive_is_paired_with_the_latest_send_that_can_have_fed_it(size: int | None) -> None:
    """The receiver's trace lacks the first two. nsys tells no size: unknown on both sides is no disagreement."""
    sends = [(i * 1_000_000, i * 1_000_000 + 5_000) for i in range(6)]
    receives = [(a - 400_000, b) for a, b in sends[2:]]
    match = pair_p2p(
        {0: stream(0, "send", sends, size), 1: stream(1, "recv", receives, size)}, TOPOLOGY, slack_ns=5_000
    )
    assert match.messages["send_ts_ns"].to_list() == [a for a, _ in sends[2:]]
    assert match.messages["recv_end_ns"].to_list() == [b for _, b in receives]
    assert set(match.losses["severity"].to_list()) == {"info"} and match.losses["count"].sum() == 2


def test_a_size_that_only_one_side_tells_pairs_nothing() -> None:
    times = [(i * 1_000_000, i * 1_000_000 + 5_000) for i in range(4)]
    match = pair_p2p({0: stream(0, "send", times, 4096), 1: stream(1, "recv", times, None)}, TOPOLOGY, slack_ns=5_000)
    assert match.messages.height == 0
    assert match.losses.filter(pl.col("name") == "p2p_alignment_unknown")["severity"].to_list() == ["warning"]

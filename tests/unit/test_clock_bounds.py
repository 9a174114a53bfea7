"""Each fact that bounds two clocks, derived by hand; and that pruning never changes a bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from traceana import schema
from traceana.clock.bounds import Facts, collect_bounds, gather, prune
from traceana.clock.prior import Prior, Probe
from traceana.tables import RankInfo, RankTables

NOTHING = Prior("none", "test")
MIB = 1 << 20


Rows = Sequence[tuple[int, int, str, int]]


def rank(number: int, device: Rows = (), calls: Rows = ()) -> RankTables:
    """`device`: ts, end, name, correlation; `calls` likewise."""
    work = [
        {"ts_ns": t, "end_ns": e, "name": n, "correlation": c, "kind": "memcpy" if "cpy" in n else "kernel", "stream": 7, "device": 0}
        for t, e, n, c in device
    ]  # fmt: skip
    made = [{"ts_ns": t, "end_ns": e, "name": n, "correlation": c, "pid": 1, "tid": 1} for t, e, n, c in calls]
    return RankTables(
        RankInfo(number, Path(f"rank{number}")), device=schema.DEVICE.frame(work), calls=schema.CALLS.frame(made)
    )


def message(ordinal: int, send: tuple[int, int], recv: tuple[int, int], size: int = 4096) -> dict[str, object]:
    return {
        "src": 0, "dst": 1, "kind": "proxy", "ordinal": ordinal, "bytes": size, "send_ts_ns": send[0],
        "send_end_ns": send[1], "recv_ts_ns": recv[0], "recv_end_ns": recv[1], "send_row": ordinal, "recv_row": ordinal,
    }  # fmt: skip


def bounds(
    *,
    ranks: Sequence[RankTables] = (),
    messages: Sequence[dict[str, object]] = (),
    controls: Sequence[dict[str, object]] = (),
    collectives: Sequence[dict[str, object]] = (),
    prior: Prior = NOTHING,
    probes: Sequence[Probe] = (),
) -> set[tuple[int, int, int, str, str]]:
    """a, b, upper_ns, source, message of every bound, but for the beliefs about the clocks of one trace."""
    frame = collect_bounds(
        ranks or [rank(0), rank(1)], schema.MESSAGES.frame(messages), schema.CONTROLS.frame(controls),
        schema.COLLECTIVES.frame(collectives), prior=prior, probes=probes,
    )  # fmt: skip
    kept = frame.filter(~pl.col("message").str.contains("one trace|within 1 ms"))
    return set(kept.select("a", "b", "upper_ns", "source", "message").iter_rows())


def test_a_receive_ends_after_its_send() -> None:
    # Sent 1,000 to 1,500 on rank 0's clock, received 5,000 to 9,000 on rank 1's: the send's start gives 8,000; the
    # send is shorter than the 2,000 of its tail, so its end gives no more.
    assert bounds(messages=[message(4, (1_000, 1_500), (5_000, 9_000))]) == {
        (1, 3, 8_000, "p2p", "proxy message 4 from rank 0 to rank 1")
    }
    # A send of 6,000: it ends at 7,000, less its tail 5,000, and the receive ends at 9,000.
    assert bounds(messages=[message(4, (1_000, 7_000), (5_000, 9_000))]) == {
        (1, 3, 4_000, "p2p", "proxy message 4 from rank 0 to rank 1")
    }


def test_a_blocked_send_past_the_credit_bounds_the_other_way() -> None:
    # 64 MiB each: 128 MiB of credit are full with two. Message 2 waits until message 0 is taken, message 3 for 1.
    # Messages 0, 1, 4 take 200 us; 2 and 3 wait, and their ends bound the receives of 0 and 1.
    sends = [(0, 200_000), (300_000, 500_000), (600_000, 3_000_000), (3_100_000, 5_000_000), (9_000_000, 9_200_000)]
    takes = [
        (2_900_000, 3_100_000),
        (4_900_000, 5_100_000),
        (6_000_000, 6_200_000),
        (7_000_000, 7_200_000),
        (9_300_000, 9_500_000),
    ]
    rows = [message(k, s, r, 64 * MIB) for k, (s, r) in enumerate(zip(sends, takes, strict=True))]
    found = {b for b in bounds(messages=rows) if b[3] == "p2p_blocked"}
    assert found == {
        (3, 1, 100_000, "p2p_blocked", "proxy message 2 from rank 0 to rank 1, blocked"),
        (3, 1, 100_000, "p2p_blocked", "proxy message 3 from rank 0 to rank 1, blocked"),
    }
    assert not {b for b in bounds(messages=rows[:3]) if b[3] == "p2p_blocked" and "message 2" not in b[4]}
    # A message of 256 MiB is past the credit all by itself, if it was slow at all.
    alone = [
        message(k, (k * 10**8, k * 10**8 + d), (k * 10**8 + d - 9, k * 10**8 + d + 9), 256 * MIB)
        for k, d in ((0, 700_000), (1, 20_000_000))
    ]
    assert {b for b in bounds(messages=alone) if b[3] == "p2p_blocked"} == {
        (3, 1, 9, "p2p_blocked", "proxy message 1 from rank 0 to rank 1, blocked")
    }


def test_gloo_bounds_both_ways() -> None:
    row: dict[str, object] = {
        "src": 0, "dst": 1, "kind": "requests", "ordinal": 7, "send_ts_ns": 1_000, "send_end_ns": 60_000,
        "recv_ts_ns": 40_000, "recv_end_ns": 55_000,
    }  # fmt: skip
    assert bounds(controls=[row]) == {
        (0, 2, 54_000, "gloo", "gloo requests message 7 from rank 0 to rank 1"),
        (2, 0, 20_000, "gloo", "gloo requests message 7 from rank 0 to rank 1, rendezvous"),
    }


def test_a_collective_ends_everywhere_within_its_transfer() -> None:
    # The last one in takes 10,000: nobody can end more than that, less the 1,000 that its data needs, before another.
    rows: list[dict[str, object]] = [
        {"group": "tp", "instance": 3, "rank": r, "collective": c, "ts_ns": t, "end_ns": e, "row": 0}
        for c, r, t, e in (("allreduce", 0, 0, 60_000), ("allreduce", 1, 50_000, 60_500), ("broadcast", 0, 0, 9), ("broadcast", 1, 0, 9))
    ]  # fmt: skip
    rows[2]["instance"] = rows[3]["instance"] = 4
    assert bounds(collectives=rows) == {
        (1, 3, 500 + 10_500 - 1_000, "collective", "allreduce of group tp 3 between ranks 0 and 1"),
        (3, 1, -500 + 10_500 - 1_000, "collective", "allreduce of group tp 3 between ranks 1 and 0"),
    }


def test_whole_microseconds_loosen_the_bounds() -> None:
    ticks = [(t * 1_000, t * 1_000 + 5_000, "k", t) for t in range(8)]
    row = message(0, (1_000, 1_500), (5_000, 9_000))
    assert {b[2] for b in bounds(ranks=[rank(0, ticks), rank(1, ticks)], messages=[row])} == {10_000}
    assert {
        b[2] for b in bounds(ranks=[rank(0, ticks), rank(1, [*ticks, (9_001, 9_002, "k", 9)])], messages=[row])
    } == {8_000}


def test_launches_and_syncs_bound_cpu_and_gpu_of_a_rank() -> None:
    device = [
        (10_000, 20_000, "kernel", 1),
        (30_000, 90_000, "kernel", 2),
        (95_000, 96_000, "Memcpy DtoH (Device -> Pageable)", 3),
        (95_500, 99_000, "Memcpy DtoH (Device -> Pinned)", 4),
    ]
    calls = [
        (6_000, 8_000, "cudaLaunchKernel", 1),
        (21_000, 25_000, "cudaLaunchKernel", 2),
        (26_000, 101_000, "cudaMemcpyAsync", 3),
        (26_500, 27_000, "cudaMemcpyAsync", 4),
        (102_000, 106_000, "cudaDeviceSynchronize", 5),
        (300_000, 301_000, "cudaEventSynchronize", 6),
    ]
    found = bounds(ranks=[rank(5, device, calls)])
    # The first launch is the tightest by far: 10,000 - 6,000. The later ones cannot matter at any drift.
    assert found == {
        (10, 11, 4_000, "launch", "launch of device row 0 on rank 5"),
        (11, 10, 101_000 - 96_000, "sync", "copy to pageable memory, device row 2 on rank 5"),
    }
    without = [c for c in calls if c[3] != 3]
    assert (11, 10, 106_000 - 99_000, "sync", "device synchronisation on rank 5") in bounds(
        ranks=[rank(5, device, without)]
    )


def test_cpu_and_gpu_are_tied_only_where_both_sides_are_bounded() -> None:
    device, calls = [(10_000, 20_000, "kernel", 1)], [(6_000, 8_000, "cudaLaunchKernel", 1)]
    sync = (25_000, 30_000, "cudaDeviceSynchronize", 2)
    none = schema.MESSAGES.empty(), schema.CONTROLS.empty(), schema.COLLECTIVES.empty()

    def ties(table: RankTables) -> set[int]:
        _, beliefs = gather([table], *none, prior=NOTHING)
        return set(beliefs.get_column("upper_ns"))

    assert ties(rank(0, device, calls)) == {1_000_000}
    assert ties(rank(0, device, [*calls, sync])) == {1_000, 1_000_000}


def test_priors_and_probes() -> None:
    hosts = Prior("ntp", "test", {0: 0, 1: 1}, 300_000)
    assert bounds(prior=hosts) == {
        *((a, b, 2_500, "same_host", "same host: rank 0") for a, b in ((0, -1), (-1, 0), (1, -1), (-1, 1))),
        *((a, b, 2_500, "same_host", "same host: rank 1") for a, b in ((2, -2), (-2, 2), (3, -2), (-2, 3))),
        (-1, -2, 300_000, "prior", "clocks of hosts 0 and 1"),
        (-2, -1, 300_000, "prior", "clocks of hosts 0 and 1"),
    }
    probed = bounds(prior=Prior("none", "test", {0: 0, 1: 1}), probes=[Probe(0, 1, 40_000, 123)])
    assert (-1, -2, 40_000, "probe", "clock probe from host 0 to host 1") in probed
    assert bounds(prior=Prior("none", "test", {0: 0, 1: 1})) == set()


def test_messages_of_other_ranks_are_left_out() -> None:
    assert bounds(ranks=[rank(0)], messages=[message(0, (1_000, 1_500), (5_000, 9_000))]) == set()


fact = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(-5_000, 90_000), st.integers(0, 900_000_000))


@given(st.lists(fact, max_size=60), st.lists(st.integers(-(10**9), 2 * 10**9), min_size=1, max_size=6))
@settings(max_examples=120, deadline=None)
def test_pruning_changes_no_bound(rows: list[tuple[int, int, int, int]], instants: list[int]) -> None:
    kept = [(a, b, u, at, "p2p", "proxy", n) for n, (a, b, u, at) in enumerate(rows) if a != b]
    _, empty = gather([], schema.MESSAGES.empty(), schema.CONTROLS.empty(), schema.COLLECTIVES.empty(), prior=NOTHING)
    facts: Facts = pl.DataFrame(kept, schema=empty.schema, orient="row")
    if facts.height > 3:
        facts = pl.concat([facts.head(3), facts.tail(-3)], rechunk=False)
    pruned = prune(facts)
    assert pruned.height <= facts.height

    def tightest(frame: Facts, at: int) -> list[tuple[int, int, int]]:
        away = (pl.col("at_ns") - at).abs()
        loose = pl.col("upper_ns") + (away * 60 + 999_999) // 1_000_000
        return frame.group_by("a", "b").agg(loose.min()).sort("a", "b").rows()

    for at in instants:
        assert tightest(pruned, at) == tightest(facts, at)


def test_pruning_keeps_few_of_many() -> None:
    rng = np.random.default_rng(1)
    n = 20_000
    frame = pl.DataFrame({
        "src": [0] * n, "dst": [1] * n, "kind": ["proxy"] * n, "ordinal": range(n), "send_row": range(n), "recv_row": range(n),
        "send_ts_ns": np.arange(n) * 50_000, "send_end_ns": np.arange(n) * 50_000 + 5_000, "recv_ts_ns": np.arange(n) * 50_000,
        "recv_end_ns": np.arange(n) * 50_000 + rng.integers(6_000, 900_000, n),
    })  # fmt: skip
    found = collect_bounds(
        [rank(0), rank(1)],
        schema.MESSAGES.frame(frame),
        schema.CONTROLS.empty(),
        schema.COLLECTIVES.empty(),
        prior=NOTHING,
    )
    assert found.filter(pl.col("source") == "p2p").height < 200

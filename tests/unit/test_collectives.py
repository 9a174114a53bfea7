"""Collectives over ranks: by counter, by order, shifted, refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from traceana import schema
from traceana.matching.collectives import match_collectives
from traceana.tables import ProcessGroup, RankInfo, RankTables

REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SENDRECV = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"


def rank(number: int, rows: list[dict[str, object]], **info: object) -> RankTables:
    whole = [{"kind": "kernel", "stream": 7, "name": REDUCE, **row} for row in rows]
    device = schema.DEVICE.frame(whole) if rows else schema.DEVICE.empty()
    return RankTables(RankInfo(number, Path(f"rank{number}"), **info), device=device)  # type: ignore[arg-type]


def run(
    ends: np.ndarray, ranks: int = 2, *, name: str = REDUCE, offset: int = 10**9, seed: int = 3
) -> list[list[dict[str, object]]]:
    """One list of kernels per rank that end together at `ends`, on clocks `offset` apart, entered at random."""
    rng = np.random.default_rng(seed)
    return [
        [
            {"ts_ns": int(end - wait + r * offset), "end_ns": int(end + r * offset + skew), "name": name}
            for end, wait, skew in zip(
                ends, rng.integers(8_000, 90_000, ends.size), rng.integers(0, 900, ends.size), strict=True
            )
        ]
        for r in range(ranks)
    ]


def ends(count: int, seed: int = 1) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).integers(100_000, 900_000, count))


def table(matched: pl.DataFrame) -> list[tuple[str, int, int, int]]:
    """group, instance, rank, row."""
    return matched.select("group", "instance", "rank", "row").rows()


def test_graph_kernels_are_matched_by_name_and_order() -> None:
    rows = run(ends(5), 3)
    matched, losses = match_collectives([rank(r, rows[r]) for r in range(3)])
    assert table(matched) == [("ranks 0,1,2", k, r, k) for k in range(5) for r in range(3)]
    assert set(matched.get_column("collective")) == {"allreduce"}
    assert losses.height == 0


def test_old_all_to_all_kernels_are_collectives_and_named_messages_are_not() -> None:
    rows = run(ends(4), name=SENDRECV)
    for r in range(2):
        rows[r].append(
            {
                "ts_ns": 10**12,
                "end_ns": 10**12 + 5,
                "collective": "send",
                "dst_rank": 1 - r,
                "group": "7",
                "name": SENDRECV,
            }
        )
        rows[r].append(
            {
                "ts_ns": 10**12,
                "end_ns": 10**12 + 5,
                "collective": "recv",
                "src_rank": 1 - r,
                "group": "7",
                "name": SENDRECV,
            }
        )
    matched, losses = match_collectives([rank(r, rows[r]) for r in range(2)])
    assert set(matched.get_column("collective")) == {"all_to_all"}
    assert table(matched) == [("ranks 0,1", k, r, k) for k in range(4) for r in range(2)]
    assert losses.height == 0


def test_a_trace_that_begins_later_is_aligned_by_the_gaps_between_ends() -> None:
    rows = run(ends(40), 3)
    matched, losses = match_collectives([rank(0, rows[0]), rank(1, rows[1][3:]), rank(2, rows[2][1:-2])])
    first = [t for t in table(matched) if t[1] == 0]
    assert [t[2:] for t in first] == [(0, 3), (1, 0), (2, 2)]
    assert matched.get_column("instance").n_unique() == 35
    assert losses.select("name", "severity", "count").rows() == [
        ("collective_unmatched_edge", "info", 40 + 37 + 37 - 3 * 35)
    ]


def test_equal_counts_of_different_windows_are_aligned_too() -> None:
    rows = run(ends(40))
    matched, _ = match_collectives([rank(0, rows[0][:-2]), rank(1, rows[1][2:])])
    assert [t[2:] for t in table(matched)][:2] == [(0, 2), (1, 0)]


def test_what_cannot_be_told_apart_is_refused() -> None:
    regular = np.arange(1, 30) * 500_000
    rows = run(regular)
    matched, losses = match_collectives([rank(0, rows[0]), rank(1, rows[1][:-2])])
    assert matched.height == 0
    assert losses.select("name", "severity", "rank", "count").rows() == [
        ("collective_alignment_unknown", "warning", 1, 56)
    ]
    assert "several alignments fit" in losses.get_column("detail")[0]


def test_one_step_from_the_next_is_told_by_the_clock_of_a_host() -> None:
    """nsys begins on all ranks at once, mid-step: one rank's graph was launched before and is not recorded."""
    step = np.cumsum(np.tile([100_000, 140_000, 160_000], 43))  # longer than what is searched without a clock
    regular = np.concatenate([step + k * 20_000_000 for k in range(5)])
    rows = run(regular, offset=300)
    cut = rows[1][step.size :]
    matched, losses = match_collectives([rank(0, rows[0], host="a"), rank(1, cut, host="a")], slack_ns=5_000)
    assert [t[2:] for t in table(matched)][:2] == [(0, step.size), (1, 0)]
    assert losses.select("name", "count").rows() == [("collective_unmatched_edge", step.size)]
    apart = [rank(0, rows[0], host="a"), rank(1, cut, host="b")]
    for ranks, slack in ((apart, 5_000), ([rank(0, rows[0], host="a"), rank(1, cut, host="a")], None)):
        matched, losses = match_collectives(ranks, slack_ns=slack)
        assert matched.height == 0
        assert losses.get_column("name").to_list() == ["collective_alignment_unknown"]


def test_pipeline_messages_without_arguments_do_not_pass_for_collectives() -> None:
    # Eager sends of 5 us, each received whenever the receiver gets to it.
    rng = np.random.default_rng(5)
    sent = np.cumsum(rng.integers(200_000, 400_000, 60))
    took = sent + rng.integers(0, 5_000_000, 60)
    send: list[dict[str, object]] = [{"ts_ns": int(t), "end_ns": int(t) + 5_000, "name": SENDRECV} for t in sent]
    recv: list[dict[str, object]] = [
        {"ts_ns": int(t), "end_ns": int(t) + 5_000, "name": SENDRECV} for t in np.sort(took)
    ]
    matched, losses = match_collectives([rank(0, send), rank(1, recv)])
    assert matched.height == 0
    assert losses.get_column("name").to_list() == ["collective_refused"]


def test_counters_match_whatever_the_order() -> None:
    def kernel(at: int, seq: int, collective: str = "allreduce") -> dict[str, object]:
        return {
            "ts_ns": at, "end_ns": at + 9_000, "seq": seq, "group": "tp", "collective": collective,
            "in_elements": 8, "dtype": "BFloat16",
        }  # fmt: skip

    one = [kernel(0, 11), kernel(20_000, 12), kernel(40_000, 13)]
    two = [kernel(5_000_000, 12), kernel(5_020_000, 13), kernel(5_040_000, 14)]
    matched, losses = match_collectives([rank(0, one), rank(1, two)])
    assert table(matched) == [("tp", 0, 0, 1), ("tp", 0, 1, 0), ("tp", 1, 0, 2), ("tp", 1, 1, 1)]
    assert set(matched.get_column("bytes")) == {16}
    assert losses.select("name", "count").rows() == [("collective_unmatched_edge", 2)]


def test_kernels_without_arguments_go_to_the_group_of_their_stage() -> None:
    def groups(*sets: tuple[int, ...]) -> tuple[ProcessGroup, ...]:
        return tuple(ProcessGroup(str(n), "", "cuda:nccl", s) for n, s in enumerate(sets))

    rows = run(ends(6), 4)
    world, low, high = (0, 1, 2, 3), (0, 1), (2, 3)
    infos = {0: (0, (world, low)), 1: (0, (world, low)), 2: (1, (world, high)), 3: (1, (world, high))}
    staged = [rank(r, rows[r], pp_rank=pp, groups=groups(*sets)) for r, (pp, sets) in infos.items()]
    matched, losses = match_collectives(staged)
    assert set(matched.get_column("group")) == {"ranks 0,1", "ranks 2,3"}
    assert losses.height == 0
    # Without stages two groups are possible, and none is chosen.
    loose = [rank(r, rows[r], groups=groups(*sets)) for r, (_, sets) in infos.items()]
    matched, losses = match_collectives(loose)
    assert matched.height == 0
    assert losses.select("name", "severity", "rank", "count").rows() == [
        ("collective_group_unknown", "info", r, 6) for r in range(4)
    ]


def test_a_group_of_one_captured_rank_gives_nothing() -> None:
    rows = run(ends(3))
    for row in rows[0]:
        row |= {"group": "tp", "collective": "allreduce"}
    matched, losses = match_collectives([rank(0, rows[0]), rank(1, [])])
    assert matched.height == 0
    assert losses.height == 0
    assert match_collectives([])[0].height == 0


def test_custom_all_reduce_kernels_count() -> None:
    rows = run(ends(3), name="void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>(...)")
    matched, _ = match_collectives([rank(r, rows[r]) for r in range(2)])
    assert matched.height == 6

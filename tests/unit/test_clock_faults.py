"""Wrong pairings, broken stamps and wrong beliefs: named, dropped, and the rest still aligns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from clock_worlds import ClockWorld

from traceana import schema
from traceana.clock.align import solve_clock
from traceana.clock.model import ClockModel
from traceana.clock.prior import Assume
from traceana.tables import RankInfo, RankTables

OFFSET = 3_000_000
PERIOD = 10_000_000


def pipeline(ranks: int = 2, steps: int = 30) -> ClockWorld:
    """Proxies and gloo down the pipe, tokens back, a step every 10 ms; rank r is r x 3 ms ahead."""
    world = ClockWorld([r * OFFSET for r in range(ranks)], [0] * ranks, steps * PERIOD, np.random.default_rng(1))
    for step in range(steps):
        at = step * PERIOD
        for r in range(ranks):
            kind = "output" if r == ranks - 1 else "proxy"
            world.send(r, (r + 1) % ranks, at + 500_000 * r, wait=4_000, late=-300_000, kind=kind)
            world.control(r, (r + 1) % ranks, at + 500_000 * r - 60_000, late=-50_000, lag=20_000)
            world.control((r + 1) % ranks, r, at + 500_000 * r + 90_000, late=-50_000, lag=20_000)
    return world


def missing_send(messages: pl.DataFrame, src: int, dst: int, lost: int) -> pl.DataFrame:
    """As if the trace of `src` lacked its send `lost` to `dst`: every later receive is paired with one send too far."""
    mine = (pl.col("src") == src) & (pl.col("dst") == dst)
    stream = messages.filter(mine).sort("ordinal")
    sends = ["send_ts_ns", "send_end_ns"]
    late = pl.col("ordinal") >= lost
    wrong = stream.with_columns(pl.when(late).then(pl.col(c).shift(-1)).otherwise(pl.col(c)).alias(c) for c in sends)
    return pl.concat([messages.filter(~mine), wrong.drop_nulls(sends)])


def truths(world: ClockWorld, model: ClockModel) -> None:
    for a, b, low, high in model.pairs.iter_rows():
        assert low <= world.offset(a, b, model.reference_rank, model.mid_ns) <= high


@pytest.mark.parametrize(("src", "dst", "kind"), [(0, 1, "proxy"), (1, 0, "output")])
@pytest.mark.parametrize("lost", [3, 12, 20])
def test_a_message_missing_on_one_side_is_named_and_the_rest_aligns(src: int, dst: int, kind: str, lost: int) -> None:
    world = pipeline()
    messages, controls, collectives = world.frames()
    planted = missing_send(messages, src, dst, lost)
    model = solve_clock(world.ranks, planted, controls, collectives, assume=Assume("none"))
    assert len(model.violations) == 1
    found = model.violations[0]
    wrong = list(range(lost, 29))
    assert found["dropped_count"] == len(wrong)
    assert found["dropped"] == [f"{kind} message {k} from rank {src} to rank {dst}" for k in wrong[:20]]
    assert int(str(found["sum_ns"])) < -8_000_000
    assert model.losses.filter(pl.col("name") == "clock_contradiction").select("severity", "count").row(0) == (
        "warning",
        len(wrong),
    )
    truths(world, model)
    clean = solve_clock(world.ranks, messages, controls, collectives, assume=Assume("none"))
    width = pl.col("high_ns") - pl.col("low_ns")
    # The nearest message that is left may be half a window away: 60 ppm of 150 ms.
    assert model.pairs.select(width).item() <= clean.pairs.select(width).item() + 9_000


def test_in_a_longer_pipe_too() -> None:
    world = pipeline(4)
    messages, controls, collectives = world.frames()
    model = solve_clock(world.ranks, missing_send(messages, 2, 3, 10), controls, collectives, assume=Assume("none"))
    assert {m for v in model.violations for m in v["dropped"]} <= {  # type: ignore[attr-defined]
        f"proxy message {k} from rank 2 to rank 3" for k in range(10, 30)
    }
    assert sum(int(str(v["dropped_count"])) for v in model.violations) == 19
    truths(world, model)


def test_a_single_broken_stamp_is_the_only_one_dropped() -> None:
    world = pipeline()
    messages, controls, collectives = world.frames()
    hit = (pl.col("src") == 1) & (pl.col("ordinal") == 17)
    broken = messages.with_columns(
        pl.when(hit).then(pl.col("recv_end_ns") - 700_000_000_000).otherwise(pl.col("recv_end_ns")).alias("recv_end_ns")
    )
    model = solve_clock(world.ranks, broken, controls, collectives, assume=Assume("none"))
    assert [v["dropped"] for v in model.violations] == [["output message 17 from rank 1 to rank 0"]]
    cycle = model.violations[0]["cycle"]
    assert isinstance(cycle, list)
    assert any(b["message"] == "output message 17 from rank 1 to rank 0" for b in cycle)
    truths(world, model)


def test_a_belief_gives_way_before_any_message() -> None:
    world = pipeline()
    model = solve_clock(world.ranks, *world.frames(), assume=Assume("same-host"))
    assert [v["source"] for v in model.violations] == ["same_host"]
    assert "contradicts the messages" in str(model.violations[0]["reason"])
    assert any("Same host: rank 1" in s or "'same host: rank 1'" in s for s in model.statements)
    truths(world, model)


def busy_rank(ahead: int, *, broken: int = 0, syncs: bool = True) -> RankTables:
    """A rank whose GPU stamps are `ahead` of its CPU's; the first `broken` kernels are stamped 28 hours too early."""
    device, calls = [], []
    for n in range(20):
        at = n * 1_000_000
        calls.append(
            {"ts_ns": at, "end_ns": at + 3_000, "name": "cudaLaunchKernel", "correlation": n, "pid": 1, "tid": 1}
        )
        start = at + 5_001 + ahead - (100_000_000_000_000 if n < broken else 0)
        device.append(
            {
                "ts_ns": start,
                "end_ns": start + 100_000,
                "name": "k",
                "correlation": n,
                "kind": "kernel",
                "stream": 7,
                "device": 0,
            }
        )
        if syncs:
            done = at + 105_007 + ahead
            calls.append(
                {
                    "ts_ns": at + 4_000,
                    "end_ns": at + 112_000,
                    "name": "cudaMemcpyAsync",
                    "correlation": 100 + n,
                    "pid": 1,
                    "tid": 1,
                }
            )
            device.append(
                {"ts_ns": done, "end_ns": done + 1_000, "name": "Memcpy DtoH (Device -> Pageable)", "correlation": 100 + n,
                 "kind": "memcpy", "stream": 7, "device": 0}
            )  # fmt: skip
    info = RankInfo(0, Path("rank0"))
    frame = schema.DEVICE.frame(device).sort("ts_ns")
    return RankTables(info, device=frame, calls=schema.CALLS.frame(calls).sort("ts_ns"))


NO_TRAFFIC = schema.MESSAGES.empty(), schema.CONTROLS.empty(), schema.COLLECTIVES.empty()


def test_cpu_and_gpu_of_a_trace_agree_unless_its_calls_refute_it() -> None:
    assert solve_clock([busy_rank(0)], *NO_TRAFFIC).cpu_gpu_ns == {0: 0}
    for ahead in (-50_000, 50_000):
        model = solve_clock([busy_rank(ahead)], *NO_TRAFFIC)
        assert [v["dropped"] for v in model.violations] == [["rank 0: one trace, one clock"]]
        # Launches leave 5 us, copies 6 us.
        assert -6_100 <= model.cpu_gpu_ns[0] + ahead <= 6_100


def test_broken_gpu_stamps_are_dropped_and_not_believed() -> None:
    for syncs in (True, False):
        model = solve_clock([busy_rank(0, broken=3, syncs=syncs)], *NO_TRAFFIC)
        assert [v["dropped_count"] for v in model.violations] == [3]
        assert all("launch of device row" in m for m in model.violations[0]["dropped"])  # type: ignore[attr-defined]
        assert model.cpu_gpu_ns == {0: 0}


@pytest.mark.parametrize("days", [1, 400, -20_000])
def test_clocks_that_are_set_wrong_by_days(days: int) -> None:
    world = pipeline()
    messages, controls, collectives = world.frames()
    day = days * 86_400_000_000_000
    moved = messages.with_columns(
        pl.when(pl.col("dst") == 1).then(pl.col(c) + day).otherwise(pl.col(c)).alias(c)
        for c in ("recv_ts_ns", "recv_end_ns")
    ).with_columns(
        pl.when(pl.col("src") == 1).then(pl.col(c) + day).otherwise(pl.col(c)).alias(c)
        for c in ("send_ts_ns", "send_end_ns")
    )
    model = solve_clock(world.ranks, moved, controls.clear(), collectives, assume=Assume("none"))
    low, high = model.pairs.select("low_ns", "high_ns").row(0)
    assert low <= OFFSET + day <= high


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_clock_that_jumps_between_the_instants_of_the_window_is_said(ranks: int) -> None:
    """A contradiction that shows only near its messages: further off, clocks may have drifted as far."""
    world = pipeline(ranks, 800)
    messages, controls, collectives = world.frames()
    inside = (pl.col("ordinal") % 800).is_between(190, 210)

    def jumped(frame: pl.DataFrame) -> pl.DataFrame:
        sides = (("src", "send_ts_ns", "send_end_ns"), ("dst", "recv_ts_ns", "recv_end_ns"))
        return frame.with_columns(
            (pl.col(c) + pl.when(inside & (pl.col(who) == 1)).then(150_000).otherwise(0)).alias(c)
            for who, *columns in sides
            for c in columns
        )

    model = solve_clock(world.ranks, jumped(messages), jumped(controls), collectives, assume=Assume("none"))
    assert model.violations
    lost = model.losses.filter(pl.col("name") == "clock_contradiction")
    assert lost.get_column("severity").to_list() == ["warning"]
    truths(world, model)

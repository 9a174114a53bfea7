"""The clock on random worlds: the truth is in the interval, and the interval is as narrow as the shortest paths make it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from clock_worlds import EPOCH_NS, ClockWorld, random_world
from hypothesis import given, settings
from hypothesis import strategies as st

from traceana import schema
from traceana.clock.align import solve_clock
from traceana.clock.apply import apply_clock, shift_controls, shift_messages
from traceana.clock.model import ClockModel, Correction
from traceana.clock.prior import Assume
from traceana.errors import ClockError

NONE = Assume("none")
FAR = 1 << 61


def solve(world: ClockWorld, assume: Assume | None = NONE) -> ClockModel:
    return solve_clock(world.ranks, *world.frames(), assume=assume)


def shortest_path_bounds(world: ClockWorld, model: ClockModel) -> np.ndarray:
    """high[a, b] of GPU clocks at the model's middle by brute force over all messages, from the true times."""
    n = len(world.offsets)
    high = np.full((2 * n, 2 * n), FAR, dtype=object)
    for r in range(n):
        # Without launches and syncs, the stamps of a trace are only held to each other by a millisecond.
        high[2 * r, 2 * r + 1] = high[2 * r + 1, 2 * r] = 1_000_000
    np.fill_diagonal(high, 0)

    def bound(a: int, b: int, cause: int, effect: int) -> None:
        true = cause - EPOCH_NS - world.offsets[a // 2]
        for _ in range(3):
            true -= world.local(a // 2, true) - cause
        away = abs(model.mid_ns - world.local(model.reference_rank, true))
        high[a, b] = min(high[a, b], effect - cause - (-away * 60 // 1_000_000))

    messages, controls, collectives = world.frames()
    for m in messages.iter_rows(named=True):
        a, b = 2 * m["src"] + 1, 2 * m["dst"] + 1
        bound(
            a, b, m["send_ts_ns"], min(m["recv_end_ns"], m["recv_end_ns"] - m["send_end_ns"] + 2_000 + m["send_ts_ns"])
        )
    for m in controls.iter_rows(named=True):
        bound(2 * m["src"], 2 * m["dst"], m["send_ts_ns"], m["recv_end_ns"])
        bound(2 * m["dst"], 2 * m["src"], m["recv_ts_ns"], m["send_end_ns"])
    for _, rows in collectives.group_by("group", "instance"):
        transfer = int((rows["end_ns"] - rows["ts_ns"]).min())  # type: ignore[arg-type]
        transfer -= min(1_000, transfer // 2)
        ends = dict(rows.select("rank", "end_ns").iter_rows())
        for a in ends:
            for b in ends:
                if a != b:
                    bound(2 * a + 1, 2 * b + 1, ends[a], ends[b] + transfer)
    for k in range(2 * n):
        high = np.minimum(high, high[:, k, None] + high[k][None, :])
    return high[1::2, 1::2]


# What a failing test prints, instead of the world itself.
specs: st.SearchStrategy[dict[str, int]] = st.builds(
    dict,
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(2, 16),
    span_ns=st.sampled_from([20_000_000, 400_000_000, 900_000_000, 3_000_000_000, 20_000_000_000]),
    ppm=st.sampled_from([0, 10, 30]),
    traffic=st.integers(1, 60),
)


@given(specs)
@settings(max_examples=40, deadline=None)
def test_truth_is_inside_and_the_width_is_that_of_the_shortest_paths(spec: dict[str, int]) -> None:
    world = random_world(**spec)
    model = solve(world)
    assert model.violations == ()
    want = shortest_path_bounds(world, model)
    # When a message was sent is known on the reference's clock only to the interval itself, and not at all (here: to
    # the 20 ms that a message takes at most, per hop) where nothing comes back. That moves its bound by its drift.
    n = len(world.offsets)
    widest = max((int(w + v) for w, v in zip(want.ravel(), want.T.ravel(), strict=True) if w + v < FAR), default=0)
    main = next(c for c in model.components if model.reference_rank in c)
    lines = world.span_ns >= 1_000_000_000
    for a, b, low, high in model.pairs.iter_rows():
        true = world.offset(a, b, model.reference_rank, model.mid_ns)
        # Nor closer than the millisecond that these traces, without launches and syncs, leave between CPU and GPU.
        room = 404 * n + (widest // 1_000 if a in main and b in main else 20_000_000 * n * 120 // 1_000_000)
        for bound, best in ((high, want[a, b]), (None if low is None else -low, want[b, a])):
            assert (bound is None) == (best >= FAR // 2)
            if bound is not None:
                assert bound <= best + room
                assert lines or bound >= best - 2 * room
        assert low is None or low <= true
        assert high is None or true <= high


@given(specs)
@settings(max_examples=40, deadline=None)
def test_the_chosen_clocks_keep_every_bound(spec: dict[str, int]) -> None:
    world = random_world(**spec)
    model = solve(world)
    related = set(next(c for c in model.components if model.reference_rank in c))
    messages, controls, _ = world.frames()
    keep = pl.col("src").is_in(related) & pl.col("dst").is_in(related)
    moved = shift_messages(messages.filter(keep), model)
    latest = model.losses.filter(pl.col("name") == "clock_residual")
    broken = 0 if latest.height == 0 else int(latest.get_column("detail")[0].split(" by ")[1].split()[0])
    # When a message was sent is known to the interval only; a chosen rate (to 60 ppm) is off by as much of that.
    unsure = max((u for u in model.ranks.get_column("uncertainty_ns") if u is not None), default=0)
    slack = 2 + broken + unsure // 8_000
    assert moved.filter(pl.col("recv_end_ns") + slack < pl.col("send_ts_ns")).height == 0
    talk = shift_controls(controls.filter(keep), model)
    assert talk.filter(pl.col("recv_end_ns") + slack < pl.col("send_ts_ns")).height == 0
    assert talk.filter(pl.col("send_end_ns") + slack < pl.col("recv_ts_ns")).height == 0
    sends = messages.select("src", pl.col("send_ts_ns") - EPOCH_NS).iter_rows()
    sent = [shown - world.offsets[src] for src, shown in sends] or [0]
    for row in model.ranks.iter_rows(named=True):
        pair = model.pairs.filter((pl.col("a") == model.reference_rank) & (pl.col("b") == row["rank"]))
        if pair.height and row["uncertainty_ns"] is not None:
            low, high = pair.select("low_ns", "high_ns").row(0)
            assert low <= row["offset_ns"] <= high
            assert row["uncertainty_ns"] == max(high - row["offset_ns"], row["offset_ns"] - low)
            worst = model.worst_ns[row["rank"]]
            assert worst is not None and worst >= row["uncertainty_ns"]
            # The chosen clock is right to that from the first message to the last, looked at in eight pieces.
            for k in range(9):
                true = min(sent) + (max(sent) - min(sent)) * k // 8
                shown = np.array([world.local(row["rank"], true)])
                error = int((shown - model.gpu[row["rank"]].offset(shown)).item()) - world.local(
                    model.reference_rank, true
                )
                assert abs(error) <= worst + world.span_ns // 8 * 60 // 1_000_000 + slack


def two_ranks(
    offset: int, *, rate_ppb: int = 0, span_ns: int = 400_000_000, waits: tuple[int, int] = (0, 0)
) -> ClockWorld:
    """Rank 1 is `offset` ahead; both send every tenth of the span, and `waits` is what the best message takes longer."""
    world = ClockWorld([0, offset], [0, rate_ppb], span_ns, np.random.default_rng(1))
    for k in range(11):
        at = span_ns * k // 10
        world.send(0, 1, at, wait=waits[0] + 1_000_000 * (k % 3), late=-2_000_000)
        world.send(1, 0, at + 50_000, wait=waits[1] + 1_000_000 * ((k + 1) % 3), late=-2_000_000, kind="output")
    return world


def test_midpoint_and_half_width_by_hand() -> None:
    # A good message leaves 1,000 (6,000 for it, 5,000 for its send) + 2,000 for the send's tail, plus what it waits.
    world = two_ranks(-5_000_000, waits=(10_000, 0))
    model = solve(world)
    # Window: from the first send at 0 to the last at 400.05 ms, which the reference's clock knows to a few us.
    mid = model.mid_ns - EPOCH_NS
    assert abs(mid - 200_025_000) < 10_000
    low, high = model.pairs.select("low_ns", "high_ns").row(0)
    # Every third message of a direction is good: 0, 3, 6, 9 of 0 -> 1 (the 6th, at 240 ms, is nearest to the middle)
    # and 2, 5, 8 of 1 -> 0 (the 5th, at 200.05 ms).
    assert high + 5_000_000 == 13_000 - (-(240_000_000 - mid) * 60 // 1_000_000)
    assert -3_000 - 6 <= low + 5_000_000 <= -3_000
    offset, uncertainty = model.ranks.select("offset_ns", "uncertainty_ns").row(1)
    assert offset == (low + high) // 2
    assert uncertainty == -(-(high - low) // 2)
    assert model.binding.get_column("message").to_list() == [
        "proxy message 6 from rank 0 to rank 1",
        "output message 5 from rank 1 to rank 0",
    ]
    assert model.identifiable
    assert "p2p" in model.ranks.get_column("method")[1]


@pytest.mark.parametrize("offset", [-(10**9), -5_000_000, -80_000, 3_000, 5_000_000])
@pytest.mark.parametrize("rate_ppb", [0, 20_000, -20_000])
def test_shifts_and_stretches_are_recovered(offset: int, rate_ppb: int) -> None:
    model = solve(two_ranks(offset, rate_ppb=rate_ppb))
    low, high = model.pairs.select("low_ns", "high_ns").row(0)
    assert low <= offset <= high
    assert high - low <= 12_000
    assert model.ranks.get_column("uncertainty_ns")[1] <= 10_000


def test_a_line_is_found_over_seconds() -> None:
    world = two_ranks(7_000_000, rate_ppb=20_000, span_ns=5_000_000_000)
    model = solve(world)
    drift = model.ranks.get_column("drift_ppm")[1]
    assert 16 < drift < 24
    assert model.losses.height == 0
    low, high = model.pairs.select("low_ns", "high_ns").row(0)
    assert low <= world.offset(0, 1, 0, model.mid_ns) <= high
    # Limited rates alone would leave 60 ppm of the 0.25 s to the nearest good message on either side.
    assert high - low < 15_000
    assert any("drift against the reference" in s for s in model.statements)


def test_a_bent_clock_gets_knots() -> None:
    # +25 ppm in the first half, -25 ppm in the second: over 8 s a line would be off by 50 us.
    span = 8_000_000_000
    world = ClockWorld([0, 0], [0, 0], span, np.random.default_rng(1))

    def bent(rank: int, true: int) -> int:
        away = -abs(true - span // 2) * 25_000 // 1_000_000_000
        return EPOCH_NS + true + (away if rank == 1 else 0)

    world.local = bent  # type: ignore[method-assign]
    for k in range(200):
        world.send(0, 1, span * k // 200, wait=0, late=-1_000_000)
        world.send(1, 0, span * k // 200 + 1_000_000, wait=0, late=-1_000_000, kind="output")
    model = solve(world)
    assert model.violations == ()
    assert "bent line" in model.ranks.get_column("method")[1]
    assert any("bent at" in s for s in model.statements)
    knots = model.gpu[1]
    assert len(knots.local_ns) > 2
    shown = np.array([bent(1, t) for t in range(0, span, span // 50)], dtype=np.int64)
    error = shown - knots.offset(shown) - np.array([bent(0, t) for t in range(0, span, span // 50)])
    assert int(np.abs(error).max()) <= 12_000


def test_many_ranks_get_the_same_intervals_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    world = random_world(11, 70, 400_000_000, traffic=12)
    many = solve(world)
    monkeypatch.setattr("traceana.clock.align.ALL_PAIRS_RANKS", 100)
    all_pairs = solve(world).pairs
    assert all_pairs.height == 70 * 69 // 2
    assert many.pairs.height < 500
    assert many.pairs.join(all_pairs, on=["a", "b", "low_ns", "high_ns"], how="anti", nulls_equal=True).height == 0
    reference = many.pairs.filter((pl.col("a") == many.reference_rank) | (pl.col("b") == many.reference_rank))
    assert reference.height == 69
    for a, b, low, high in many.pairs.drop_nulls().iter_rows():
        assert low <= world.offset(a, b, many.reference_rank, many.mid_ns) <= high


def test_one_way_traffic_is_one_sided() -> None:
    world = ClockWorld([0, 1_000], [0, 0], 1_000_000, np.random.default_rng(1))
    world.send(0, 1, 500_000, wait=0, late=0)
    model = solve(world)
    assert model.pairs.row(0) == (0, 1, None, 4_000)
    assert not model.identifiable
    rank = model.ranks.row(1, named=True)
    assert rank["uncertainty_ns"] is None
    assert rank["method"].startswith("one-sided: at most 4000 ns ahead of the reference (p2p)")
    assert "clock_unrelated" in model.losses.get_column("name").to_list()
    assert model.worst_ns[1] is None


def test_unrelated_ranks_are_said_to_be() -> None:
    world = ClockWorld([0, 500, 900, 1_700], [0] * 4, 1_000_000, np.random.default_rng(1))
    for a, b in ((2, 3), (3, 2)):
        world.send(a, b, 500_000, wait=0, late=0)
    model = solve(world)
    # Ranks 2 and 3 are the largest related group, so their clock is the reference.
    assert model.reference_rank == 2
    assert set(model.components) == {(0,), (1,), (2, 3)}
    assert model.pairs.filter(pl.col("a") == 0).select("low_ns", "high_ns").null_count().row(0) == (3, 3)
    assert model.ranks.get_column("offset_ns").to_list()[:3] == [0, 0, 0]
    assert model.ranks.get_column("uncertainty_ns").to_list()[:2] == [None, None]
    assert model.ranks.get_column("method")[0].startswith("unrelated")


def test_a_ring_says_how_wide_it_leaves_the_clocks() -> None:
    world = ClockWorld([0, 10, 20], [0] * 3, 1_000_000, np.random.default_rng(1))
    for r in range(3):
        world.send(r, (r + 1) % 3, 500_000, wait=20_000, late=0)
    model = solve(world)
    # Each hop leaves 6,000 + 20,000 - 5,000 + 2,000.
    for low, high in model.pairs.select("low_ns", "high_ns").iter_rows():
        assert 69_000 <= high - low <= 69_010, "a few ns for the drift between sends at slightly different times"
    assert any("one way round a ring" in s and "69.0 us" in s for s in model.statements)


def test_same_host_keeps_zero_and_says_when_it_cannot() -> None:
    assume = Assume("same-host")
    model = solve(two_ranks(0, waits=(10_000, 10_000)), assume)
    assert model.ranks.select("offset_ns", "drift_ppm", "uncertainty_ns").row(1) == (0, 0.0, 5_000)
    assert model.pairs.row(0) == (0, 1, -5_000, 5_000)
    # 3 us fit the prior and the messages: the value nearest 0 is 0.
    near = solve(two_ranks(3_000), assume)
    low, high = near.pairs.select("low_ns", "high_ns").row(0)
    assert low <= 3_000 <= high <= 5_000
    assert near.ranks.get_column("offset_ns")[1] == max(low, 0)
    far = solve(two_ranks(5_000_000), assume)
    low, high = far.pairs.select("low_ns", "high_ns").row(0)
    assert low <= 5_000_000 <= high
    assert [v["dropped"] for v in far.violations] == [["same host: rank 1"]]
    cycle = far.violations[0]["cycle"]
    assert isinstance(cycle, list) and {b["source"] for b in cycle} == {"p2p", "same_host"}
    assert int(str(far.violations[0]["sum_ns"])) < 0


def test_same_host_drops_the_odd_rank_only() -> None:
    world = ClockWorld([0, 0, 40_000_000, 0], [0] * 4, 1_000_000, np.random.default_rng(1))
    for r in range(4):
        for other in ((r + 1) % 4, (r - 1) % 4):
            world.send(r, other, 500_000, wait=0, late=0)
    model = solve(world, Assume("same-host"))
    assert [v["dropped"] for v in model.violations] == [["same host: rank 2"]]
    assert model.ranks.get_column("offset_ns").to_list()[:2] == [0, 0]
    assert abs(model.ranks.get_column("offset_ns")[2] - 40_000_000) <= 3_000
    assert model.ranks.get_column("offset_ns")[3] == 0


def test_default_prior_follows_the_facts() -> None:
    world = two_ranks(0)
    tables = world.ranks

    def prior(**info: object) -> str:
        told = [replace(t, info=replace(t.info, **info)) for t in tables]  # type: ignore[arg-type]
        return solve_clock(told, *world.frames()).prior.kind

    assert prior() == "none"
    assert prior(host="a") == "same-host"
    gpus = [replace(t, info=replace(t.info, device=t.info.rank)) for t in tables]
    assert solve_clock(gpus, *world.frames()).prior.kind == "same-host"
    assert solve_clock(gpus, *world.frames(), facts={"nnodes": 2}).prior.kind == "none"
    assert solve_clock(tables, *world.frames(), facts={"nnodes": 1}).prior.kind == "same-host"
    manifest = {"ranks": [{"rank": 0, "host": "a"}, {"rank": 1, "host": "b"}]}
    two = solve_clock(tables, *world.frames(), manifest=manifest)
    assert (two.prior.kind, dict(two.prior.host_of)) == ("same-host", {0: 0, 1: 1})
    assert two.pairs.select(pl.col("high_ns") - pl.col("low_ns")).item() < 12_000


def test_ntp_bounds_hosts_and_same_host_within() -> None:
    world = ClockWorld([0, 0, 0], [0] * 3, 1_000_000, np.random.default_rng(1))
    manifest = {"ranks": [{"rank": r, "host": "ab"[r // 2]} for r in range(3)]}
    model = solve_clock(world.ranks, *world.frames(), assume=Assume.parse("ntp:200"), manifest=manifest)
    spread = {(a, b): (low, high) for a, b, low, high in model.pairs.iter_rows()}
    assert spread == {(0, 1): (-5_000, 5_000), (0, 2): (-205_000, 205_000), (1, 2): (-205_000, 205_000)}


def test_probes_of_the_manifest_relate_hosts() -> None:
    # Host b's clock is 1,000,000 ahead; a trip takes 40 us out and 60 us back, before and after a silent capture.
    world = ClockWorld([0, 1_000_000], [0, 0], 60_000_000_000, np.random.default_rng(1))
    start, end = EPOCH_NS, EPOCH_NS + world.span_ns

    def trip(at: int) -> dict[str, int]:
        there = at + 1_000_000 + 40_000
        return {
            "sent_ns": at,
            "received_there_ns": there,
            "answered_there_ns": there + 9_000,
            "received_ns": at + 109_000,
        }

    manifest = {
        "ranks": [{"rank": 0, "host": "a"}, {"rank": 1, "host": "b"}],
        "clock": {"round_trips": [
            {"local": "a", "remote": "b", "trips": [trip(start), trip(end), {"sent_ns": 5}]},
            {"local": "a", "remote": "elsewhere", "trips": [trip(start)]},
        ]},
    }  # fmt: skip
    for assume in (None, NONE):
        model = solve_clock(world.ranks, *world.frames(), assume=assume, manifest=manifest)
        low, high = model.pairs.select("low_ns", "high_ns").row(0)
        assert low <= 1_000_000 <= high
        # The trips leave 100 us, the two ranks' own ties to their hosts 5 us each way, and lines carry both ends inside.
        assert 100_000 <= high - low <= 111_000
        assert set(model.losses.get_column("name")) == {"clock_probe_elsewhere", "clock_probe_broken"}


@pytest.mark.parametrize("text", ["ntp", "ntp:", "ntp:-3", "ntp:0", "ntp:1.5", "ntp:x", "host", "", "ntp:99999999999"])
def test_assume_refuses_nonsense(text: str) -> None:
    with pytest.raises(ClockError) as raised:
        Assume.parse(text)
    assert raised.value.where == "--assume"
    assert raised.value.hint


def test_assume_reads_what_is_documented() -> None:
    assert [Assume.parse(t) for t in (None, "same-host", "none", "ntp:500")] == [
        Assume("auto"), Assume("same-host"), Assume("none"), Assume("ntp", 500),
    ]  # fmt: skip


def test_no_rank_is_an_error() -> None:
    with pytest.raises(ClockError):
        solve_clock([], schema.MESSAGES.empty(), schema.CONTROLS.empty(), schema.COLLECTIVES.empty())


def test_one_rank_is_its_own_reference() -> None:
    model = solve(ClockWorld([5], [0], 1_000, np.random.default_rng(1)))
    assert model.ranks.rows() == [(0, 0, 0.0, 0, "reference")]
    assert model.pairs.height == 0
    assert model.identifiable


@given(
    st.lists(st.tuples(st.integers(1, 10**10), st.integers(-300_000, 300_000)), min_size=1, max_size=5),
    st.lists(st.integers(-(10**11), 10**11), min_size=2, max_size=30),
)
@settings(max_examples=150, deadline=None)
def test_corrections_keep_the_order(steps: list[tuple[int, int]], readings: list[int]) -> None:
    at = np.cumsum([s for s, _ in steps]).tolist()
    rises = [max(min(o, s // 2), -(s // 2)) for s, o in steps]
    correction = Correction(tuple(at), tuple(np.cumsum(rises).tolist()))
    local = np.array(sorted(readings), dtype=np.int64)
    moved = local - correction.offset(local)
    assert (np.diff(moved) >= 0).all()


def test_apply_clock_moves_every_table_and_keeps_durations() -> None:
    world = two_ranks(-5_000_000)
    model = solve(world)
    rank = world.ranks[1]
    start = world.local(1, 100_000_000)
    device = schema.DEVICE.frame(
        {"ts_ns": [start], "end_ns": [start + 5_000], "kind": ["kernel"], "name": ["k"], "stream": [7]}
    )
    calls = schema.CALLS.frame(
        {"ts_ns": [start - 9], "end_ns": [start - 2], "name": ["cudaLaunchKernel"], "pid": [1], "tid": [1]}
    )
    moved = apply_clock(replace(rank, device=device, calls=calls), model)
    offset = model.ranks.get_column("offset_ns")[1]
    assert moved.device.select("ts_ns", "end_ns").row(0) == (start - offset, start - offset + 5_000)
    assert moved.calls.select("ts_ns", "end_ns").row(0) == (start - 9 - offset, start - 2 - offset)
    assert moved.annotations.height == 0

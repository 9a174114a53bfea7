"""Host speeds, planted sleeps, growth with the batch, changes to pieces, and merging, on pieces made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceana.errors import TraceanaError
from traceana.simulate.calibrate import calibrate
from traceana.simulate.changes import parse_words
from traceana.simulate.growth import (
    CONSTANT,
    GROWING,
    MIDDLE,
    PPM,
    Experts,
    experts_of,
    host_ppm,
    scaled_to_batch,
    touched_ppm,
)
from traceana.simulate.hosts import HostSpeed, as_profiled, claim, equal_speeds, graph_launch_ns, planted, unprofiled
from traceana.simulate.kernels import BODY, EARLY, HEAD, LATE, Kernels, Starts
from traceana.simulate.loop import Hops, Loop, Step, simulate
from traceana.simulate.merge import merged_ratio, ring_ns
from traceana.simulate.parts import COLUMNS, Parts, StageParts, _rate
from traceana.simulate.play import Ends, eager_ns, play, play_as_profiled
from traceana.simulate.scenario import apply, unchanged

MS, US = 1_000_000, 1_000
ROWS = 6
EXPERTS = Experts(64, 8)


def kernels(batch: list[int], moe: int = 4 * MS, gemm: int = 1 * MS, gap: int = 0, layers: int = 10) -> Kernels:
    """Forwards with `layers` MoE and gemm kernels and one kernel for sampling of 100 us."""
    rows = [
        (row, name, BODY, kind, ns, count)
        for row in range(len(batch))
        for name, kind, ns, count in (
            ("fused_moe", "moe", moe, layers), ("gemm", "gemm", gemm, layers), ("norm", "norm", 0, layers),
            ("sample", "sampling", 100 * US, 1),
        )
    ]  # fmt: skip
    table = pl.DataFrame(rows, schema=["row", "name", "place", "class", "ns", "count"], orient="row")
    busy = np.full(len(batch), moe + gemm + 100 * US)
    count = np.full(len(batch), 3 * layers + 1)
    zero = np.zeros(len(batch), dtype=np.int64)
    return Kernels(busy + gap, busy, count - 1, count, zero, zero + 1, table, layers)


def stage(rank: int, batch: list[int], of: Kernels | None = None, **pieces: int) -> StageParts:
    host = np.zeros((len(batch), len(COLUMNS)), dtype=np.int64)
    for column, name in enumerate(COLUMNS):
        host[:, column] = pieces.get(name, 100 * US)
    return StageParts(rank, host, np.ones(len(batch), dtype=np.bool_), of or kernels(batch))


def parts(first: StageParts, last: StageParts, batch: list[int], throughput: int | None = None) -> Parts:
    size = np.array(batch)
    hop = Hops(
        requests=50 * US, proxy=100 * US, output=100 * US, send_proxy=5 * US, recv_proxy=5 * US, recv_output=5 * US
    )
    slots = (batch[0], batch[-1])
    return Parts(
        (first, last), np.arange(size.size), size, size.copy(), (hop, hop), 0, True, slots, 10 * MS, throughput, throughput, "log", True,
    )  # fmt: skip


def plain(batch: list[int] | None = None, **more: int) -> Parts:
    sizes = batch or [8] * ROWS
    return parts(stage(0, sizes, None, **more), stage(1, sizes, None, **more), sizes)


def test_a_step_begins_with_the_measured_columns() -> None:
    assert Step._fields[: len(COLUMNS)] == COLUMNS


@pytest.mark.parametrize(
    ("nodes", "ns"), [(0, 4_000), (30, 13_400), (300, 113_400), (650, 173_850), (1_000, 234_300), (1_700, 355_200)]
)
def test_a_graph_launch_costs_what_was_measured_and_lines_between(nodes: int, ns: int) -> None:
    assert graph_launch_ns(nodes) == ns


@given(st.integers(0, 5_000))
def test_a_larger_graph_never_costs_less(nodes: int) -> None:
    assert graph_launch_ns(nodes) <= graph_launch_ns(nodes + 1)


def test_a_sleep_stands_out_against_the_same_code_elsewhere() -> None:
    sizes = [8] * ROWS
    slept = stage(0, sizes, schedule=3_100 * US)
    found = planted(parts(slept, stage(1, sizes), sizes))
    assert {COLUMNS[c]: int(found[0][c]) for c in np.flatnonzero(found[0])} == {"schedule": 3 * MS}
    assert not found[1].any()


def test_a_sleep_in_code_of_one_stage_stands_out_against_its_twin() -> None:
    sizes = [8] * ROWS
    first = stage(0, sizes, post_proxy=2_100 * US)
    last = stage(1, sizes, post_proxy=0, send_proxy=0)
    found = planted(parts(first, last, sizes))
    assert {COLUMNS[c]: int(found[0][c]) for c in np.flatnonzero(found[0])} == {"post_proxy": 2 * MS}


def test_slow_work_is_no_sleep() -> None:
    """Twice as long is dilation; long in some visits only is no sleep of a fixed length; graph launches are dilated."""
    sizes = [8] * ROWS
    slow = stage(0, sizes, schedule=200 * US, launch=4 * MS)
    slow.host[::2, COLUMNS.index("process")] = 9 * MS
    assert not any(p.any() for p in planted(parts(slow, stage(1, sizes), sizes)))


def test_what_the_user_takes_off_is_real_time_even_unrecognised() -> None:
    pieces = plain(prepare=2 * MS)
    none = planted(pieces)
    assert not any(p.any() for p in none)
    held = claim(pieces, none, {1: 1_500 * US})
    assert (int(held[0].sum()), int(held[1].sum())) == (0, 1_500 * US)
    assert COLUMNS[int(held[1].argmax())] == "prepare"
    assert int(claim(pieces, held, {1: MS})[1].sum()) == 1_500 * US


def test_hosts_of_one_speed_share_the_same_code_not_what_differs() -> None:
    sizes = [8] * ROWS
    quick, slow = stage(0, sizes), stage(1, sizes)
    for name in (
        "prepare",
        "process",
        "before_sync",
        "send_output",
        "post_output",
        "commit_output",
        "await_result",
        "receive_result",
    ):
        slow.host[:, COLUMNS.index(name)] = 150 * US
    slow.host[:, COLUMNS.index("ingest")] = 9 * MS  # not the same code on all stages
    pieces = parts(quick, slow, sizes)
    assert equal_speeds(pieces, planted(pieces)) == [1_250_000, 833_333]
    slow.host[:, COLUMNS.index("prepare")] = 9 * MS
    assert equal_speeds(pieces, [np.zeros(len(COLUMNS), dtype=np.int64)] * 2) == [PPM, PPM]


def test_host_time_is_scaled_but_for_sleeps_and_graph_launches() -> None:
    sizes = [8] * ROWS
    pieces = parts(stage(0, sizes, schedule=3_100 * US, launch=900 * US), stage(1, sizes), sizes)
    speed = HostSpeed(PPM // 2, (PPM, PPM), tuple(planted(pieces)))
    host = unprofiled(pieces, 0, speed, pieces.stages[0].kernels.nodes)
    columns = dict(zip(COLUMNS, host[0].tolist(), strict=True))
    assert columns["schedule"] == 3 * MS + 50 * US
    assert columns["process"] == 50 * US
    assert columns["launch"] == graph_launch_ns(30)
    untouched = unprofiled(pieces, 0, as_profiled(pieces), pieces.stages[0].kernels.nodes)
    assert (untouched == pieces.stages[0].host).all()


@pytest.mark.parametrize(("batch", "share"), [(1, 0.125), (8, 0.6564), (16, 0.8819), (64, 0.9998)])
def test_experts_touched_by_a_batch(batch: int, share: float) -> None:
    assert touched_ppm(EXPERTS, batch) / PPM == pytest.approx(share, abs=1e-4)


def test_experts_come_from_the_facts_or_are_said_to_be_assumed() -> None:
    assert experts_of({"model": {"experts": 64, "top_k": 4}}) == Experts(64, 4)
    assert experts_of({"model": {"experts": 4}}) == Experts(4, 4, ("4 experts a token",))
    assert len(experts_of({}).assumed) == 2


def test_a_batch_never_seen_lies_between_no_growth_and_the_experts_touched() -> None:
    pieces = plain()
    of = pieces.stages[0].kernels
    near, same = scaled_to_batch(of, of.gpu, pieces.rows_of, 8, GROWING, EXPERTS)
    assert (near, same.tolist()) == (8, of.gpu.tolist())
    times = {
        end: scaled_to_batch(of, of.gpu, pieces.rows_of, 16, end, EXPERTS)[1] for end in (CONSTANT, MIDDLE, GROWING)
    }

    def growth(experts: Experts) -> int:
        return 4 * MS * (touched_ppm(experts, 16) * PPM // touched_ppm(experts, 8) - PPM) // PPM

    assert times[CONSTANT].tolist() == of.gpu.tolist()
    assert times[GROWING].tolist() == (of.gpu + growth(EXPERTS)).tolist()
    # In the middle 36 experts, and each token's own work beside the weights.
    middle = touched_ppm(Experts(36, 8), 16) * 316 * PPM // (touched_ppm(Experts(36, 8), 8) * 308) - PPM
    assert times[MIDDLE].tolist() == (of.gpu + 4 * MS * middle // PPM).tolist()


def test_moe_kernels_that_read_no_experts_grow_with_the_tokens() -> None:
    sizes = [8] * ROWS
    of = kernels(sizes)
    routing = pl.DataFrame(
        [(r, "route", BODY, "moe", 300 * US, 20) for r in range(ROWS)], schema=of.table.schema, orient="row"
    )
    with_routing = replace(of, gpu=of.gpu + 300 * US, table=pl.concat([of.table, routing]))
    rows = {8: np.arange(ROWS)}
    plainly = scaled_to_batch(of, of.gpu, rows, 16, MIDDLE, EXPERTS)[1]
    routed = scaled_to_batch(with_routing, with_routing.gpu, rows, 16, MIDDLE, EXPERTS)[1]
    assert (routed - plainly).tolist() == [300 * US + 300 * US * (64 * PPM // 56 - PPM) // PPM] * ROWS


def test_hosts_work_for_each_request_where_they_prepare_and_process() -> None:
    pieces = plain(prepare=1_000 * US, process=1_000 * US)
    speed = as_profiled(pieces)

    def host(pattern: tuple[int, int], words: tuple[str, ...] = ()) -> int:
        scenario = apply(pieces, parse_words(words))
        return play(pieces, scenario, speed, pattern, EXPERTS, Ends(CONSTANT)).ns

    one = 1_000 * US
    prepared = one * (host_ppm("prepare", 16, 8) - PPM) // PPM
    processed = one * (host_ppm("process", 16, 8) - PPM) // PPM
    assert prepared == one * 8 // 258 and processed == one * 8 * PPM // 43 // PPM
    assert 0 < host((16, 16)) - host((8, 8)) <= 4 * (prepared + processed)
    # The visit of a slot processes the result of the next one: slots of 16 and 8 have half of both.
    assert host((8, 8)) < host((16, 8)) < host((16, 16))
    # What is not the scheduler's work does not grow.
    slept = plain(process=4_000 * US)
    known = replace(speed, known=tuple(np.full(len(COLUMNS), 4_000 * US) for _ in range(2)))
    times = [play(slept, unchanged(slept), known, p, EXPERTS, Ends(CONSTANT)).ns for p in ((8, 8), (16, 16))]
    assert times[0] == times[1]


def test_between_measured_batches_the_curve_of_the_experts_goes_through_both() -> None:
    batch = [1, 31] * 3
    of = kernels(batch)
    gpu = np.array([3 * MS, 7 * MS] * 3)
    rows = {1: np.array([0, 2, 4]), 31: np.array([1, 3, 5])}
    for end in (CONSTANT, GROWING):
        _, middle = scaled_to_batch(of, gpu, rows, 16, end, EXPERTS)
        way = (touched_ppm(EXPERTS, 16) - touched_ppm(EXPERTS, 1)) / (
            touched_ppm(EXPERTS, 31) - touched_ppm(EXPERTS, 1)
        )
        assert middle[0] == pytest.approx(3 * MS + 4 * MS * way, abs=10)


@given(st.integers(1, 63), st.integers(1, 63))
def test_growth_grows_with_the_batch(a: int, b: int) -> None:
    pieces = plain()
    of = pieces.stages[0].kernels
    low, high = sorted((a, b))
    times = [int(scaled_to_batch(of, of.gpu, pieces.rows_of, n, GROWING, EXPERTS)[1][0]) for n in (low, high)]
    assert times[0] <= times[1]


def test_without_moe_attention_grows() -> None:
    of = kernels([8] * ROWS)
    of = replace(of, table=of.table.with_columns(pl.col("class").replace("moe", "attention")))
    _, twice = scaled_to_batch(of, of.gpu, {8: np.arange(ROWS)}, 16, GROWING, EXPERTS)
    assert twice[0] == of.gpu[0] + 4 * MS


def total(pieces: Parts, words: tuple[str, ...], pattern: tuple[int, ...] | None = None) -> int:
    """A round under changes, hosts as measured."""
    scenario = apply(pieces, parse_words(words))
    return play(pieces, scenario, as_profiled(pieces), pattern or scenario.patterns[0][1], EXPERTS, Ends()).ns


def test_kernels_classes_and_gaps_leave_the_forward() -> None:
    pieces = replace(plain(), stages=tuple(stage(r, [8] * ROWS, kernels([8] * ROWS, gap=500 * US)) for r in (0, 1)))
    gpu = {words: apply(pieces, parse_words([words])).gpu[0][0] for words in
           ("remove fused", "scale class:moe=0.5", "remove cause:launch_latency", "remove ^sample$")}  # fmt: skip
    whole = 5_600 * US
    assert gpu["remove fused"] == whole - 4 * MS
    assert gpu["scale class:moe=0.5"] == whole - 2 * MS
    assert gpu["remove cause:launch_latency"] == whole - 500 * US
    assert gpu["remove ^sample$"] == whole - 100 * US
    with pytest.raises(TraceanaError) as refused:
        apply(pieces, parse_words(["remove no_such_kernel"]))
    assert refused.value.hint


@pytest.mark.parametrize("place", [EARLY, HEAD, LATE])
def test_a_kernel_outside_the_graph_can_be_removed(place: str) -> None:
    sizes = [8] * ROWS
    of = kernels(sizes)
    spin = pl.DataFrame(
        [(r, "spin", place, "other", 2 * MS, 1) for r in range(ROWS)], schema=of.table.schema, orient="row"
    )
    spinning = stage(0, sizes, replace(of, table=pl.concat([of.table, spin])))
    pieces = parts(spinning, stage(1, sizes), sizes)
    assert total(pieces, ()) > total(plain(), ())
    assert total(pieces, ("scale spin=0.5", "remove spin")) == total(pieces, ("remove spin",)) == total(plain(), ())


def test_a_kernel_ahead_of_the_graph_hides_behind_its_launching() -> None:
    """Launched halfway through 1 ms of preparation, 400 us are over when the graph is launched; 3 ms are not."""
    loop = [[Step(batch=1, gpu=MS, prepare=MS, head=head, head_at=PPM // 2)] for head in (400 * US, 3 * MS)]
    hops = (Hops(), Hops())
    ends = [simulate(Loop([steps, [Step(batch=1)]], hops), 2).ends[0][0] for steps in loop]
    assert ends == [2 * MS, 500 * US + 4 * MS]


def test_layers_move_and_the_rest_stays() -> None:
    pieces = plain()
    scenario = apply(pieces, parse_words(["pp_layer_partition=5,15"]))
    assert [int(g[0]) for g in scenario.gpu] == [2_600 * US, 7_600 * US]
    assert [int(n[0]) for n in scenario.nodes] == [15, 45]
    for wrong in ("pp_layer_partition=5,16", "pp_layer_partition=20", "pp_layer_partition=5,5,10"):
        with pytest.raises(TraceanaError) as refused:
            apply(pieces, parse_words([wrong]))
        assert refused.value.hint


def test_hosts_and_links_change_where_they_are_asked_to() -> None:
    pieces = plain()
    assert total(pieces, ("host 1=+1ms",)) - total(pieces, ()) == 2 * MS
    assert total(pieces, ("host 1@get_next_batch_to_run=+1ms",)) == total(pieces, ("host 1=+1ms",))
    # Behind its forward stage 0 sends later: nothing hides it.
    assert total(pieces, ("host 0@process_batch_result=+1ms",)) >= total(pieces, ("host 0=+1ms",))
    assert total(pieces, ("host 1=-50us",)) == total(pieces, ()) - 100 * US
    assert total(pieces, ("link 0-1=2",)) > total(pieces, ())
    assert total(pieces, ("remove cause:host_schedule",)) < total(pieces, ())
    assert total(pieces, ("remove cause:control_message",)) < total(pieces, ())
    for wrong in ("host 2=+1ms", "link 0-7=2", "link 1-1=2"):
        with pytest.raises(TraceanaError) as refused:
            apply(pieces, parse_words([wrong]))
        assert refused.value.hint


def _launching(pieces: Parts, ns: int) -> Parts:
    """With launches ahead of the graph that take the host `ns` each, on stage 0."""
    first = pieces.stages[0]
    of = replace(first.kernels, starts=Starts(eager_ns=ns))
    return replace(pieces, stages=(replace(first, kernels=of), *pieces.stages[1:]))


def test_without_graphs_the_host_launches_every_kernel_at_what_launching_costs_here() -> None:
    pieces = plain()
    scenario = apply(pieces, parse_words(["disable_cuda_graph=true"]))

    def ns(eager: int, factor: int = PPM) -> int:
        made = _launching(pieces, eager)
        return play(made, scenario, as_profiled(made), (8, 8), EXPERTS, Ends(eager=factor)).ns

    assert ns(300 * US) - ns(10 * US) >= 2 * 31 * 290 * US - 2 * 5 * MS  # what is not hidden behind the forward itself
    assert ns(300 * US) == ns(150 * US, 2 * PPM) == ns(600 * US, PPM // 2)
    assert ns(0) == ns(75 * US)  # nothing measured: as on the captures at hand
    half = replace(as_profiled(pieces), speed=PPM // 2)
    assert [eager_ns(_launching(pieces, 80 * US), s, half) for s in (0, 1)] == [40 * US, 40 * US]
    # With 16 the largest graph, a micro-batch of 31 is launched kernel by kernel.
    dear = _launching(pieces, 300 * US)
    small = play(dear, unchanged(dear), as_profiled(dear), (31, 1), EXPERTS, Ends(), 16).ns
    assert small > play(dear, unchanged(dear), as_profiled(dear), (31, 1), EXPERTS, Ends(), 64).ns


@pytest.mark.parametrize("dilation", [1.2, 1.6, 2.6])
def test_calibration_finds_the_dilation_that_was_there(dilation: float) -> None:
    pieces = plain(launch=3 * US)
    speed = HostSpeed(int(PPM / dilation), (PPM, PPM), as_profiled(pieces).known)
    own = play(pieces, unchanged(pieces), speed, pieces.slots, EXPERTS, Ends()).throughput
    found = calibrate(replace(pieces, throughput=own), EXPERTS, (0, 0))
    assert {c.name for c in found} == {"as measured"}  # the hosts are alike: nothing to make equal
    assert [c.likely for c in found] == [True] + [False] * (len(found) - 1)
    assert found[0].matched
    # The likeliest: it explains the throughput as far as that is known, and is no farther from the usual one.
    assert found[0].round.throughput == pytest.approx(own, rel=1e-2)
    assert min(dilation, 1.6) - 0.02 <= found[0].dilation <= max(dilation, 1.6) + 0.02


def test_where_gpus_bind_the_usual_dilation_is_taken_and_the_ends_are_in_the_range() -> None:
    sizes = [8] * ROWS
    pieces = plain(sizes)
    slow = kernels(sizes, moe=60 * MS)
    bound = replace(pieces, stages=(replace(pieces.stages[0], kernels=slow), pieces.stages[1]))
    own = play(bound, unchanged(bound), as_profiled(bound), bound.slots, EXPERTS, Ends()).throughput
    found = calibrate(replace(bound, throughput=own), EXPERTS, (0, 0))
    assert [(round(c.dilation, 2), c.likely) for c in found] == [(1.6, True), (1.35, False), (2.4, False)]
    assert all(c.matched for c in found)


def test_a_throughput_one_percent_off_is_no_reason_for_other_hosts_where_gpus_bind() -> None:
    sizes = [8] * ROWS
    bound = parts(stage(0, sizes, kernels(sizes, moe=30 * MS)), stage(1, sizes), sizes)
    own = play(bound, unchanged(bound), replace(as_profiled(bound), speed=PPM // 2), bound.slots, EXPERTS, Ends())
    found = calibrate(replace(bound, throughput=own.throughput * 99 // 100), EXPERTS, (0, 0))
    assert found[0].matched and 1.3 <= found[0].dilation <= 1.65


def test_calibration_says_where_hosts_explain_nothing() -> None:
    pieces = plain()
    assert not calibrate(replace(pieces, throughput=10**9), EXPERTS, (0, 0))[0].matched
    assert not calibrate(replace(pieces, throughput=1_000), EXPERTS, (0, 0))[0].matched
    assert {c.matched for c in calibrate(pieces, EXPERTS, (0, 0))} == {
        False
    }  # no throughput: three dilations are tried


def test_played_as_profiled_nothing_is_taken_out() -> None:
    pieces = plain()
    assert 2 * play_as_profiled(pieces, EXPERTS) == total(pieces, ())


def test_merging_helps_where_micro_batches_wait_and_cost_no_more_together() -> None:
    flat = [lambda _batch: 2 * MS] * 2
    # Four micro-batches on two stages: two always wait, and together they take no longer.
    assert merged_ratio((8, 8, 8, 8), 8 * MS, flat, serial_last=False) == 2 * PPM
    # One that takes twice as long for twice the requests gains nothing.
    straight = [lambda batch: batch * MS // 8] * 2
    assert merged_ratio((8, 8, 8, 8), 4 * MS, straight, serial_last=False) <= PPM
    assert merged_ratio((8, 0), 9 * MS, flat, serial_last=True) == PPM


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_a_ring_of_queues_goes_at_the_pace_of_its_bottleneck_or_a_lap(groups: list[int], times: list[int]) -> None:
    service = [lambda _batch, t=t: t * US for t in times]
    zero = [0] * len(times)
    round_ns = ring_ns(groups, service, zero, zero, merge=False)
    assert round_ns == pytest.approx(max(len(groups) * max(times), sum(times)) * US, rel=0.03)


@pytest.mark.parametrize("rate", [4e-4, 0, -1.0, math.nan, math.inf, 1e300, True, "984", None])
def test_a_throughput_that_no_server_has_is_unknown(rate: object) -> None:
    assert _rate({"throughput": {"decode": rate, "source": "x"}}, "decode", "source") == (None, None)
    assert _rate({"throughput": {"decode": 984.5, "source": "x"}}, "decode", "source") == (984_500, "x")

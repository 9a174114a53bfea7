"""The simulated pipeline loop against rings whose period follows by hand, and laws that any such loop obeys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceana.simulate.loop import Hops, Loop, Run, Step, simulate

MS = 1_000_000
PIECES = Step._fields[: Step._fields.index("batch")]
COSTS = ("requests", "proxy", "output", "send_proxy", "recv_proxy", "send_output", "recv_output", "copy")


def period(loop: Loop, rounds: int = 60) -> int:
    """Time of a round of all slots in the long run."""
    run = simulate(loop, rounds * loop.slots + 1)
    starts = run.starts[0]
    half = rounds // 2 * loop.slots
    span = starts[-1] - starts[-1 - half]
    return span * loop.slots // half


def ring(gpu: Sequence[int], filled: Sequence[bool], hop: int = 0, depth: int = 0, host: int = 0) -> Loop:
    """Stages with the forward times `gpu`, free hosts but for `host` of scheduling, and hops of `hop` for activations
    and for the tokens' return. Passing the tokens on costs nothing."""
    steps = [[Step(batch=int(f), gpu=g if f else 0, schedule=host) for f in filled] for g in gpu]
    return Loop(steps, [*[Hops(recv_proxy=hop)] * (len(gpu) - 1), Hops(recv_output=hop)], depth)


@pytest.mark.parametrize(
    "gpu", [(3 * MS, 3 * MS), (2 * MS, 5 * MS), (5 * MS, 2 * MS), (1 * MS, 4 * MS, 2 * MS, 2 * MS)]
)
def test_a_full_ring_goes_at_the_pace_of_its_slowest_stage(gpu: tuple[int, ...]) -> None:
    assert period(ring(gpu, [True] * len(gpu))) == max(gpu) * len(gpu)


@pytest.mark.parametrize("hop", [0, 100_000, 3 * MS])
def test_a_single_micro_batch_goes_at_the_pace_of_a_lap(hop: int) -> None:
    gpu = (2 * MS, 1 * MS, 3 * MS, 2 * MS)
    assert period(ring(gpu, [True, False, False, False], hop)) == sum(gpu) + 4 * hop


def test_hops_add_to_the_last_forward() -> None:
    """At depth 0 a stage sends its activations after it has taken the next slot's tokens, which left the last stage
    when its forward was done: forward, way back and way forth follow each other."""
    assert period(ring((2 * MS, 2 * MS), [True] * 2, 500_000)) == 2 * (2 * MS + 2 * 500_000)


def test_an_async_depth_does_not_hide_hops_on_one_stream() -> None:
    """With a depth the last stage takes activations before it sends tokens, on one stream: tokens go out behind the
    activations of the forward that the first stage has just ended, and its next forward waits for them."""
    assert period(ring((2 * MS, 2 * MS), [True] * 3, 500_000, depth=1)) == 3 * (2 * MS + 2 * 500_000)


def test_at_depth_zero_the_last_stage_waits_for_its_own_forward() -> None:
    """Serial: its host's work and its forward add up. With a depth it exchanges results first and does not wait."""
    host, gpu = 1 * MS, 4 * MS
    first = [Step(batch=1, gpu=1 * MS)]
    last = [Step(batch=1, gpu=gpu, prepare=host)]
    hops = [Hops(), Hops()]
    assert period(Loop([first, last], hops)) == 2 * (gpu + host)
    assert period(Loop([first, last], hops, depth=1)) == 3 * gpu


def test_results_received_before_they_are_sent_do_not_wait_for_the_forward() -> None:
    host, gpu = 1 * MS, 4 * MS
    loop = Loop([[Step(batch=1, gpu=1 * MS)], [Step(batch=1, gpu=gpu, schedule=host)]], [Hops(), Hops()])
    assert period(loop) == 2 * (gpu + host)
    assert period(replace(loop, receives_first=(False, True))) == 2 * gpu


def test_kernels_launched_one_by_one_end_with_the_last_launch() -> None:
    launching = [[Step(batch=1, gpu=1 * MS, graph=False, launch=5 * MS, last=7)] for _ in range(2)]
    run = simulate(Loop(launching, [Hops(), Hops()]), 3)
    assert run.ends[0][0] == 5 * MS + 7
    graphed = [[Step(batch=1, gpu=1 * MS, launch=5 * MS)] for _ in range(2)]
    assert simulate(Loop(graphed, [Hops(), Hops()]), 3).ends[0][0] == 6 * MS


def test_a_lag_counts_after_the_launch_or_after_the_stream() -> None:
    lagging = Loop(
        [[Step(batch=1, gpu=MS, launch=10)], [Step(batch=1, gpu=MS)]], [Hops(), Hops()], lags=[(5, 9), (5, 9)]
    )
    run = simulate(lagging, 4)
    assert run.ends[0][0] == 10 + MS + 5
    assert run.ends[1][0] == run.ends[0][0] + MS + 9  # the activations come last on the second stage


def test_a_kernel_of_the_scheduler_holds_the_forward_up() -> None:
    loop = ring((2 * MS, 2 * MS), [True, True])
    held = replace(loop, steps=[[s._replace(side_before=MS) for s in loop.steps[0]], loop.steps[1]])
    assert period(held) == 2 * 3 * MS


def test_a_gloo_send_is_committed_when_the_peer_has_asked() -> None:
    """The second stage asks for requests 9 ms late in each visit; the first commits them in the next visit."""
    slow = Loop([[Step()], [Step(receive=9 * MS)]], [Hops(), Hops()])
    assert period(slow) == 2 * 9 * MS


def test_a_message_beyond_the_credit_ends_with_its_receive() -> None:
    """The receiver comes 3 ms late to its receive, and the sender's next forward has to wait for the send."""
    steps = [[Step(batch=1, gpu=MS)], [Step(batch=1, gpu=MS, receive_proxy=3 * MS)]]
    eager = Loop(steps, [Hops(send_proxy=1000), Hops()])
    blocked = replace(eager, hops=[Hops(send_proxy=1000, eager=False), Hops()])
    first, second = simulate(eager, 6), simulate(blocked, 6)
    assert first.ends[0][1] < second.ends[0][1]
    assert all(a <= b for a, b in zip(first.ends[0], second.ends[0], strict=True))


def test_one_stream_for_all_neighbours_is_never_faster() -> None:
    loop = ring((2 * MS, 3 * MS, 2 * MS), [True] * 3, hop=300_000)
    assert period(replace(loop, one_stream=True)) >= period(loop)


def steps_of(draw: st.DrawFn, batch: bool) -> Step:
    host = {name: draw(st.integers(0, 50_000)) for name in PIECES}
    return Step(**host, batch=int(batch), gpu=draw(st.integers(0, 400_000)) if batch else 0, last=0, graph=True)


def costly(costs: Mapping[str, Any]) -> Hops:
    return Hops(**costs)


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    stages, depth = draw(st.integers(2, 4)), draw(st.integers(0, 2))
    filled = draw(st.lists(st.booleans(), min_size=stages + depth, max_size=stages + depth))
    steps = [[steps_of(draw, f) for f in filled] for _ in range(stages)]
    cost = st.integers(0, 30_000)
    hops = [costly({n: draw(cost) for n in COSTS}) for _ in range(stages)]
    odd = draw(st.booleans())  # all stages receiving first would wait for each other
    first = [odd and s % 2 == 1 for s in range(stages)]
    return Loop(steps, hops, depth, draw(st.booleans()), receives_first=first)


def longer(loop: Loop, stage: int, name: str, more: int) -> Loop:
    steps = [list(s) for s in loop.steps]
    steps[stage][0] = steps[stage][0]._replace(**{name: getattr(steps[stage][0], name) + more})
    return replace(loop, steps=steps)


def times(run: Run) -> list[int]:
    """What the first stage has seen; the others stop somewhere behind it."""
    return list(run.starts[0])


@settings(max_examples=60, deadline=None)
@given(loops(), st.data())
def test_nothing_gets_faster_when_a_piece_gets_longer(loop: Loop, data: st.DataObject) -> None:
    stage = data.draw(st.integers(0, len(loop.steps) - 1))
    name = data.draw(st.sampled_from([*PIECES, "gpu"]))
    before, after = times(simulate(loop, 12)), times(simulate(longer(loop, stage, name, 70_000), 12))
    assert all(a <= b for a, b in zip(before, after, strict=True))


@settings(max_examples=60, deadline=None)
@given(loops(), st.integers(2, 9))
def test_all_times_multiplied_give_all_times_multiplied(loop: Loop, factor: int) -> None:
    timed = [*PIECES, "gpu"]
    steps = [[s._replace(**{n: getattr(s, n) * factor for n in timed}) for s in row] for row in loop.steps]
    hops = [costly({n: getattr(h, n) * factor for n in COSTS}) for h in loop.hops]
    slower = replace(loop, steps=steps, hops=hops)
    assert times(simulate(slower, 12)) == [t * factor for t in times(simulate(loop, 12))]


@settings(max_examples=60, deadline=None)
@given(loops())
def test_a_round_is_no_shorter_than_any_stage_needs(loop: Loop) -> None:
    total = period(loop, 20)
    for stage, row in enumerate(loop.steps):
        assert total >= sum(s.gpu for s in row)
        assert total >= sum(s.schedule + s.ingest + s.finish for s in row), stage


@settings(max_examples=30, deadline=None)
@given(loops())
def test_the_same_loop_gives_the_same_run(loop: Loop) -> None:
    assert simulate(loop, 15) == simulate(loop, 15)

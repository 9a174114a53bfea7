"""Greedy admission: which slot holds how many requests, in the cases that were seen on servers and in general."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceana.simulate.slots import ARRIVALS, Admission, admission, arrivals_that_explain, fill

FIRST, TOGETHER = ARRIVALS


def rule(
    pp: int = 2, depth: int = 0, cap: int | None = None, most: int | None = None, clients: int = 32, **more: int
) -> Admission:
    return Admission(pp, depth, cap, cap is None, most, clients, more.get("per_visit"))


@pytest.mark.parametrize(
    ("admitted", "arrival", "slots"),
    [
        # Captures A, H, B, M and K of the real ones: the first request finds the server idle and runs alone.
        (rule(most=16), FIRST, (8, 8)),
        (rule(cap=16, most=32), FIRST, (16, 16)),
        (rule(cap=32, most=64), FIRST, (1, 31)),
        (rule(cap=16, most=32, clients=2), FIRST, (1, 1)),
        (rule(depth=1, cap=16, most=64), FIRST, (1, 16, 15)),
        # 32 requests at once on eight stages: a cap of 8 fills four slots, a cap of 4 all of them.
        (rule(pp=8, most=64), TOGETHER, (8, 8, 8, 8, 0, 0, 0, 0)),
        (rule(pp=8, depth=8, cap=8, most=64), TOGETHER, (8, 8, 8, 8, *[0] * 12)),
        (rule(pp=8, cap=4, most=64), TOGETHER, (4,) * 8),
        # The automatic cap divides by the stages: an async depth only adds slots.
        (rule(pp=8, depth=1, most=64, clients=64), TOGETHER, (*[8] * 8, 0)),
        # Prompts of which one prefill holds two spread over the slots.
        (rule(pp=8, most=64, clients=16, per_visit=2), TOGETHER, (2,) * 8),
    ],
)
def test_slots_fill_greedily_in_the_order_of_visits(admitted: Admission, arrival: str, slots: tuple[int, ...]) -> None:
    assert fill(admitted, arrival) == slots


@given(
    st.integers(1, 8), st.integers(0, 4), st.one_of(st.none(), st.integers(1, 40)), st.integers(1, 80),
    st.integers(0, 100), st.one_of(st.none(), st.integers(1, 5)), st.sampled_from(ARRIVALS),
)  # fmt: skip
def test_every_request_that_may_run_does_and_no_slot_exceeds_its_cap(
    pp: int, depth: int, cap: int | None, most: int, clients: int, per_visit: int | None, arrival: str
) -> None:
    admitted = Admission(pp, depth, cap, cap is None, most, clients, per_visit)
    slots = fill(admitted, arrival)
    assert len(slots) == pp + depth
    assert sum(slots) == admitted.running <= min(most, clients)
    limit = admitted.slot_cap
    assert limit is not None and max(slots) <= limit


def test_the_order_of_arrival_is_told_by_the_slots_seen() -> None:
    burst = rule(pp=8, most=64)
    assert arrivals_that_explain(burst, (8, 8, 8, 8, 0, 0, 0, 0)) == (TOGETHER,)
    assert arrivals_that_explain(rule(cap=32, most=64), (31, 1)) == (FIRST,)
    assert arrivals_that_explain(rule(most=16), (8, 8)) == ARRIVALS
    assert arrivals_that_explain(rule(most=16), (9, 7)) == ()


def test_admission_is_read_from_facts_and_else_from_what_was_seen() -> None:
    facts = {
        "max_running_requests": 64, "micro_batch_cap": 8, "cap_source": "auto: max_running_requests // pp_size",
        "clients": {"concurrency": 32, "input_tokens": {"p50": 4096}}, "chunked_prefill_size": 8192, "queue": {"p50": 0},
    }  # fmt: skip
    told = admission(facts, 8, 0, (8, 8, 8, 8, 0, 0, 0, 0))
    assert (told.slot_cap, told.clients, told.running, told.per_visit) == (8, 32, 32, 2)
    silent = admission({"queue": {"p50": 5}}, 2, 0, (3, 4))
    assert (silent.clients, silent.slot_cap, silent.running) == (12, None, 12)

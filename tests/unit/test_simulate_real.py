"""Predictions against what the servers of the real captures did (issue: measured pure decode throughput)."""

from __future__ import annotations

from functools import cache

import pytest
from captures import real, report_of

from traceana.simulate.changes import parse_words
from traceana.simulate.predict import Predictor

# Tokens per second, unprofiled. H is the mean of six runs of one configuration.
MEASURED = {"A": 984.0, "B": 1906.0, "Q": 1631.0, "H": 1767.0}
WIDER = ("pp_max_micro_batch_size=16,max_running_requests=32",)
NARROWER = ("pp_max_micro_batch_size=8,max_running_requests=16",)


@cache
def predictor(letter: str) -> Predictor:
    return Predictor(report_of(real(letter)).model)


@pytest.mark.parametrize("letter", ["demo", "A", "B", "D", "G", "H", "H2", "I", "M", "Q", "X"])
def test_the_uncalibrated_model_gives_the_profiled_period(letter: str) -> None:
    p = predictor(letter)
    assert p.identity_ns == pytest.approx(p.parts.period_ns, rel=0.05)


@pytest.mark.parametrize(
    ("capture", "changes", "becomes", "percent"),
    [
        ("H", ("host 0=+3ms",), "Q", 5),
        ("H2", ("host 0=+3ms",), "Q", 5),
        ("Q", ("host 0=-3ms",), "H", 8),
        ("demo", WIDER, "H", 10),
        ("A", WIDER, "H", 10),
        ("A", ("max_running_requests=64,pp_max_micro_batch_size=32",), "B", 10),
        ("H", NARROWER, "A", 10),
        ("B", NARROWER, "A", 10),
        ("D", ("disable_cuda_graph=false",), "A", 10),
    ],
)
def test_predictions_hold_on_hardware(capture: str, changes: tuple[str, ...], becomes: str, percent: int) -> None:
    said, measured = predictor(capture).predict(parse_words(changes)), MEASURED[becomes]
    assert said.throughput == pytest.approx(measured, rel=percent / 100)
    assert said.low <= measured <= said.high
    unchanged = abs(said.baseline / measured - 1)
    error = abs(said.throughput / measured - 1)
    assert error <= unchanged + 0.03
    if unchanged > 0.1:
        assert error < unchanged


def test_the_sleep_that_was_planted_is_found_and_not_scaled() -> None:
    """3 ms in get_next_batch_to_run of stage 0."""
    calibration = predictor("Q").calibrations((0, 0))[0]
    held = [int(k.sum()) for k in calibration.speed.known]
    assert held[0] == pytest.approx(3_000_000, rel=0.03)
    assert held[1] == 0
    for letter in ("A", "B", "H", "M"):
        assert not any(k.any() for k in predictor(letter).calibrations((0, 0))[0].speed.known)


def test_slots_and_layers_are_read_off_the_capture() -> None:
    assert sorted(predictor("B").parts.slots) == [1, 31]
    assert predictor("B").predict(parse_words(["concurrency=32"])).slots in ((1, 31), (31, 1))
    assert [s.kernels.layers for s in predictor("A").parts.stages] == [32, 32]

"""Figures of a capture, on counters and clients made by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import pytest

from traceana_capture.cost import disturbance, loop_times, quantile, recording_span, usual_loop
from traceana_capture.load import Load, Request
from traceana_capture.logs import decode_rates
from traceana_capture.measure import Poller, client_figures
from traceana_capture.metrics import latency_ns, tokens

MS = 1_000_000


class Recorded:
    """A load that has happened."""

    def __init__(self, *requests: Request) -> None:
        self.requests = list(requests)

    def snapshot(self) -> list[Request]:
        return self.requests

    def streams(self) -> list[Request]:
        return self.requests


def load_of(*requests: Request) -> Load:
    return cast("Load", Recorded(*requests))


def test_tokens_counts_one_rank_of_a_replica() -> None:
    text = "".join(
        f'sglang:realtime_tokens_total{{mode="{mode}",pp_rank="{pp}",tp_rank="{tp}",dp_rank="{dp}"}} {value}\n'
        for mode, value in (("decode", 100.0), ("prefill_compute", 7.0), ("prefill_cache", 9.0))
        for pp in (0, 1)
        for tp in (0, 1)
        for dp in (0, 1)
    )
    assert tokens(text) == {"decode": 200, "prefill": 14, "decode_pp0": 200, "decode_pp1": 200, "live": 1}
    assert tokens('vllm:generation_tokens_total{model="m"} 12\n') == {"decode": 12, "live": 0}
    assert tokens('sglang:realtime_tokens_total{mode="decode"} NaN\n# HELP x\n') == {}
    assert tokens("") == {}


def test_latency_between_two_dumps() -> None:
    name = "sglang:e2e_request_latency_seconds"
    before, after = f"{name}_sum 10.0\n{name}_count 4.0\n", f"{name}_sum 16.0\n{name}_count 7.0\n"
    assert latency_ns(before, after) == 2_000_000_000
    assert latency_ns(before, before) is None and latency_ns("", "") is None


@pytest.mark.parametrize(
    ("stamps", "span"),
    [
        ([0, 10, 20, 30, 40], (0, 40, 0)),  # no stall
        ([0, 10, 20, 900, 910, 920], (0, 20, 870)),  # an export after the third step
        ([0, 10, 20, 30, 630, 1430, 1440], (0, 30, 1380)),  # the exports of two stages, the second the longer one
        ([0, 140, 150, 160, 170], (0, 170, 0)),  # a start-up at the beginning is recording
        ([0, 140, 150, 160, 1160, 1170, 1180], (0, 160, 990)),
        ([0, 10], None),
    ],
)
def test_recording_span(stamps: list[int], span: tuple[int, int, int] | None) -> None:
    found = recording_span([s * MS for s in stamps], 0, 10**12)
    told = None if found is None else (found.first, found.last, found.stall_ns)
    assert told == (None if span is None else tuple(s * MS for s in span))


def profiled(start: list[int], inside: list[int]) -> tuple[Load, list[dict[str, Any]]]:
    """A client of 10 ms a loop, then the loops `start` and `inside`, then a stall of 990 ms, then 10 ms again."""
    stamps = [i * 10 * MS for i in range(101)]
    for gap in [*start, *inside, 1000]:
        stamps.append(stamps[-1] + gap * MS)
    stamps += [stamps[-1] + i * 10 * MS for i in range(1, 50)]
    request = Request(0, 0, 0, 3000 * MS, 200, 4, 200, token_ns=stamps)
    window: dict[str, Any] = {"name": "steady_1", "start_ns": 0, "end_ns": 1000 * MS, "decode_tokens_per_s": 900.0}
    return load_of(request), [window, {"name": "after", "loop_ns": 12 * MS}]


def test_disturbance_compares_loop_times_of_the_streaming_client() -> None:
    load, windows = profiled([60, 50, 15, 15], [15] * 16)
    found = disturbance(windows, 1000 * MS, 2420 * MS, load=load, series=[])
    assert found["loop_ns"] == {"outside": 10 * MS, "inside": 15 * MS, "inside_count": 16}
    assert (found["disturbance"], found["inside_tokens_per_s"]) == (0.6667, 600.0)
    assert (found["start_pause_ns"], found["recorded_ns"], found["lasting"]) == (80 * MS, 380 * MS, 0.8333)
    assert found["stall_ns"] == 985 * MS  # longer than a usual loop of the profile


def test_a_prefill_inside_is_left_out_by_the_limit_of_outside() -> None:
    load, windows = profiled([15] * 4, [15] * 8 + [50, 45] + [15] * 8)
    found = disturbance(windows, 1000 * MS, 2420 * MS, load=load, series=[])
    assert found["loop_ns"] == {"outside": 10 * MS, "inside": 15 * MS, "inside_count": 16}


def test_prefills_are_taken_out_of_the_rate_outside() -> None:
    load, windows = profiled([15] * 4, [15] * 16)
    stamps = load.streams()[0].token_ns
    stamps[50:] = [t + 250 * MS for t in stamps[50:]]  # a prefill of 250 ms in the window: a fifth of it
    windows[0].update(end_ns=1250 * MS)
    found = disturbance(windows, 1250 * MS, 2670 * MS, load=load, series=[])
    assert (found["outside_tokens_per_s"], found["outside_decode_source"]) == (900.0, "counters and streaming client")
    assert found["outside_decode_tokens_per_s"] == pytest.approx(900 * (1240 / 99) / 10, abs=0.01)
    said = disturbance(windows, 1250 * MS, 2670 * MS, load=load, series=[], logged=[1100.0, 1120.0])
    assert (said["outside_decode_tokens_per_s"], said["outside_decode_source"]) == (1110.0, "log: 2 lines")
    assert said["inside_tokens_per_s"] == 740.0


def test_decode_rates_are_of_the_first_stage_without_a_prefill_between(tmp_path: Path) -> None:
    def line(second: int, stage: str, kind: str, rate: str = "") -> str:
        return f"[{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(second))}{stage}] {kind} batch, #x: 1{rate}\n"

    def decode(second: int, rate: float, stage: str = " PP0") -> str:
        return line(second, stage, "Decode", f", gen throughput (token/s): {rate}, #queue-req: 0")

    log, base = tmp_path / "server.log", 1_796_000_000
    early = decode(base + 1, 1.0) + decode(base + 1, 2.0)
    log.write_text(
        early
        + line(base + 2, " PP0", "Prefill")
        + decode(base + 3, 50.0)  # the prefill is in it
        + decode(base + 3, 7.0, " PP1")
        + decode(base + 4, 100.0)
        + "something else\n"
        + decode(base + 5, 104.5)
        + decode(base + 9, 300.0)  # after the window
        + decode(base + 9, 301.0, " DP0 TP0 PP0")
    )
    window = [((base + 3) * 10**9, (base + 6) * 10**9)]
    assert decode_rates(log, 0, window) == [100.0, 104.5]
    assert decode_rates(log, len(early), [(0, 10**19)]) == [100.0, 104.5, 300.0, 301.0]
    assert decode_rates(log, 0, []) == []


def test_disturbance_without_a_client_rests_on_polled_counters() -> None:
    steps = [0, 100, 200, 300, 400, 400, 400, 400, 400, 400, 460, 520]  # tokens each 100 ms; an export of 500 ms
    series = [(1000 * MS + i * 100 * MS, {"decode": n, "decode_pp0": n, "live": 1}) for i, n in enumerate(steps)]
    window: dict[str, Any] = {"name": "steady_1", "start_ns": 0, "end_ns": 1000 * MS, "decode_tokens_per_s": 1250.0}
    found = disturbance([window], 1000 * MS, 2200 * MS, load=None, series=series)
    assert found["source"] == "realtime_tokens_total, polled"
    assert (found["inside_tokens_per_s"], found["disturbance"], found["stall_ns"]) == (1000.0, 0.8, 500 * MS)
    assert found["whole_tokens_per_s"] == round(520 / 1.1, 2)


def test_disturbance_of_nothing_is_unknown_not_zero() -> None:
    found = disturbance([], 0, 10, load=None, series=[])
    assert (found["disturbance"], found["inside_tokens_per_s"], found["outside_tokens_per_s"]) == (None, None, None)


def test_client_figures_spread_tokens_over_a_request() -> None:
    done = [Request(1, 0, 0, 100 * MS, 200, 4, 100), Request(1, 1, 50 * MS, 250 * MS, 200, 4, 100)]
    failed = Request(1, 2, 0, 60 * MS, 500, 4, None, error="no")
    found = client_figures([*done, failed], 50 * MS, 150 * MS)
    assert (
        found["client_tokens_per_s"] == 1000.0
    )  # half of the first request's tokens and half of the second's, in 0.1 s
    assert (found["requests_ended"], found["requests_failed"]) == (1, 1)
    assert found["latency_ns"] == {"p50": 100 * MS, "p90": 100 * MS, "p99": 100 * MS}


def test_loop_times_stay_inside_the_window_and_the_request() -> None:
    one, two = (Request(0, i, 0, 99, 200, 1, 3, token_ns=t) for i, t in enumerate(([5, 10, 20], [40, 45])))
    assert loop_times([one, two], 8, 99) == [10, 5]
    assert loop_times([one, two], 8, 45) == [10]


def test_quantile_is_a_value_that_was_there() -> None:
    assert [quantile([3, 1, 2], q) for q in (0, 0.5, 0.99, 1)] == [1, 2, 3, 3]
    assert quantile([], 0.5) is None


def test_usual_loop_leaves_out_a_prefill_and_survives_bursts() -> None:
    assert usual_loop([10, 10, 10, 10, 500, 10, 10, 10, 10, 10, 10]) == 10
    assert usual_loop([30, 0, 0] * 4) == 10  # three tokens at a time, of an overloaded server
    assert usual_loop([10] * 9) is None


def test_poller_tells_a_standstill_from_missing_counters() -> None:
    poller = Poller(cast("Any", None), [(i, {"decode": 7}) for i in range(50)])
    assert not poller.moves()
    poller.series.append((50, {"decode": 8}))
    assert poller.moves()
    assert Poller(cast("Any", None), [(1, {})]).moves()

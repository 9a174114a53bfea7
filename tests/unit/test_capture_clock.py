"""Clock probes: paired readings, and round trips to another clock."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceana_capture import roundtrip
from traceana_capture.clock import host_clock, paired_reading, system_state
from traceana_capture.errors import CaptureError


def test_the_tightest_bracket_is_kept() -> None:
    steady = iter([0, 50, 100, 104, 200, 230])
    wall = itertools.count(1000)
    found = paired_reading(3, wall=lambda: next(wall), steady=lambda: next(steady))
    assert found == {"realtime_ns": 1001, "monotonic_low_ns": 100, "monotonic_high_ns": 104}


def test_a_probe_of_this_host_is_integers_and_ordered() -> None:
    probe = host_clock("before")
    assert probe["monotonic_low_ns"] <= probe["monotonic_high_ns"]
    assert abs(probe["realtime_ns"] - time.time_ns()) < 60 * 10**9
    assert probe["host"] == socket.gethostname()
    state = system_state()
    assert state.get("synchronised") in (True, False, None)


@pytest.fixture
def responder() -> Iterator[tuple[int, list[int]]]:
    """A responder whose clock is ahead by `shift[0]` nanoseconds."""
    port: list[int] = []
    shift = [0]
    bound = threading.Event()

    def ready(number: int) -> None:
        port.append(number)
        bound.set()

    thread = threading.Thread(
        target=roundtrip.respond,
        args=("127.0.0.1", 0),
        kwargs={"seconds": 3.0, "ready": ready, "wall": lambda: time.time_ns() + shift[0]},
    )
    thread.start()
    assert bound.wait(5)
    yield port[0], shift
    thread.join()


def test_the_true_offset_lies_in_the_interval(responder: tuple[int, list[int]]) -> None:
    port, shift = responder
    for offset in (0, 1_000_000_000, -5_000_000, 777):
        shift[0] = offset
        found = roundtrip.probe(f"127.0.0.1:{port}", when="before", count=30)
        assert found["low_ns"] <= offset <= found["high_ns"] and found["consistent"]
        assert (found["transport"], found["answered"], found["sent"]) == ("udp", 30, 30)
        assert found["remote"] == socket.gethostname() and len(found["trips"]) == 8
        assert all(isinstance(v, int) for trip in found["trips"] for v in trip.values())


def test_tcp_where_udp_is_blocked(responder: tuple[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    port, shift = responder
    shift[0] = 123_456_789
    real = roundtrip._trips

    def no_udp(*arguments: object) -> object:
        return ([], {}) if socket.SOCK_DGRAM in arguments else real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(roundtrip, "_trips", no_udp)
    found = roundtrip.probe(f"127.0.0.1:{port}", when="after", count=10)
    assert found["transport"] == "tcp" and found["low_ns"] <= shift[0] <= found["high_ns"]


def test_a_silent_host_is_named_with_the_command_to_start() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(CaptureError, match=f"127.0.0.1:{port}") as raised:
            roundtrip.probe(f"127.0.0.1:{port}", when="before", count=5, timeout_s=0.01)
    assert raised.value.hint and "clock-responder" in raised.value.hint


@pytest.mark.parametrize("target", ["h:", "h:x", "h:0", "h:70000"])
def test_bad_targets(target: str) -> None:
    with pytest.raises(CaptureError, match="not a host and port"):
        roundtrip.probe(target, when="before")


@settings(deadline=None)
@given(
    offset=st.integers(-(10**9), 10**9),
    paths=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**5)), min_size=1, max_size=20
    ),
)
def test_any_path_delays_keep_the_offset_inside(offset: int, paths: list[tuple[int, int, int]]) -> None:
    now = 10**18
    trips: list[tuple[int, int, int, int]] = []
    for there, back, work in paths:
        t1 = now + there + offset
        trips.append((now, t1, t1 + work, now + there + work + back))
        now += 10**7
    low = max(t2 - t3 for _, _, t2, t3 in trips)
    high = min(t1 - t0 for t0, t1, _, _ in trips)
    assert low <= offset <= high
    assert high - low <= min(there + back for there, back, _ in paths)

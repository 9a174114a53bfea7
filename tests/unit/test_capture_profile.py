"""One profile against a server with the traps of the real one."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
from fake_server import FakeServer, Traps

from traceana_capture.errors import CaptureError
from traceana_capture.http import HttpServer
from traceana_capture.load import Load, LoadSpec
from traceana_capture.measure import Poller
from traceana_capture.profile import Outcome, Profile, round_steps
from traceana_capture.server import discover, parse_ranks


def profile_of(fake: FakeServer, folder: Path, *, steps: int = 6) -> Profile:
    server = HttpServer(fake.url)
    return Profile(server, discover(server), server_folder=str(folder), seen=[folder], steps=steps, grace_s=0.6)


def run(fake: FakeServer, folder: Path, *, steps: int = 6, timeout_s: float = 10.0, load: bool = True) -> Outcome:
    profile = profile_of(fake, folder, steps=steps)
    clients = Load(profile.server, LoadSpec(4, (4, 4), (20, 20)), vocabulary=100)
    if load:
        clients.start()
    try:
        profile.start()
        return profile.wait(
            parse_ranks(None, profile.info),
            timeout_s=timeout_s,
            poller=Poller(profile.server, []),
            pause=lambda s: time.sleep(min(s, 0.02)),
            died=lambda: None,
            progress=lambda text: None,
        )
    finally:
        profile.stop()
        clients.stop()


def states(outcome: Outcome) -> dict[int, str]:
    return {r.key.rank: r.state for r in outcome.ranks}


@pytest.mark.parametrize(
    "traps",
    [
        Traps(),
        Traps(late_s={1: 0.3}),
        Traps(slow_write_s=0.2),
        Traps(stage_suffix="-DECODE"),
        Traps(merged=True),
    ],
    ids=["plain", "late", "half-written", "wrong stage", "merged"],
)
def test_every_rank_is_found_complete(tmp_path: Path, traps: Traps) -> None:
    with FakeServer(traps=traps) as fake:
        outcome = run(fake, tmp_path)
        assert states(outcome) == {0: "complete", 1: "complete"}
        for rank in outcome.ranks:
            assert rank.path is not None
            document = json.loads(gzip.decompress(rank.path.read_bytes()))
            assert document["distributedInfo"]["rank"] == rank.key.rank
            assert len(document["traceEvents"]) >= 6
        assert [p.name.split("-")[0] for p in outcome.others] == (["merged"] if traps.merged else [])
        assert not fake.profiling


def test_a_truncated_file_is_told_from_a_missing_one(tmp_path: Path) -> None:
    with FakeServer(pp_size=3, traps=Traps(truncated=frozenset({1}), absent=frozenset({2}))) as fake:
        outcome = run(fake, tmp_path)
        assert states(outcome) == {0: "complete", 1: "truncated", 2: "missing"}
        assert outcome.ranks[1].fault == "truncated: the gzip stream has no end"
        assert outcome.ended_by == "the server has finished, and no more files came"


def test_two_tensor_ranks_of_a_stage_are_two_files(tmp_path: Path) -> None:
    with FakeServer(tp_size=2) as fake:
        outcome = run(fake, tmp_path)
        assert states(outcome) == {0: "complete", 1: "complete", 2: "complete", 3: "complete"}
        places = [(r.key.pp, r.key.tp) for r in outcome.ranks]
        assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_running_profile_is_never_destroyed(tmp_path: Path) -> None:
    with FakeServer(traps=Traps(never_ends=True)) as fake:
        first = profile_of(fake, tmp_path)
        first.start()
        with pytest.raises(CaptureError, match="profiling this server already"):
            profile_of(fake, tmp_path).start()
        assert (fake.profiling, fake.lost_profiles) == (True, 0)
        assert first.stop()
        assert not fake.profiling


def test_a_plain_second_start_would_have_destroyed_it(tmp_path: Path) -> None:
    with FakeServer(version="0.4.9", traps=Traps(never_ends=True)) as fake:
        first = profile_of(fake, tmp_path)
        assert first.already_running() is None  # this version cannot be asked
        first.start()
        second = profile_of(fake, tmp_path)
        with pytest.raises(CaptureError, match="refused to profile"):
            second.start()
        assert fake.lost_profiles == 1


def test_a_profile_that_never_ends_is_stopped_and_its_files_kept(tmp_path: Path) -> None:
    with FakeServer(traps=Traps(never_ends=True)) as fake:
        outcome = run(fake, tmp_path, timeout_s=0.5)
        assert not fake.profiling
        assert states(outcome) == {0: "complete", 1: "complete"}
        assert "still ran and was stopped" in outcome.ended_by


def test_a_server_that_dies_keeps_what_exists(tmp_path: Path) -> None:
    with FakeServer(traps=Traps(dies_after_steps=3)) as fake:
        outcome = run(fake, tmp_path)
        assert states(outcome) == {0: "missing", 1: "missing"}
        assert outcome.ended_by == "the server does not answer any more"


@pytest.mark.parametrize(
    ("traps", "words"),
    [
        (Traps(profile_status=404), "has no /start_profile"),
        (Traps(profile_status=503), "refused to profile .HTTP 503"),
        (Traps(admin_key="k"), "wants its admin key"),
    ],
)
def test_a_refusal_says_why(tmp_path: Path, traps: Traps, words: str) -> None:
    with FakeServer(version="0.4.9", traps=traps) as fake, pytest.raises(CaptureError, match=words) as raised:
        profile_of(fake, tmp_path).start()
    assert raised.value.hint


@pytest.mark.parametrize(
    ("version", "sent"), [("0.5.16", False), ("0.5.23", True), ("0.5.23.post1", True), ("", False)]
)
def test_the_request_is_the_least_disturbing_one_the_version_knows(tmp_path: Path, version: str, sent: bool) -> None:
    with FakeServer(version=version) as fake:
        request = profile_of(fake, tmp_path).request
        assert request["with_stack"] is False and request["record_shapes"] is False
        assert request.get("detailed_annotations", False) is sent


def test_steps_are_whole_rounds() -> None:
    assert [round_steps(n, 3) for n in (1, 3, 4, 30)] == [3, 3, 6, 30]

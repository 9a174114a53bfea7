"""The capture's own load."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from fake_server import FakeServer, Traps

from traceana_capture.errors import CaptureError
from traceana_capture.http import HttpServer
from traceana_capture.load import Load, LoadSpec, parse_load


def wait(until: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("none", None),
        ("concurrency=32,input=256,output=256", LoadSpec(32)),
        ("concurrency=2, input=8-16, output=4, requests=9", LoadSpec(2, (8, 16), (4, 4), 9)),
        ("concurrency=1,rate=2.5,api=openai,seed=7", LoadSpec(1, rate=2.5, api="openai", seed=7)),
    ],
)
def test_specs(text: str, spec: LoadSpec | None) -> None:
    assert parse_load(text) == spec


@pytest.mark.parametrize(
    "text",
    ["", "32", "concurrency=0", "concurrency=x", "input=5", "concurrency=1,input=9-4", "concurrency=1,rate=0",
     "concurrency=1,api=grpc", "concurrency=1,requests=-1", "concurrency=1,nonsense=2", "concurrency=1,rate=nan"],
)  # fmt: skip
def test_bad_specs_say_what_a_good_one_is(text: str) -> None:
    with pytest.raises(CaptureError) as raised:
        parse_load(text)
    assert raised.value.hint == "for instance --load concurrency=32,input=256,output=256"


@pytest.mark.parametrize("openai", [False, True])
def test_closed_loop_counts_tokens_and_streams_one_client(openai: bool) -> None:
    with FakeServer(openai_only=openai) as fake:
        spec = LoadSpec(3, (4, 9), (5, 5), requests=9)
        load = Load(HttpServer(fake.url), spec, vocabulary=50, api="openai" if openai else "sglang").start()
        wait(lambda: load.done)
        done = load.snapshot()
        assert [r.output_tokens for r in done] == [5] * 9 and all(r.ok for r in done)
        assert sorted(r.index for r in done) == list(range(9))
        assert all(4 <= r.input_tokens <= 9 and r.start_ns < r.end_ns for r in done)
        streamed = [r for r in done if r.worker == 0]
        assert streamed and all(len(r.token_ns) == 5 for r in streamed)
        assert all(r.token_ns == sorted(r.token_ns) and r.start_ns < r.token_ns[0] for r in streamed)
        assert not any(r.token_ns for r in done if r.worker)
        asked = [b for p, b in fake.asked if p == ("/v1/completions" if openai else "/generate")]
        ids = [b["prompt"] if openai else b["input_ids"] for b in asked]
        assert all(3 <= i < 50 for prompt in ids for i in prompt)
        load.stop()


def test_a_seed_repeats_the_prompts_and_none_gives_new_ones() -> None:
    prompts: list[list[list[int]]] = []
    for seed in (5, 5, None, None):
        with FakeServer() as fake:
            spec = LoadSpec(1, (4, 9), (2, 2), requests=4, seed=seed)
            load = Load(HttpServer(fake.url), spec, vocabulary=50).start()
            wait(lambda load=load: load.done)  # type: ignore[misc]
            prompts.append([b["input_ids"] for p, b in fake.asked if p == "/generate"])
            assert load.document()["load"]["seed"] == (seed or load.spec.seed)
    assert prompts[0] == prompts[1]
    assert prompts[2] != prompts[3]  # the same ones would be in the server's prefix cache


def test_failures_are_counted_not_retried_at_once() -> None:
    with FakeServer(traps=Traps(request_status=500)) as fake:
        load = Load(HttpServer(fake.url), LoadSpec(2, (4, 4), (2, 2)), vocabulary=50).start()
        wait(lambda: len(load.failures()) >= 4)
        load.stop()
        assert {r.status for r in load.snapshot()} == {500} and load.snapshot()[0].error == '{"error": "no"}'


def test_stop_cuts_what_runs_and_does_not_count_it() -> None:
    with FakeServer(step_s=0.05) as fake:
        load = Load(HttpServer(fake.url), LoadSpec(2, (4, 4), (10_000, 10_000)), vocabulary=50).start()
        wait(lambda: fake.decode_tokens > 0)
        begin = time.monotonic()
        load.stop()
        assert time.monotonic() - begin < 5 and load.done
        assert load.snapshot() == []


def test_a_rate_spreads_arrivals() -> None:
    with FakeServer() as fake:
        load = Load(HttpServer(fake.url), LoadSpec(8, (4, 4), (2, 2), rate=50.0), vocabulary=50).start()
        wait(lambda: len(load.snapshot()) >= 10)
        load.stop()
        starts = sorted(r.start_ns for r in load.snapshot())
        assert len(set(starts)) == len(starts)


def test_the_document_holds_every_request() -> None:
    with FakeServer() as fake:
        load = Load(HttpServer(fake.url), LoadSpec(1, (4, 4), (3, 3), requests=2), vocabulary=50).start()
        wait(lambda: load.done)
        document = load.document()
        assert document["load"]["concurrency"] == 1 and document["load"]["api"] == "sglang"
        assert [(r["index"], r["output_tokens"], len(r["token_ns"])) for r in document["requests"]] == [
            (0, 3, 3),
            (1, 3, 3),
        ]

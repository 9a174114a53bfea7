"""The trace generator: its truth is whole and follows its records, its files say what the truth says."""

from __future__ import annotations

import ast
import gzip
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracegen import Load, Model, World, build, build_model, names
from tracegen.clocks import Clock, rank_clocks
from tracegen.engine import Gpu, Kernel
from tracegen.intervals import clip, gaps, overlap, union
from tracegen.scenarios import MODELS
from tracegen.workload import Scheduler

FIXTURES = Path(__file__).parents[2] / "fixtures"
BASE = 1_790_857_026_000_000_000
CAUSES = {
    "no_work", "upstream_compute", "downstream_backpressure", "p2p_transfer_wait", "control_message", "host_schedule",
    "host_launch", "host_sync", "launch_latency", "stream_dependency", "collective_late", "profiler",
}  # fmt: skip
# Worlds that between them have every cause, shape and kind of load.
SAMPLE = (
    "pp2_decode", "pp2_host_launch", "pp2_backpressure", "pp2_queue_empty", "pp2_depth2", "pp2_collective",
    "pp2_profiler", "pp2_chunked", "pp4_slow_link", "pp8_burst",
)  # fmt: skip

Trace = dict[str, Any]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, World]]:
    folder = tmp_path_factory.mktemp("worlds")

    class Built(dict[str, World]):
        def __missing__(self, name: str) -> World:
            self[name] = build(name, folder / name)
            return self[name]

    yield Built()


def parse(path: Path) -> Trace:
    with gzip.open(path, "rt") as file:
        trace: Trace = json.load(file, parse_float=Decimal)
    return trace


def stamp(event: Trace) -> int:
    return BASE + int(event["ts"] * 1000)


def end(event: Trace) -> int:
    return stamp(event) + int(event["dur"] * 1000)


def complete_events(trace: Trace, *cats: str) -> list[Trace]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] in cats]


def blamed(world: World, cause: str, *, rank: int | None = None, root: int | None = None) -> int:
    return sum(
        row.end_ns - row.ts_ns
        for row in world.rows
        if row.cause == cause and rank in (None, row.rank) and root in (None, row.root_rank)
    )


def bubble(world: World, rank: int | None = None) -> int:
    return sum(row.end_ns - row.ts_ns for row in world.rows if row.state == "bubble" and rank in (None, row.rank))


# The truth


@pytest.mark.parametrize("name", [*SAMPLE, "hand_late_sender", "hand_blocked_send"])
def test_rows_tile_the_window_of_every_rank(worlds: dict[str, World], name: str) -> None:
    world = worlds[name]
    for rank in world.files:
        rows = [row for row in world.rows if row.rank == rank]
        assert [row.ts_ns for row in rows] == [world.window[0], *(row.end_ns for row in rows[:-1])]
        assert rows[-1].end_ns == world.window[1]
        for row in rows:
            assert row.ts_ns < row.end_ns
            if row.state == "bubble":
                assert row.cause in CAUSES
                assert row.root_rank in world.files
                assert row.visit is not None
                assert row.slot == row.visit % world.slots
            else:
                assert row.state in ("busy", "transfer")
                assert (row.cause, row.root_rank, row.visit, row.crossed_token_return) == (None, None, None, False)


def test_every_cause_occurs(worlds: dict[str, World]) -> None:
    seen = {row.cause for name in SAMPLE for row in worlds[name].rows}
    assert seen - {None} == CAUSES


@pytest.mark.parametrize(
    ("name", "cause", "rank", "root", "share"),
    [
        ("pp2_upstream", "downstream_backpressure", 0, 1, 0.6),
        ("pp2_host_schedule", "host_schedule", 0, 0, 0.9),
        ("pp2_host_launch", "host_launch", None, None, 0.6),
        ("pp2_host_sync", "host_sync", None, None, 0.6),
        ("pp2_launch_latency", "launch_latency", None, None, 0.4),
        ("pp2_stream_dependency", "stream_dependency", None, None, 0.4),
        ("pp2_control_message", "control_message", None, None, 0.9),
        ("pp2_backpressure", "downstream_backpressure", 0, 1, 0.8),
        ("pp2_collective", "collective_late", 0, 1, 0.9),
        ("pp4_slow_link", "p2p_transfer_wait", 3, 1, 0.8),
        ("pp4_straggler", "upstream_compute", 3, 2, 0.6),
    ],
)
def test_a_planted_cause_is_the_largest(
    worlds: dict[str, World], name: str, cause: str, rank: int | None, root: int | None, share: float
) -> None:
    world = worlds[name]
    assert blamed(world, cause, rank=rank, root=root) > share * bubble(world, rank)


def test_a_planted_sleep_is_found_whole_where_nothing_hides_it(worlds: dict[str, World]) -> None:
    """With one micro-batch in the pipe, stage 0 idles for its own sleep once a step, to within the jitter's reach."""
    sleep = MODELS["pp2_host_schedule"].sleep[0]
    world = worlds["pp2_host_schedule"]
    found = sum(
        row.end_ns - row.ts_ns
        for row in world.rows
        if (row.rank, row.root_rank, row.detail) == (0, 0, "get_next_batch_to_run")
    )
    steps = sum(1 for batch in world.micro_batches if batch.rank == 0 and batch.complete and batch.mode)
    assert 0 < found <= steps * (sleep + 400_000)
    assert found > steps * sleep // 3


def test_token_return_stays_crossed_on_the_way_back(worlds: dict[str, World]) -> None:
    """4 of 8 slots are filled, so the early stages wait for a token to come round (on the late ones the gap ends before
    the chain has passed seven stages); in a gap, what lies behind the crossing is earlier than what lies before it."""
    world = worlds["pp8_burst"]
    crossed = {row.rank for row in world.rows if row.crossed_token_return}
    assert {0, 1, 2, 3} <= crossed
    assert 7 not in crossed
    gaps_of: dict[tuple[int, int | None], list[bool]] = defaultdict(list)
    for row in world.rows:
        if row.state == "bubble":
            gaps_of[(row.rank, row.visit)].append(row.crossed_token_return)
    assert all(flags == sorted(flags, reverse=True) for flags in gaps_of.values())
    assert any(row.crossed_token_return and row.root_rank == 7 and row.rank == 0 for row in world.rows)


def test_truth_of_a_part_is_part_of_the_truth(worlds: dict[str, World]) -> None:
    world = worlds["pp2_decode"]
    start, stop = world.window
    middle = (start + stop) // 2 + 1_234_567
    halves = world.truth(end=middle) + world.truth(start=middle)
    assert sum(row.end_ns - row.ts_ns for row in halves) == sum(row.end_ns - row.ts_ns for row in world.rows)
    assert all(row.end_ns <= middle or row.ts_ns >= middle for row in halves)
    assert world.truth() == world.rows


# The files


@pytest.mark.parametrize("name", [*(set(SAMPLE) - {"pp2_collective"}), "hand_late_sender", "hand_blocked_send"])
def test_busy_time_of_the_truth_is_that_of_the_file(worlds: dict[str, World], name: str) -> None:
    world = worlds[name]
    for rank, path in world.files.items():
        events = complete_events(parse(path), "kernel", "gpu_memcpy", "gpu_memset")
        work = [(stamp(event), end(event)) for event in events if "nccl" not in event["name"]]
        truth = [(row.ts_ns, row.end_ns) for row in world.rows if row.rank == rank and row.state == "busy"]
        assert clip(union(work), *world.window) == truth


@pytest.mark.parametrize("name", ["pp2_decode", "pp2_host_launch", "pp8_burst"])
def test_kernels_follow_their_calls_and_each_other(worlds: dict[str, World], name: str) -> None:
    for path in worlds[name].files.values():
        trace = parse(path)
        calls = {call["args"]["correlation"]: call for call in complete_events(trace, "cuda_runtime", "cuda_driver")}
        streams: dict[int, list[Trace]] = defaultdict(list)
        for event in complete_events(trace, "kernel", "gpu_memcpy", "gpu_memset"):
            assert stamp(event) >= stamp(calls[event["args"]["correlation"]])
            streams[event["tid"]].append(event)
        for events in streams.values():
            events.sort(key=stamp)
            assert all(end(a) <= stamp(b) for a, b in pairwise(events))
        starts = {event["id"] for event in trace["traceEvents"] if event["ph"] == "s"}
        assert all(event["args"]["correlation"] in starts for events in streams.values() for event in events)


def test_one_graph_launch_has_many_kernels(worlds: dict[str, World]) -> None:
    trace = parse(worlds["pp2_decode"].files[0])
    launches = [
        e["args"]["correlation"] for e in complete_events(trace, "cuda_runtime") if e["name"] == "cudaGraphLaunch"
    ]
    kernels = Counter(e["args"]["correlation"] for e in complete_events(trace, "kernel"))
    assert len(launches) == MODELS["pp2_decode"].steps
    assert {kernels[number] for number in launches} == {18}
    eager = parse(worlds["pp2_host_launch"].files[0])
    assert not any(event["name"] == "cudaGraphLaunch" for event in complete_events(eager, "cuda_runtime"))


def test_spans_of_the_first_and_the_last_visit(worlds: dict[str, World]) -> None:
    world = worlds["pp2_decode"]
    for rank, path in world.files.items():
        trace = parse(path)
        spans = complete_events(trace, "user_annotation")
        first = min(spans, key=stamp)["name"]
        assert first == ("send_reqs_to_next_stage" if rank == 0 else "get_next_batch_to_run")
        unfinished = {event["name"] for event in spans if event["args"].get("finished") is False}
        assert {"run_batch", "scheduler.run_batch"} <= unfinished <= {"run_batch", "scheduler.run_batch", "gloo:send"}
        visits = [stamp(event) for event in spans if event["name"] == "recv_requests"]
        mine = [batch for batch in world.micro_batches if batch.rank == rank]
        assert visits == [batch.ts_ns for batch in mine[1:]]
        assert [batch.complete for batch in mine] == [False] + [True] * (len(mine) - 2) + [False]
        steps = [event["name"] for event in spans if event["name"].startswith("step[")]
        assert steps == ["step[DECODE bs=8]"] * MODELS["pp2_decode"].steps
        assert all(world.window[0] <= ts or batch.visit < 3 for ts, batch in zip(visits, mine[1:], strict=True))


def test_gloo_sends_outlive_their_calls_and_overlap(worlds: dict[str, World]) -> None:
    world = worlds["pp2_decode"]
    spans = complete_events(parse(world.files[0]), "user_annotation")
    sends = [event for event in spans if event["name"] == "gloo:send" and event["args"].get("finished") is not False]
    told = {
        (control.send_ts_ns, control.send_end_ns)
        for control in world.controls
        if control.src == 0 and control.send_recorded
    }
    assert {(stamp(event), end(event)) for event in sends} <= told
    assert max(end(event) - stamp(event) for event in sends) > 5_000_000


def test_profilers_start_and_stop_one_after_the_other(worlds: dict[str, World]) -> None:
    windows: list[tuple[int, int]] = []
    for _, path in sorted(worlds["pp8_burst"].files.items()):
        whole = next(e for e in parse(path)["traceEvents"] if e.get("cat") == "Trace")
        windows.append((stamp(whole), end(whole)))
    assert windows == sorted(windows)
    model = MODELS["pp8_burst"]
    for before, after in pairwise(windows):
        assert after[0] - before[0] >= model.profiler_start_ns
        assert after[1] - before[1] >= model.profiler_export_ns


def test_micro_batches_are_the_same_on_every_stage(worlds: dict[str, World]) -> None:
    for name in ("pp2_chunked", "pp8_burst", "pp2_depth2"):
        world = worlds[name]
        by_visit: dict[int, set[tuple[object, ...]]] = defaultdict(set)
        for batch in world.micro_batches:
            by_visit[batch.visit].add((batch.slot, batch.mode, batch.batch_size, batch.tokens, batch.empty))
        assert all(len(versions) == 1 for versions in by_visit.values())


# Messages


@pytest.mark.parametrize("name", ["pp2_decode", "pp2_backpressure", "pp8_burst", "pp4_slow_link"])
def test_messages_obey_causality(worlds: dict[str, World], name: str) -> None:
    world = worlds[name]
    assert world.messages
    for message in world.messages:
        assert message.recv_end_ns - message.send_ts_ns >= 5_000
        assert message.recv_end_ns > message.recv_ts_ns
    for control in world.controls:
        assert control.recv_end_ns > max(control.send_ts_ns, control.recv_ts_ns)
        assert control.send_end_ns is None or control.send_end_ns >= control.recv_end_ns
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for message in sorted(world.messages, key=lambda each: each.send_ts_ns):
        pairs[(message.src, message.dst)].append((message.send_ts_ns, message.recv_ts_ns))
    assert all(a[1] < b[1] for queue in pairs.values() for a, b in pairwise(queue))


def test_counts_of_messages_per_step(worlds: dict[str, World]) -> None:
    """Two proxy messages a step on each link down the pipe, one token message a step and link round the ring."""
    world = worlds["pp8_burst"]
    steps = {batch.visit for batch in world.micro_batches if batch.complete and batch.mode and batch.rank == 0}
    visits = Counter((message.src, message.dst, message.kind, message.visit) for message in world.messages)
    for rank in range(8):
        proxies = {visits[(rank, rank + 1, "proxy", visit)] for visit in steps}
        assert proxies == ({2} if rank < 7 else {0})
    links = {(message.src, message.dst) for message in world.messages if message.kind == "output"}
    assert links == {(rank, (rank + 1) % 8) for rank in range(8)}
    assert {count for (_, _, kind, _), count in visits.items() if kind == "output"} == {1}
    assert {message.bytes for message in world.messages if message.kind == "proxy"} == {8 * 2048 * 2}


def test_blocked_sends_last_until_they_are_taken(worlds: dict[str, World]) -> None:
    world = worlds["pp2_backpressure"]
    large = [message for message in world.messages if message.bytes > MODELS["pp2_backpressure"].credit]
    waits = [max(message.recv_ts_ns - message.send_ts_ns, 0) for message in large]
    floors = {m.send_end_ns - m.send_ts_ns for m, wait in zip(large, waits, strict=True) if not wait}
    assert len(floors) == 1, "some find their receiver ready, and take the floor of their size"
    assert sum(1 for wait in waits if wait > 0) > 10
    for message, wait in zip(large, waits, strict=True):
        assert {message.send_end_ns - message.send_ts_ns - wait} == floors
    eager = [message for message in worlds["pp2_decode"].messages if message.kind == "proxy"]
    assert any(message.send_end_ns < message.recv_ts_ns for message in eager)


def test_messages_in_the_files(worlds: dict[str, World]) -> None:
    world = worlds["pp2_decode"]
    for rank, path in world.files.items():
        kernels = [event for event in complete_events(parse(path), "kernel") if "SendRecv" in event["name"]]
        for direction, key, peer in (("send", "src", "Dst Rank"), ("recv", "dst", "Src Rank")):
            told = {
                (getattr(m, f"{direction}_ts_ns"), getattr(m, f"{direction}_end_ns"), m.bytes, m.dtype)
                for m in world.messages
                if getattr(m, key) == rank and getattr(m, f"{direction}_recorded")
            }
            sizes = {"BFloat16": 2, "Int": 4}
            found = {
                (stamp(e), end(e), e["args"]["In msg nelems"] * sizes[e["args"]["dtype"]], e["args"]["dtype"])
                for e in kernels
                if e["args"]["Collective name"] == direction
            }
            assert found == told
            assert {e["args"][peer] for e in kernels if peer in e["args"]} == {1 - rank}


# Load


@pytest.mark.parametrize(
    ("name", "filled", "slots"),
    [("pp8_burst", 4, 8), ("pp8_burst_depth8", 4, 16), ("pp8_one_request", 1, 8), ("pp4_empty_slots", 2, 4)],
)
def test_slots_filled(worlds: dict[str, World], name: str, filled: int, slots: int) -> None:
    assert (worlds[name].slots_filled, worlds[name].slots) == (filled, slots)


def test_why_a_slot_is_empty(worlds: dict[str, World]) -> None:
    reasons = {
        name: {row.detail for row in worlds[name].rows if row.cause == "no_work"}
        for name in ("pp2_one_slot", "pp2_waiting_no_place", "pp2_queue_empty")
    }
    assert reasons["pp2_one_slot"] == {"slot_empty_all_admitted"}
    assert reasons["pp2_waiting_no_place"] == {"slot_empty_requests_waiting"}
    assert reasons["pp2_queue_empty"] == {"queue_empty", "slot_empty_all_admitted"}


@given(
    slots=st.integers(1, 6), cap=st.integers(1, 9), limit=st.integers(1, 30), chunk=st.integers(16, 900),
    burst=st.integers(0, 40), prompt=st.integers(1, 700), out=st.integers(1, 6),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_scheduler_keeps_its_limits(
    slots: int, cap: int, limit: int, chunk: int, burst: int, prompt: int, out: int
) -> None:
    load = Load(bursts=((0, burst),), prompt=prompt, out=out)
    scheduler = Scheduler(slots, cap, limit, chunk, load, 0)
    flying: list[Any] = [None] * slots
    prefilled = 0
    for visit in range(4_000):
        scheduler.receive(visit, visit)
        plan = scheduler.decide(visit, 0, False)
        flying[plan.slot] = plan.batch
        if plan.batch is not None:
            assert plan.batch.size <= cap
            assert plan.batch.mode == "decode" or plan.batch.tokens <= chunk
            prefilled += plan.batch.tokens if plan.batch.mode == "extend" else 0
        active = [request for request in scheduler.requests if request.prefilled and request.finish is None]
        assert len(active) <= limit
        assert all(len(running) <= cap for running in scheduler.running)
        following = flying[(plan.slot + 1) % slots]
        if following is not None:
            scheduler.finish(following, visit)
        if all(request.finish is not None for request in scheduler.requests):
            break
    assert all(request.generated == out for request in scheduler.requests)
    assert prefilled == burst * prompt


def test_a_long_prompt_runs_in_chunks_in_consecutive_slots() -> None:
    scheduler = Scheduler(4, 8, 32, 100, Load(bursts=((0, 1),), prompt=250, out=5), 0)
    scheduler.receive(0, 0)
    plans = [scheduler.decide(visit, 0, False) for visit in range(4)]
    assert [(plan.batch.mode, plan.batch.tokens) if plan.batch else None for plan in plans] == [
        ("extend", 100), ("extend", 100), ("extend", 50), None,
    ]  # fmt: skip
    assert scheduler.decide(6, 0, False).batch is not None, "it decodes in the slot of its last chunk"
    assert scheduler.decide(8, 0, False).batch is None


def test_the_log_counts_one_slots_requests(worlds: dict[str, World]) -> None:
    world = worlds["pp8_burst"]
    lines = [line for line in (world.folder / "server.log").read_text().splitlines() if "Decode batch" in line]
    assert lines
    assert all("#running-req: 8," in line and "#queue-req: 0" in line for line in lines)
    assert {line.split("PP")[1][0] for line in lines} == set("01234567")


def test_side_files_agree_with_the_truth(worlds: dict[str, World]) -> None:
    world = worlds["pp2_decode"]
    assert world.throughput is not None
    tokens, duration = world.throughput
    steady = json.loads((world.folder / "result.json").read_text())["windows"]["steady"]
    assert steady["counters"]["rt_decode_pp_rank0_tp_rank0"] == tokens * 1e9 / duration
    counts = [
        next(
            float(line.split()[-1])
            for line in (world.folder / f"metrics_steady_{when}.txt").read_text().splitlines()
            if line.startswith("sglang:realtime_tokens_total") and 'mode="decode"' in line and 'pp_rank="0"' in line
        )
        for when in ("start", "end")
    ]
    assert counts[1] - counts[0] == tokens
    assert world.period_ns is not None
    assert abs(tokens * world.period_ns - 8 * duration) < 8 * duration // 100, "8 tokens a step"
    info = json.loads((world.folder / "server_info.json").read_text())
    assert (info["pp_max_micro_batch_size"], info["internal_states"][0]["pp_max_micro_batch_size"]) == (None, 8)
    clients = json.loads((world.folder / "client_requests.json").read_text())
    assert len(clients) == 32
    samples = (world.folder / "gpu_samples.csv").read_text().splitlines()
    assert samples[0].startswith("epoch_ns,gpu,util_gpu")
    assert len(samples) > 50


# Clocks, seeds, names


def test_offsets_move_stamps_and_nothing_else(tmp_path: Path, worlds: dict[str, World]) -> None:
    base = worlds["pp2_collective"]
    moved = build("pp2_collective", tmp_path, offsets_ns={1: 80_000, 2: (-5_000_000, 3_000)})
    assert moved.rows == base.rows
    assert (moved.window, moved.messages) == (base.window, base.messages)
    assert [moved.offset_ns(rank) for rank in range(4)] == [0, 80_000, -5_000_000, 0]
    for rank, (cpu, gpu) in enumerate([(0, 0), (80_000, 80_000), (-5_000_000, 3_000), (0, 0)]):
        for before, after in zip(
            parse(base.files[rank])["traceEvents"], parse(moved.files[rank])["traceEvents"], strict=True
        ):
            if before["ph"] == "X":
                on_gpu = before["cat"].startswith(("kernel", "gpu_"))
                assert stamp(after) - stamp(before) == (gpu if on_gpu else cpu)
                assert (after["dur"], after["name"]) == (before["dur"], before["name"])


def test_drift_stretches_a_rank(tmp_path: Path, worlds: dict[str, World]) -> None:
    base = worlds["pp2_queue_empty"]
    slow = build("pp2_queue_empty", tmp_path, drift_ppm=[0, 20])
    whole = [next(e for e in parse(world.files[1])["traceEvents"] if e.get("cat") == "Trace") for world in (base, slow)]
    length = end(whole[0]) - stamp(whole[0])
    assert end(whole[1]) - stamp(whole[1]) - length in (length * 20 // 1_000_000, length * 20 // 1_000_000 + 1)
    assert slow.rows == base.rows


@given(st.integers(-(10**9), 10**9), st.integers(-30_000, 30_000), st.lists(st.integers(0, 10**12), min_size=2))
def test_clocks_keep_the_order(offset: int, ppb: int, times: list[int]) -> None:
    clock = Clock(offset, ppb, 10**11)
    local = [clock.local(time) for time in sorted(times)]
    assert local == sorted(local)
    assert clock.local(10**11) == 10**11 + offset
    assert clock.offset_at(times[0]) == clock.local(times[0]) - times[0]


def test_clocks_of_unknown_ranks_are_refused() -> None:
    with pytest.raises(IndexError, match="no rank 2 in a world of 2"):
        rank_clocks(2, 0, {2: 5}, None)
    with pytest.raises(IndexError, match="no rank 3"):
        rank_clocks(3, 0, None, [0, 0, 0, 1.5])


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        build("pp2_queue_empty", tmp_path / folder, seed=seed)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert len(files) == 10
    for name in files:
        content = (tmp_path / "a" / name).read_bytes()
        assert content == (tmp_path / "b" / name).read_bytes()
        if name.suffix == ".gz":
            assert content != (tmp_path / "c" / name).read_bytes()


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no scenario pp3"):
        build("pp3", tmp_path)


def test_models_that_cannot_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="runs out of work"):
        build_model(Model(load=Load(bursts=((0, 1),), out=2), warm=8), tmp_path)


def test_models_without_a_common_window_are_refused(tmp_path: Path) -> None:
    model = Model(pp=4, load=Load(preload=(4,) * 4), warm=1, steps=2, lean=True)
    with pytest.raises(ValueError, match="no common window"):
        build_model(model, tmp_path)
    short = Model(load=Load(preload=(4, 4)), warm=2, steps=8, lean=True)
    assert build_model(short, tmp_path).period_ns is None
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("pp", [3, 16])
def test_other_sizes(tmp_path: Path, pp: int) -> None:
    model = Model(pp=pp, load=Load(preload=(2,) * pp), max_running=2 * pp, steps=pp + 4, warm=2 * pp, lean=True)
    world = build_model(model, tmp_path)
    assert sorted(world.files) == list(range(pp))
    assert world.slots_filled == pp


def test_it_shares_no_code_with_the_analyser() -> None:
    modules = sorted((FIXTURES / "tracegen").glob("*.py"))
    assert len(modules) > 10
    allowed = {"tracegen", *sys.stdlib_module_names}
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            names_of = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names_of = [node.module or ""]
            assert {name.split(".")[0] for name in names_of} <= allowed, path.name


def test_the_command_lists_and_builds(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "tracegen", *arguments]
        return subprocess.run(command, cwd=FIXTURES, capture_output=True, text=True, check=True).stdout

    assert run().split() == names()
    assert "2 ranks" in run("hand_late_sender", str(tmp_path / "out"))
    assert len(list((tmp_path / "out" / "trace").glob("*.trace.json.gz"))) == 2
    truth = json.loads((tmp_path / "out" / "truth.json").read_text())
    assert truth["rows"]["columns"][:4] == ["rank", "ts_ns", "end_ns", "state"]
    assert len(truth["rows"]["rows"]) == 52


# Parts


def test_the_rule_for_a_start_inside_the_call() -> None:
    """A start inside the launch call means that the launch was last; what else ended shortly before moves it behind."""

    def kernel(early: int, after: tuple[Kernel, ...] = (), duration: int = 100) -> Kernel:
        return Kernel(0, 7, "k", "kernel", duration, 900, 1_000, early, 50, after, 0, False)

    for previous_end, early, start, released in ((880, -100, 1_100, "launch"), (840, -100, 900, "launch")):
        gpu = Gpu(0)
        first = gpu.push(kernel(0, duration=previous_end - 1_000 + 60))
        first.start, first.end = previous_end - 60, previous_end
        second = gpu.push(kernel(early, (first,)))
        assert (second.start, "launch" if second.released_by is None else "kernel") == (start, released)
    late = kernel(0)
    late.start, late.end = 950, 1_005
    waiting = kernel(-100, (late,))
    assert waiting.settle()
    assert (waiting.start, waiting.released_by) == (1_055, late)


def test_streams_wait_for_events_of_other_streams() -> None:
    gpu = Gpu(0)

    def push(stream: int, duration: int) -> Kernel:
        return gpu.push(Kernel(0, stream, "k", "kernel", duration, 0, 10, 5, 20, gpu.record(stream), 0, False))

    long = push(1, 1_000)
    gpu.wait(2, gpu.record(1))
    short = push(2, 10)
    gpu.wait(3, gpu.record(2))
    last = push(3, 10)
    assert [(k.start, k.end) for k in (long, short, last)] == [(15, 1_015), (1_035, 1_045), (1_065, 1_075)]
    assert (long.released_by, short.released_by, last.released_by) == (None, long, short)


interval_lists = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def cells(intervals: list[tuple[int, int]]) -> set[int]:
    return {cell for low, high in intervals for cell in range(low, high)}


@given(interval_lists, interval_lists, st.integers(0, 60), st.integers(0, 60))
def test_intervals(first: list[tuple[int, int]], second: list[tuple[int, int]], low: int, high: int) -> None:
    a, b = union(first), union(second)
    inside = set(range(low, high))
    assert cells(a) == cells(first)
    assert all(left[1] < right[0] for left, right in pairwise(a))
    assert cells(overlap(a, b)) == cells(a) & cells(b)
    assert cells(clip(a, low, high)) == cells(a) & inside
    assert cells(gaps(a, low, high)) == inside - cells(a)

"""The merged timeline of a small made-up pipeline, read back by Perfetto's own trace processor."""

from __future__ import annotations

import gzip
import io
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2
from tp_wasm import WasmTraceProcessor

from traceana import schema
from traceana.errors import OutputError
from traceana.outputs.files import new_file
from traceana.outputs.parquet import write_tables
from traceana.outputs.timeline import TimelineStats, write_timeline
from traceana.tables.capture import CaptureTables, RankInfo, RankTables

T0 = 1_795_969_813_000_000_000
US = 1_000
SENDRECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
VISITS = 4


def _rank(rank: int) -> RankTables:
    """Four visits over two slots, 1000 us each; stage 1 runs 500 us behind. Both ranks have the same thread id and the
    same correlation ids, a graph of two kernels that overlap by 1 ns, and gloo spans that outlive their calls."""
    device: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    ops: list[dict[str, Any]] = []
    spans: list[dict[str, Any]] = []
    who = {"pid": 900, "tid": 900}
    for visit in range(VISITS):
        at = T0 + visit * 1000 * US + rank * 500 * US
        span = {"ts_ns": at, "end_ns": at + 300 * US, "name": "run_batch", "finished": visit < VISITS - 1, **who}
        annotations += [span, span | {"ts_ns": at + 10 * US, "name": f"step[DECODE bs={8 + visit}]"}]
        annotations.append(span | {"name": "gloo:send", "ts_ns": at + 200 * US, "end_ns": at + 1100 * US})
        ops.append({"ts_ns": at + 20 * US, "end_ns": at + 60 * US, "name": "aten::mm", **who})
        calls += [
            {"ts_ns": at + 30 * US, "end_ns": at + 40 * US, "name": "cudaGraphLaunch", "correlation": visit, **who},
            {"ts_ns": at + 70 * US, "end_ns": at + 70 * US, "name": "cudaEventQuery", "correlation": 50 + visit, **who},
            {"ts_ns": at + 80 * US, "end_ns": at + 85 * US, "name": "INVALID", "correlation": 90 + visit, "pid": 900,
             "tid": 2147468992},
        ]  # fmt: skip
        kernel = {"kind": "kernel", "stream": 7, "device": rank, "correlation": visit}
        send = {"stream": 20, "device": rank, "kind": "kernel", "name": SENDRECV, "correlation": 90 + visit}
        side = {"collective": "send", "dst_rank": 1} if rank == 0 else {"collective": "recv", "src_rank": 0}
        device += [
            kernel | {"ts_ns": at + 100 * US, "end_ns": at + 200 * US + 1, "name": "void moe_kernel<int>(int*)"},
            kernel | {"ts_ns": at + 200 * US, "end_ns": at + 300 * US, "name": "act_and_mul"},
            send | side | {"ts_ns": at + 310 * US, "end_ns": at + 420 * US, "in_elements": 4096, "dtype": "BFloat16"},
        ]
        spans.append({"ts_ns": at + 100 * US, "end_ns": at + 300 * US, "name": "step", "stream": 7, "device": rank})
    info = RankInfo(rank, Path(f"r{rank}.json"), pp_rank=rank, tp_rank=0, pid=900, device=rank, host="h")
    order = ["ts_ns", "end_ns"]
    return RankTables(
        info,
        device=schema.DEVICE.frame(
            pl.DataFrame(device, infer_schema_length=None).sort(order, descending=[False, True])
        ),
        calls=schema.CALLS.frame(pl.DataFrame(calls).sort(order, descending=[False, True])),
        annotations=schema.ANNOTATIONS.frame(pl.DataFrame(annotations).sort(order, descending=[False, True])),
        gpu_annotations=schema.GPU_ANNOTATIONS.frame(spans),
        ops=schema.OPS.frame(ops),
        overheads=schema.OVERHEADS.frame([{"ts_ns": T0, "end_ns": T0 + 5, "name": "Buffer Flush"}]),
    )


def _world() -> tuple[CaptureTables, dict[str, Any]]:
    samples = [
        {"ts_ns": T0 + k * 400_000 * US, "rank": r, "gpu": r, "power_w": 400.5 + k, "utilisation": 0.5}
        for k in range(6)
        for r in range(2)
    ]
    capture = CaptureTables(Path("x"), (_rank(0), _rank(1)), gpu_samples=schema.GPU_SAMPLES.frame(samples))
    visits: list[dict[str, Any]] = []
    forwards: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    bubbles: list[dict[str, Any]] = []
    for rank in range(2):
        for visit in range(VISITS):
            at = T0 + visit * 1000 * US + rank * 500 * US
            row = {"rank": rank, "visit": visit, "slot": visit % 2, "mode": "decode", "batch_size": 8 + visit}
            step = {"complete": True, "step": f"step[DECODE bs={8 + visit}]"}
            visits.append(row | step | {"ts_ns": at, "end_ns": at + 1000 * US})
            counts = {"busy_ns": 200 * US, "graphs": 1, "kernels": 2}
            forwards.append(row | counts | {"ts_ns": at + 100 * US, "end_ns": at + 300 * US, "tokens": 8 + visit})
            for low, high, kind in ((100, 200, "moe"), (200, 300, "other")):
                span = {"ts_ns": at + low * US, "end_ns": at + high * US}
                states.append(span | {"rank": rank, "state": "busy", "kernel_class": kind, "visit": visit})
            cause = {"rank": rank, "ts_ns": at + 300 * US, "end_ns": at + 1100 * US, "visit": visit + 1, "gap": visit}
            states.append({k: cause[k] for k in ("rank", "ts_ns", "end_ns")} | {"state": "bubble"})
            why = {"cause": "upstream_compute", "root_rank": 1 - rank, "detail": "serial", "crossed_token_return": True}
            first, last = "kernel act_and_mul", "kernel moe_kernel"
            bubbles.append(cause | why | {"chain": 0, "first_event": first, "last_event": last})
    for visit in range(VISITS):
        at = T0 + visit * 1000 * US
        message = {"src": 0, "dst": 1, "kind": "proxy", "ordinal": visit, "visit": visit, "send_row": 0, "recv_row": 0}
        times = {"send_ts_ns": at + 310 * US, "send_end_ns": at + 420 * US}
        times |= {"recv_ts_ns": at + 810 * US, "recv_end_ns": at + 920 * US}
        messages.append(message | times | {"bytes": 8192, "dtype": "BFloat16"})
        back = {"src": 1, "dst": 0, "kind": "output", "send_ts_ns": at + 850 * US, "send_end_ns": at + 860 * US}
        messages.append(message | back | {"recv_ts_ns": at + 820 * US, "recv_end_ns": at + 870 * US, "bytes": 32})
    clock: list[dict[str, Any]] = [
        {"rank": 0, "offset_ns": 0, "drift_ppm": 0.0, "uncertainty_ns": 0, "method": "reference"},
        {"rank": 1, "offset_ns": -1200, "drift_ppm": 0.0, "uncertainty_ns": None, "method": "one-sided"},
    ]
    return capture, {
        "clock": schema.CLOCK_RANKS.frame(clock),
        "visits": schema.VISITS.frame(visits),
        "forwards": schema.FORWARDS.frame(forwards),
        "messages": schema.MESSAGES.frame(pl.DataFrame(messages, infer_schema_length=None)),
        "states": schema.STATES.frame(pl.DataFrame(states, infer_schema_length=None)),
        "attribution": schema.ATTRIBUTION.frame(bubbles),
        "kernel_class": {"void moe_kernel<int>(int*)": "moe", "act_and_mul": "moe", SENDRECV: "collective"},
        "window": (T0 + 1000 * US, T0 + 3000 * US),
        "in_flight": pl.DataFrame({"ts_ns": [T0 + 1000 * US, T0 + 2000 * US], "count": [1, 2]}),
        "stages_busy": pl.DataFrame({"ts_ns": [T0 + 1000 * US, T0 + 2500 * US], "count": [2, 1]}),
    }


def written(**changes: Any) -> tuple[WasmTraceProcessor, TimelineStats]:
    capture, frames = _world()
    out = io.BytesIO()
    stats = write_timeline(out, changes.pop("capture", capture), **(frames | changes))
    trace = WasmTraceProcessor().load(out.getvalue())
    assert trace.problems() == []
    assert stats.bytes_written == len(out.getvalue())
    return trace, stats


@pytest.fixture(scope="module")
def merged() -> Iterator[tuple[WasmTraceProcessor, TimelineStats]]:
    yield written()


@pytest.fixture()
def trace(merged: tuple[WasmTraceProcessor, TimelineStats]) -> WasmTraceProcessor:
    return merged[0]


def on(trace: WasmTraceProcessor, rank: int, name: str) -> list[tuple[Any, ...]]:
    """(name, ts - T0 in us, dur in us) of the slices on the tracks of that name of a rank, in order."""
    rows = trace.query(
        "select s.name, s.ts, s.dur from slice s join process_track k on k.id = s.track_id join process p using (upid) "
        f"where p.pid = {rank + 1} and k.name = '{name}' order by s.ts, s.dur desc"
    )
    return [(n, (ts - T0) / US, dur / US) for n, ts, dur in rows]


def flows(trace: WasmTraceProcessor, kind: int) -> list[tuple[Any, ...]]:
    """(rank and name of the slice where an arrow starts, rank and name where it ends, nanoseconds between starts)."""
    place = (
        "coalesce((select p.pid - 1 from process_track k join process p using (upid) where k.id = {s}.track_id), "
        "(select p.pid - 1 from thread_track k join thread using (utid) join process p using (upid) "
        "where k.id = {s}.track_id))"
    )
    return trace.query(
        f"select {place.format(s='o')}, o.name, {place.format(s='i')}, i.name, i.ts - o.ts from flow f "
        "join slice o on o.id = f.slice_out join slice i on i.id = f.slice_in "
        f"where (f.trace_id >> 60 & 15) = {kind} order by o.ts, i.ts"
    )


def test_one_process_a_rank_with_its_clock_and_none_has_pid_0(trace: WasmTraceProcessor) -> None:
    assert trace.query("select pid, name from process where upid != 0 order by pid") == [
        (1, "rank 0 · stage 0"),
        (2, "rank 1 · stage 1"),
    ]
    labels = trace.query(
        "select p.pid, a.string_value from process p join args a using (arg_set_id) "
        "where a.flat_key = 'chrome.process_label' and p.pid = 2 order by a.key"
    )
    assert [x[1] for x in labels] == ["host h", "gpu 1", "pp 1", "tp 0", "pid 900"]


def test_every_event_is_a_slice_once(merged: tuple[WasmTraceProcessor, TimelineStats]) -> None:
    trace, stats = merged
    per_rank = VISITS * (3 + 1 + 3 + 3 + 1) + 1  # annotations, ops, calls, kernels, GPU annotations; overhead
    # busy runs, their two classes and bubbles; forwards; slots; two messages with a mark each
    per_rank += VISITS * (1 + 2 + 1 + 1 + 1 + 4)
    cluster = 1 + 2 * (2 * VISITS)  # the window; forwards and bubbles of both stages
    assert trace.scalar("select count(*) from slice") == 2 * per_rank + cluster == stats.slices
    assert trace.scalar("select count(*) from slice where dur < 0") == 0
    assert stats.losses.height == 0


def test_attribution_shows_classes_below_busy_and_causes_with_their_evidence(trace: WasmTraceProcessor) -> None:
    assert on(trace, 0, "Attribution")[:4] == [
        ("busy", 100.0, 200.0),
        ("moe", 100.0, 100.0),
        ("other", 200.0, 100.0),
        ("bubble: upstream_compute ← stage 1 · serial", 300.0, 800.0),
    ]
    keys = (
        "cause", "detail", "root_rank", "micro_batch", "crossed_token_return", "first_event", "last_event", "ns", "gap",
    )  # fmt: skip
    picked = ", ".join(f"extract_arg(arg_set_id, 'debug.{k}')" for k in keys)
    rows = trace.query(f"select distinct {picked} from slice where name like 'bubble: %stage 0%' order by ts limit 1")
    first, last = "kernel act_and_mul", "kernel moe_kernel"
    assert rows == [("upstream_compute", "serial", 0, 1, 1, first, last, 800 * US, 0)]


def test_a_cause_has_one_colour_and_a_micro_batch_has_one_on_every_stage(trace: WasmTraceProcessor) -> None:
    rows = trace.query(
        "select name, count(distinct extract_arg(arg_set_id, 'correlation_id')) from slice "
        "where name like 'mb %' or name like 'bubble%' or name = 'busy' group by name"
    )
    assert len(rows) == VISITS + 3
    assert {n for _, n in rows} == {1}


def test_micro_batches_are_named_and_carry_their_numbers(trace: WasmTraceProcessor) -> None:
    rows = on(trace, 1, "Micro-batches")
    assert rows[:2] == [
        ("mb 0 · slot 0 · decode bs=8", 600.0, 200.0),
        ("mb 1 · slot 1 · decode bs=9", 1600.0, 200.0),
    ]
    values = trace.query(
        "select distinct extract_arg(arg_set_id, 'debug.batch_size'), extract_arg(arg_set_id, 'debug.busy_ns') "
        "from slice where name glob 'mb 3*'"
    )
    assert values == [(11, 200 * US)]


def test_arrows_between_forwards_follow_the_micro_batch_and_its_tokens(trace: WasmTraceProcessor) -> None:
    names = [f"mb {v} · slot {v % 2} · decode bs={8 + v}" for v in range(VISITS)]
    assert flows(trace, 2) == [(0, n, 1, n, 500 * US) for n in names]
    # the slot's next visit is two visits later; the last two have none in the trace
    assert flows(trace, 3) == [(1, names[v], 0, names[v + 2], 1500 * US) for v in range(VISITS - 2)]
    # and once more in the view across ranks, whose tracks belong to no process
    assert flows(trace, 6) == [(None, n, None, n, 500 * US) for n in names]
    assert flows(trace, 7) == [(None, names[v], None, names[v + 2], 1500 * US) for v in range(VISITS - 2)]


def test_a_message_goes_from_the_start_of_the_send_to_the_end_of_the_receive(trace: WasmTraceProcessor) -> None:
    there = [(0, "sent", 1, "received", 610 * US)]
    back = [(1, "sent", 0, "received", 20 * US)]
    assert flows(trace, 4) == (there + back) * VISITS
    assert on(trace, 0, "send proxy → stage 1")[:2] == [
        ("send proxy → stage 1", 310.0, 110.0),
        ("sent", 310.0, 0.0),
    ]
    assert on(trace, 0, "recv output ← stage 1")[:2] == [
        ("recv output ← stage 1", 820.0, 50.0),
        ("received", 870.0, 0.0),
    ]


def test_launches_point_to_the_first_kernel_of_a_graph_and_stay_in_their_rank(trace: WasmTraceProcessor) -> None:
    rows = flows(trace, 1)
    graph = [(r, "cudaGraphLaunch", r, "moe_kernel", 70 * US) for r in (0, 1)]
    p2p = [(0, "INVALID", 0, "send → stage 1", 230 * US), (1, "INVALID", 1, "recv ← stage 0", 230 * US)]
    assert sorted(rows) == sorted((graph + p2p) * VISITS)


def test_overlapping_kernels_share_a_track_name_and_keep_their_times(trace: WasmTraceProcessor) -> None:
    assert on(trace, 0, "stream 7 · compute")[:3] == [
        ("step", 100.0, 200.0),
        ("moe_kernel", 100.0, 100.001),
        ("act_and_mul", 200.0, 100.0),
    ]
    trace.query("include perfetto module viz.summary.track_event")
    rows = trace.query("select track_ids from _track_event_tracks_ordered_groups where name = 'stream 7 · compute'")
    assert [r[0].count(",") for r in rows] == [1, 1]
    full = trace.query("select distinct extract_arg(arg_set_id, 'debug.kernel') from slice where name = 'moe_kernel'")
    assert full == [("void moe_kernel<int>(int*)",)]
    assert trace.query("select distinct category from slice where name = 'act_and_mul'") == [("moe",)]


def test_threads_nest_annotations_ops_and_calls_and_leave_gloo_apart(trace: WasmTraceProcessor) -> None:
    rows = trace.query(
        "select s.name, s.depth from slice s join thread_track k on k.id = s.track_id join thread t using (utid) "
        "join process p using (upid) where p.pid = 2 and t.tid = 900 order by s.ts, s.dur desc limit 5"
    )
    assert rows == [
        ("run_batch", 0), ("step[DECODE bs=8]", 1), ("aten::mm", 2), ("cudaGraphLaunch", 3), ("cudaEventQuery", 2),
    ]  # fmt: skip
    threads = trace.query("select p.pid, t.tid, t.name from thread t join process p using (upid) order by 1, 2")
    mains = [(1, 900, "main thread"), (1, 2147468992, "thread"), (2, 900, "main thread"), (2, 2147468992, "thread")]
    assert [t for t in threads if t[0] and t[2]] == mains
    gloo = on(trace, 0, "Control messages (gloo)")
    assert gloo == [("gloo:send", 1000.0 * v + 200, 900.0) for v in range(VISITS)]
    unfinished = trace.query(
        "select count(*) from slice where extract_arg(arg_set_id, 'debug.finished') = 0 and name = 'run_batch'"
    )
    assert unfinished == [(2,)]


def test_counters_of_the_cluster(trace: WasmTraceProcessor) -> None:
    def counter(name: str) -> list[tuple[float, float]]:
        rows = trace.query(
            f"select c.ts, c.value from counter c join counter_track k on k.id = c.track_id where k.name = '{name}'"
            " order by c.ts"
        )
        return [((ts - T0) / US, value) for ts, value in rows]

    assert counter("Stages busy") == [(1000, 2), (2500, 1)]
    assert counter("Micro-batches in flight") == [(1000, 1), (2000, 2)]
    # Samples from 1 s before to 1 s after the window of 1 to 3 ms, at 0, 400, 800 ms.
    power = trace.query(
        "select k.name, c.ts, c.value, k.unit, parent.name from counter c join counter_track k on k.id = c.track_id "
        "join track t on t.id = k.id join track parent on parent.id = t.parent_id where k.unit = 'W' "
        "order by k.name, c.ts"
    )
    assert power == [
        (f"stage {r} · gpu {r}", T0 + k * 400_000 * US, 400.5 + k, "W", "GPU power") for r in (0, 1) for k in range(3)
    ]
    share = trace.query(
        "select distinct c.value from counter c join counter_track k on k.id = c.track_id where unit='%'"
    )
    assert share == [(50.0,)]


def test_the_window_and_the_pipeline_stand_on_top(trace: WasmTraceProcessor) -> None:
    rows = trace.query("select s.ts, s.dur from slice s join track k on k.id = s.track_id where k.name = 'Window'")
    assert rows == [(T0 + 1000 * US, 2000 * US)]
    order = trace.query(
        "select k.name, parent.name from track k join track parent on parent.id = k.parent_id "
        "where parent.name in ('Cluster', 'Pipeline') order by extract_arg(k.source_arg_set_id, 'sibling_order_rank')"
    )
    assert [n for n, p in order if p == "Pipeline"] == ["stage 0", "stage 1"]
    top = ["Window", "Pipeline", "Micro-batches in flight", "Stages busy", "GPU power"]
    assert [n for n, p in order if p == "Cluster"] == [*top, "GPU utilisation as NVML reports it"]


def test_worst_gaps_point_back_to_what_the_root_was_doing() -> None:
    _, frames = _world()
    chains = frames["attribution"].filter(pl.col("rank") == 1).head(2)
    trace, _ = written(chains=chains)
    # Stage 1 idles from 800 us on, when stage 0 idles too, and from 1800 us on.
    assert (
        flows(trace, 5)
        == [
            (
                0,
                f"bubble: upstream_compute ← stage {1} · serial",
                1,
                "bubble: upstream_compute ← stage 0 · serial",
                500 * US,
            )
        ]
        * 2
    )


def test_less_or_more_arguments(trace: WasmTraceProcessor) -> None:
    def keys(of: WasmTraceProcessor, name: str) -> set[str]:
        rows = of.query(
            "select distinct a.key from slice s join args a using (arg_set_id) "
            f"where s.name = '{name}' and a.key glob 'debug.*'"
        )
        return {r[0].removeprefix("debug.") for r in rows}

    none, _ = written(args="none")
    assert keys(none, "send → stage 1") == set()
    assert flows(none, 1) == []
    assert flows(none, 2) == flows(trace, 2)
    assert keys(trace, "send → stage 1") == {"correlation", "in_elements", "collective", "dtype", "kernel"}
    full, _ = written(args="full")
    assert keys(full, "send → stage 1") == keys(trace, "send → stage 1") | {"dst_rank"}
    count = "select count(*) from slice"
    assert none.scalar(count) == trace.scalar(count) == full.scalar(count)


def test_stages_come_from_the_caller_where_the_ranks_do_not_say() -> None:
    capture, _ = _world()
    mute = replace(capture, ranks=tuple(replace(r, info=replace(r.info, pp_rank=None)) for r in capture.ranks))
    without, _ = written(capture=mute)
    assert without.query("select name from process where pid = 2") == [("rank 1",)]
    assert flows(without, 2) == []
    told, _ = written(capture=mute, stages={0: 0, 1: 1})
    assert len(flows(told, 2)) == VISITS


def test_ranks_of_one_stage_are_called_ranks_and_keep_to_their_lane() -> None:
    capture, frames = _world()
    pair = [
        replace(r, info=replace(r.info, rank=10 * r.info.rank + k, tp_rank=k)) for r in capture.ranks for k in (0, 1)
    ]
    wide = {
        key: pl.concat([f.with_columns((pl.col("rank") * 10 + k).cast(pl.Int32)) for k in (0, 1)])
        for key, f in frames.items()
        if key in ("visits", "forwards", "states")
    }
    trace, _ = written(
        capture=replace(capture, ranks=tuple(pair)), attribution=schema.ATTRIBUTION.empty(),
        messages=schema.MESSAGES.empty(), clock=schema.CLOCK_RANKS.empty(), **wide,
    )  # fmt: skip
    names = trace.query("select name from process where upid != 0 order by pid")
    assert names == [(f"rank {r:02} · stage {s}",) for r, s in ((0, 0), (1, 0), (10, 1), (11, 1))]
    assert {(o, i) for o, _, i, _, _ in flows(trace, 2)} == {(0, 10), (1, 11)}


def test_an_empty_capture_and_ranks_without_events_are_written() -> None:
    empty = {t.name: t.empty() for t in (schema.VISITS, schema.FORWARDS, schema.MESSAGES, schema.STATES)}
    nothing = {**empty, "attribution": schema.ATTRIBUTION.empty(), "clock": schema.CLOCK_RANKS.empty(), "window": None}
    bare = CaptureTables(Path("x"), (RankTables(RankInfo(0, Path("r0.json"))),))
    trace, stats = written(capture=bare, **nothing)
    assert trace.query("select pid, name from process where upid != 0") == [(1, "rank 0")]
    assert stats.slices == 0
    none, stats = written(capture=CaptureTables(Path("x"), ()), **nothing)
    assert (stats.slices, none.scalar("select count(*) from slice")) == (0, 0)


def test_rows_that_end_before_they_start_are_counted_as_lost() -> None:
    capture, _ = _world()
    bad = schema.OVERHEADS.frame([{"ts_ns": T0 + 9, "end_ns": T0, "name": "flush"}])
    ranks = (replace(capture.ranks[0], overheads=bad), capture.ranks[1])
    _, stats = written(capture=replace(capture, ranks=ranks))
    assert stats.losses.select("name", "severity", "count").rows() == [("timeline_bad_interval", "warning", 1)]


def test_plain_and_gzip_hold_the_same_bytes_every_time(tmp_path: Path) -> None:
    capture, frames = _world()
    write_timeline(tmp_path / "a.pftrace", capture, **frames)
    write_timeline(tmp_path / "deep" / "b.pftrace.gz", capture, **frames)
    again, frames = _world()
    write_timeline(tmp_path / "c.pftrace", again, **frames)
    plain = (tmp_path / "a.pftrace").read_bytes()
    packed = (tmp_path / "deep" / "b.pftrace.gz").read_bytes()
    assert gzip.decompress(packed) == plain == (tmp_path / "c.pftrace").read_bytes()
    assert len(packed) * 2 < len(plain)
    assert WasmTraceProcessor().load(packed).problems() == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pftrace", "c.pftrace", "deep"]


@pytest.mark.parametrize("cores", [1, 2, 7])
def test_the_file_is_the_same_for_any_number_of_cores(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    capture, frames = _world()
    first, second = io.BytesIO(), io.BytesIO()
    write_timeline(first, capture, **frames)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    write_timeline(second, capture, **frames)
    assert first.getvalue() == second.getvalue()


def test_a_failure_leaves_the_old_file_and_no_part_of_a_new_one(tmp_path: Path) -> None:
    capture, frames = _world()
    out = tmp_path / "merged.pftrace"
    out.write_bytes(b"old")
    broken = replace(capture, ranks=(capture.ranks[0], replace(capture.ranks[1], device=pl.DataFrame({"ts_ns": [1]}))))
    with pytest.raises(pl.exceptions.PolarsError):
        write_timeline(out, broken, **frames)
    assert (out.read_bytes(), [p.name for p in tmp_path.iterdir()]) == (b"old", ["merged.pftrace"])


def test_a_place_that_cannot_be_written_is_said_with_a_hint(tmp_path: Path) -> None:
    capture, frames = _world()
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as caught:
        write_timeline(tmp_path / "file" / "merged.pftrace", capture, **frames)
    assert caught.value.where == str(tmp_path / "file" / "merged.pftrace")
    assert caught.value.hint is not None
    assert caught.value.what.startswith("cannot write (")


def test_tables_are_written_as_parquet(tmp_path: Path) -> None:
    _, frames = _world()
    out = tmp_path / "report" / "tables"
    paths = write_tables(out, {"visits": frames["visits"], "states": frames["states"]})
    assert [p.name for p in paths] == ["visits.parquet", "states.parquet"]
    assert sorted(p.name for p in out.iterdir()) == ["states.parquet", "visits.parquet"]
    assert pl.read_parquet(paths[0]).equals(frames["visits"])
    shutil.rmtree(out)
    out.write_text("in the way")
    with pytest.raises(OutputError):
        write_tables(out, {"visits": frames["visits"]})


def test_the_official_protobufs_agree_on_order_and_identity() -> None:
    """The trace processor at hand is older than the fields that order processes: check what is written instead."""
    capture, frames = _world()
    out = io.BytesIO()
    write_timeline(out, capture, **frames)
    parsed = perfetto_trace_pb2.Trace.FromString(out.getvalue())
    tracks = [p.track_descriptor for p in parsed.packet if p.HasField("track_descriptor")]
    assert len({t.uuid for t in tracks}) == len(tracks)
    root = next(t for t in tracks if t.uuid == 0)
    explicit = perfetto_trace_pb2.TrackDescriptor.ChildTracksOrdering.EXPLICIT
    assert root.child_ordering == explicit
    assert root.process_ordering == root.thread_ordering == 1  # EXPLICIT
    processes = [t for t in tracks if t.HasField("process")]
    assert [(t.process.pid, t.sibling_order_rank) for t in processes] == [(1, 10), (2, 11)]
    assert processes[1].description == "rank 1: clock offset -1200 ns (uncertainty unbounded; one-sided)"
    for process in processes:
        children = [t for t in tracks if t.parent_uuid == process.uuid]
        ordered = sorted(children, key=lambda t: t.sibling_order_rank)
        assert [t.name for t in ordered] == [
            "Attribution", "Micro-batches", "Slots", "GPU streams", "P2P messages", "Control messages (gloo)",
            "Profiler overhead",
        ]  # fmt: skip
    sequences = [p.trusted_packet_sequence_id for p in parsed.packet]
    assert sorted(set(sequences)) == [1, 2, 3]
    assert sequences == sorted(sequences)
    named = {t.uuid for t in tracks}
    events = [p for p in parsed.packet if p.HasField("track_event")]
    assert {p.track_event.track_uuid for p in events if p.track_event.HasField("track_uuid")} <= named
    defaults = [p.trace_packet_defaults for p in parsed.packet if p.HasField("trace_packet_defaults")]
    assert {d.track_event_defaults.track_uuid for d in defaults} <= named
    started: set[int] = set()  # sequences whose events have a track and a clock
    for packet in parsed.packet:
        if packet.HasField("clock_snapshot"):
            started.add(packet.trusted_packet_sequence_id)
        if packet.HasField("track_event"):
            assert packet.trusted_packet_sequence_id in started


def test_events_carry_no_thread_but_their_own(trace: WasmTraceProcessor) -> None:
    """Perfetto passes the thread that a sequence described last on to events of other tracks."""
    assert trace.scalar("select count(*) from args where key = 'legacy_event.passthrough_utid'") == 0


def test_interrupts_and_full_disks_leave_nothing_behind(tmp_path: Path) -> None:
    for error, shown in (
        (OSError(28, "No space left on device"), OutputError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ):
        with pytest.raises(shown), new_file(tmp_path / "merged.pftrace") as temporary:
            temporary.write_bytes(b"half")
            raise error
        assert list(tmp_path.iterdir()) == []

"""Merged timelines of real captures, slice by slice against the tables they were made from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tp_wasm import WasmTraceProcessor

from traceana.outputs.timeline import TimelineStats, write_timeline
from traceana.pipeline import Options, Report, analyse

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
CAPTURES = Path(os.environ.get("TRACEANA_CAPTURES", SHARED / "real"))
NAMES = ("A-pp2-cap8", "D-pp2-cap8-nograph", "G-pp2-prefill", "H-pp2-cap16")


@dataclass
class Merged:
    report: Report
    chains: pl.DataFrame
    stats: TimelineStats
    trace: WasmTraceProcessor

    def table(self, sql: str, *columns: str) -> pl.DataFrame:
        return pl.DataFrame(self.trace.query(sql), schema=list(columns), orient="row", infer_schema_length=None)

    def on_process(self, track: str) -> pl.DataFrame:
        """rank, name, ts, end and depth of the slices of the process tracks of that name, as SQL finds them."""
        return self.table(
            "select p.pid - 1, s.name, s.ts, s.ts + s.dur, s.depth from slice s "
            "join process_track k on k.id = s.track_id join process p using (upid) "
            f"where k.name = '{track}' order by 1, 3, 4 desc",
            "rank", "name", "ts_ns", "end_ns", "depth",
        )  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def merged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Merged]:
    folder = CAPTURES / request.param
    if not folder.is_dir():
        pytest.skip(f"no capture at {folder}")
    report = analyse(folder, Options(cache=False))
    model = report.model.trace
    attribution = report.tables["attribution"]
    remote = attribution.filter(
        (pl.col("root_rank") != pl.col("rank")) & (pl.col("end_ns") - pl.col("ts_ns") > 100_000)
    )
    out = tmp_path_factory.mktemp("merged") / "merged.pftrace.gz"
    stats = write_timeline(
        out,
        model.capture,
        clock=model.clock,
        visits=model.visits,
        forwards=model.forwards,
        messages=model.messages,
        states=report.tables["states"],
        attribution=attribution,
        kernel_class=model.kernel_class,
        window=(model.window.start_ns, model.window.end_ns),
        chains=remote,
        in_flight=report.tables["in_flight"],
        stages_busy=report.tables["stages_busy"],
        stages=model.topology.stage,
    )
    yield Merged(report, remote, stats, WasmTraceProcessor().load(out))


def test_nothing_is_lost_on_import(merged: Merged) -> None:
    assert merged.trace.problems() == []
    assert merged.trace.scalar("select count(*) from slice") == merged.stats.slices
    assert merged.trace.scalar("select count(*) from counter") == merged.stats.counter_samples
    assert merged.trace.scalar("select count(*) from slice where dur < 0") == 0
    assert merged.trace.query("select pid from process where upid != 0 order by pid") == [(1,), (2,)]
    assert merged.stats.losses.height == 0


def test_every_activity_keeps_its_stream_and_its_nanoseconds(merged: Merged) -> None:
    got = merged.table(
        "select p.pid - 1, k.name, count(*), sum(s.ts - (select min(ts) from slice)), sum(s.dur) from slice s "
        "join process_track k on k.id = s.track_id join process p using (upid) "
        "where k.name glob 'stream *' and s.category != 'annotation' group by 1, 2 order by 1, 2",
        "rank", "stream", "count", "starts", "length",
    )  # fmt: skip
    origin = merged.trace.scalar("select min(ts) from slice")
    for tables in merged.report.model.trace.capture.ranks:
        expected = tables.device.group_by("stream").agg(
            pl.len().cast(pl.Int64).alias("count"),
            (pl.col("ts_ns") - origin).sum().alias("starts"),
            (pl.col("end_ns") - pl.col("ts_ns")).sum().alias("length"),
        )
        mine = got.filter(pl.col("rank") == tables.info.rank).with_columns(
            pl.col("stream").str.extract(r"^stream (\d+)").cast(pl.Int64)
        )
        keys = ["stream", "count", "starts", "length"]
        assert mine.select(keys).sort("stream").rows() == expected.select(keys).sort("stream").rows()


def test_every_call_op_and_annotation_keeps_its_nanoseconds(merged: Merged) -> None:
    for tables in merged.report.model.trace.capture.ranks:
        for frame, category in ((tables.calls, "call"), (tables.ops, "op"), (tables.annotations, "annotation")):
            got = merged.trace.query(
                "select s.ts, s.ts + s.dur, s.name from slice s left join thread_track k on k.id = s.track_id "
                "left join thread t using (utid) left join process_track q on q.id = s.track_id "
                f"join process p on p.upid = ifnull(t.upid, q.upid) where p.pid = {tables.info.rank + 1} "
                f"and s.category = '{category}' and ifnull(q.name, '') not glob 'stream *'"
            )
            expected = frame.select("ts_ns", "end_ns", pl.col("name").cast(pl.String)).rows()
            assert sorted(got) == sorted(expected)


def test_attribution_tiles_the_window_and_sums_to_the_tables(merged: Merged) -> None:
    window = merged.report.model.trace.window
    slices = merged.on_process("Attribution")
    for rank, states in merged.report.tables["states"].partition_by("rank", as_dict=True).items():
        top = slices.filter((pl.col("rank") == rank[0]) & (pl.col("depth") == 0))
        assert top["ts_ns"][0] == window.start_ns
        assert top["end_ns"][-1] == window.end_ns
        assert (top["end_ns"][:-1] == top["ts_ns"][1:]).all()
        length = (pl.col("end_ns") - pl.col("ts_ns")).sum()
        for state in ("busy", "transfer"):
            drawn = top.filter(pl.col("name") == state).select(length).item()
            assert drawn == states.filter(pl.col("state") == state).select(length).item()
        causes = merged.report.tables["attribution"].filter(pl.col("rank") == rank[0])
        expected = dict(causes.group_by("cause").agg(length.alias("ns")).rows())
        found = top.filter(pl.col("name").str.starts_with("bubble: ")).with_columns(
            pl.col("name").str.extract(r"^bubble: (\w+)").alias("cause")
        )
        assert dict(found.group_by("cause").agg(length.alias("ns")).rows()) == expected
        classes = slices.filter((pl.col("rank") == rank[0]) & (pl.col("depth") == 1))
        busy = states.filter(pl.col("state") == "busy")
        assert dict(classes.group_by("name").agg(length.alias("ns")).rows()) == dict(
            busy.group_by("kernel_class").agg(length.alias("ns")).rows()
        )


def _arrows(merged: Merged, kind: int, *keys: str) -> list[tuple[Any, ...]]:
    place = (
        "(select p.pid - 1 from track k left join thread t on t.utid = extract_arg(k.dimension_arg_set_id, 'utid') "
        "join process p on p.upid = ifnull(t.upid, extract_arg(k.dimension_arg_set_id, 'upid')) "
        "where k.id = {s}.track_id)"
    )
    ends = ", ".join(
        f"{place.format(s=s)}, {s}.name, "
        + ", ".join(f"extract_arg({s}.arg_set_id, 'debug.{k}')" for k in keys)
        + f", {s}.ts"
        for s in ("o", "i")
    )
    return merged.trace.query(
        f"select {ends} from flow f join slice o on o.id = f.slice_out join slice i on i.id = f.slice_in "
        f"where (f.trace_id >> 60 & 15) = {kind}"
    )


def test_every_launch_points_to_the_first_activity_with_its_correlation(merged: Merged) -> None:
    expected: list[tuple[Any, ...]] = []
    for tables in merged.report.model.trace.capture.ranks:
        known = pl.col("correlation").is_not_null()
        calls = tables.calls.filter(known).unique("correlation", keep="first", maintain_order=True)
        first = tables.device.filter(known).unique("correlation", keep="first", maintain_order=True)
        pairs = first.join(calls, on="correlation", suffix="_call")
        expected += [
            (tables.info.rank, c, call, ts)
            for c, call, ts in pairs.select("correlation", "ts_ns_call", "ts_ns").iter_rows()
        ]
    got = _arrows(merged, 1, "correlation")
    assert all(a[0] == a[4] and a[2] == a[6] for a in got)
    assert sorted((a[0], a[2], a[3], a[7]) for a in got) == sorted(expected)


def test_forwards_point_to_their_micro_batch_on_the_next_stage_and_back(merged: Merged) -> None:
    forwards = merged.report.model.trace.forwards
    visits = {r: set(f["visit"].to_list()) for (r,), f in forwards.partition_by("rank", as_dict=True).items()}
    slots = merged.report.model.trace.visits["slot"].max()
    assert isinstance(slots, int)
    ahead = [(a[0], a[2], a[4], a[6]) for a in _arrows(merged, 2, "micro_batch")]
    assert sorted(ahead) == [(0, v, 1, v) for v in sorted(visits[0] & visits[1])]
    back = [(a[0], a[2], a[4], a[6]) for a in _arrows(merged, 3, "micro_batch")]
    assert sorted(back) == [(1, v, 0, v + slots + 1) for v in sorted(visits[1]) if v + slots + 1 in visits[0]]


def test_messages_point_from_the_send_to_its_receive(merged: Merged) -> None:
    got = merged.trace.query(
        "select o.name, o.ts, i.name, i.ts from flow f join slice o on o.id = f.slice_out "
        "join slice i on i.id = f.slice_in where (f.trace_id >> 60 & 15) = 4"
    )
    # An arrow is drawn from the earlier to the later end; all of these run forward in time.
    expected = merged.report.model.trace.messages.select("send_ts_ns", "recv_end_ns").rows()
    assert {(o, i) for o, _, i, _ in got} <= {("sent", "received")}
    assert sorted((a, b) for _, a, _, b in got) == sorted(expected)


def test_worst_gaps_point_to_what_the_root_rank_was_doing(merged: Merged) -> None:
    top = merged.on_process("Attribution").filter(pl.col("depth") == 0)
    expected: list[tuple[int, int, int]] = []
    for rank, root, ts in merged.chains.select("rank", "root_rank", "ts_ns").iter_rows():
        there = top.filter((pl.col("rank") == root) & (pl.col("ts_ns") <= ts) & (pl.col("end_ns") > ts))
        expected.append((rank, ts, there["ts_ns"][0]))
    assert expected
    assert sorted((a[4], a[7], a[3]) for a in _arrows(merged, 5, "gap")) == sorted(expected)


def test_counters_hold_the_steps_of_the_report(merged: Merged) -> None:
    for name, key in (("Micro-batches in flight", "in_flight"), ("Stages busy", "stages_busy")):
        got = merged.trace.query(
            "select c.ts, c.value from counter c join track t on t.id = c.track_id "
            f"where t.name = '{name}' order by c.ts"
        )
        assert got == merged.report.tables[key].select("ts_ns", "count").rows()
    window = merged.report.model.trace.window
    low, high = window.start_ns - 10**9, window.end_ns + 10**9
    samples = merged.report.model.trace.capture.gpu_samples.filter(pl.col("ts_ns").is_between(low, high))
    power = merged.trace.query(
        "select c.ts, c.value from counter c join counter_track t on t.id = c.track_id where t.unit = 'W' "
        "and (select p.name from track k join track p on p.id = k.parent_id where k.id = t.id) = 'GPU power'"
    )
    assert samples.height > 10
    assert sorted(power) == sorted(samples.filter(pl.col("power_w").is_not_null()).select("ts_ns", "power_w").rows())

"""The packet writer on its own: nesting and lanes, and what Perfetto's trace processor reads back."""

from __future__ import annotations

import io
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2
from tp_wasm import WasmTraceProcessor

from traceana.outputs.kernel_names import short_kernel_name
from traceana.outputs.perfetto_lanes import arrange
from traceana.outputs.perfetto_packets import PacketSequence, counter_track, process_track, thread_track, track

T0 = 1_795_969_813_000_000_000
Spans = list[tuple[int, int]]


def sequence() -> tuple[io.BytesIO, PacketSequence]:
    out = io.BytesIO()
    return out, PacketSequence(out.write, 7)


def loaded(out: io.BytesIO) -> WasmTraceProcessor:
    trace = WasmTraceProcessor().load(out.getvalue())
    assert trace.problems() == []
    return trace


def frame(packets: PacketSequence, spans: Spans, **columns: object) -> pl.DataFrame:
    names = [packets.names.id(f"s{i}") for i in range(len(spans))]
    return pl.DataFrame({"ts_ns": [a for a, _ in spans], "end_ns": [b for _, b in spans], "name": names, **columns})


def laminar(spans: Spans) -> bool:
    """No two spans cross. Spans of zero length cross nothing."""
    return not any(a < c < b < d for a, b in spans for c, d in spans)


def replay(order: list[int], lane: list[int], spans: Spans) -> None:
    """Does what Perfetto does with BEGIN and END, one stack a lane, and checks that each END closes its own BEGIN."""
    stacks: dict[int, list[int]] = {}
    now = 0
    for event in order:
        i = event if event >= 0 else ~event
        at = spans[i][0] if event >= 0 else spans[i][1]
        assert at >= now
        now = at
        stack = stacks.setdefault(lane[i], [])
        if event < 0:
            assert stack.pop() == i
            continue
        assert all(spans[j][1] > at or spans[j][0] == at for j in stack)
        if spans[i][1] > spans[i][0]:
            stack.append(i)
    assert not any(stacks.values())


intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=40).map(
    lambda pairs: sorted(((a, a + d) for a, d in pairs), key=lambda s: (s[0], -s[1]))
)


@given(intervals)
@settings(max_examples=400, deadline=None)
def test_any_spans_are_written_once_and_nest_in_their_lanes(spans: Spans) -> None:
    ts, end = (np.array([s[k] for s in spans], dtype=np.int64) for k in (0, 1))
    order, lane = (x.tolist() for x in arrange(ts, end))
    assert sorted(e for e in order if e >= 0) == list(range(len(spans)))
    assert sorted(~e for e in order if e < 0) == [i for i, s in enumerate(spans) if s[1] > s[0]]
    replay(order, lane, spans)
    if laminar(spans):
        assert set(lane) <= {0}
    for number in set(lane):
        assert laminar([s for s, k in zip(spans, lane, strict=True) if k == number])


def test_overlapping_kernels_alternate_between_two_lanes_and_their_parent_stays() -> None:
    spans = [(0, 100), (0, 10), (9, 20), (19, 30), (30, 40)]
    order, lane = arrange(np.array([s[0] for s in spans]), np.array([s[1] for s in spans]))
    assert lane.tolist() == [0, 0, 1, 0, 0]
    replay(order.tolist(), lane.tolist(), spans)


@given(intervals.filter(bool))
@settings(max_examples=25, deadline=None)
def test_perfetto_reads_back_every_slice_to_the_nanosecond(spans: Spans) -> None:
    out, packets = sequence()
    packets.describe(process_track(1, 1, "rank 0", rank=0))
    shifted = [(a + T0, b + T0) for a, b in spans]

    def lane_track(lane: int) -> int:
        packets.describe(track(10 + lane, "lane", parent=1))
        return 10 + lane

    packets.slices(frame(packets, shifted), lane_track)
    trace = loaded(out)
    assert sorted(trace.query("select ts, ts + dur, name from slice")) == sorted(
        (a, b, f"s{i}") for i, (a, b) in enumerate(shifted)
    )
    assert packets.slices_written == len(spans)


@given(st.lists(st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.none(), min_size=12, max_size=12), min_size=1))
@settings(max_examples=60, deadline=None)
def test_any_numbers_in_any_combination_are_read_back(rows: list[list[int | None]]) -> None:
    out, packets = sequence()
    spans = [(T0 + 10 * i, T0 + 10 * i + 5) for i in range(len(rows))]
    numbers = {f"int:{k}": pl.Series([row[k] for row in rows], dtype=pl.Int64) for k in range(12)}
    packets.slices(frame(packets, spans, **numbers), lambda _: 2)
    keys: dict[int, str] = {}
    read: list[dict[str, int]] = []
    for packet in perfetto_trace_pb2.Trace.FromString(out.getvalue()).packet:
        keys |= {name.iid: name.name for name in packet.interned_data.debug_annotation_names}
        if packet.track_event.type == perfetto_trace_pb2.TrackEvent.TYPE_SLICE_BEGIN:
            found = packet.track_event.debug_annotations
            read.append({keys[a.name_iid]: a.int_value for a in found})
    assert read == [{str(k): v for k, v in enumerate(row) if v is not None} for row in rows]


@given(st.lists(intervals, max_size=3).filter(any))
@settings(max_examples=25, deadline=None)
def test_frames_with_other_arguments_share_a_track(parts: list[Spans]) -> None:
    """Of equal spans those of the earlier frame are outside, and lanes are the same as with one frame of all."""
    out, packets = sequence()
    packets.describe(process_track(1, 1, "rank 0", rank=0))

    def lane_track(lane: int) -> int:
        packets.describe(track(10 + lane, f"lane {lane}", parent=1))
        return 10 + lane

    frames = [
        frame(packets, [(a + T0, b + T0) for a, b in spans]).with_columns(pl.lit(k, pl.Int64).alias(f"int:of_{k}"))
        for k, spans in enumerate(parts)
    ]
    packets.slices(frames, lane_track)
    keys = ", ".join(f"extract_arg(arg_set_id, 'debug.of_{k}')" for k in range(3))
    sql = "select s.ts, s.ts + s.dur, t.name, s.depth, coalesce({}) from slice s join track t on t.id = s.track_id"
    rows = loaded(out).query(sql.format(keys) + " order by s.ts, s.dur desc, s.depth, 3, 5")
    every = sorted(
        ((a + T0, b + T0, k) for k, spans in enumerate(parts) for a, b in spans), key=lambda s: (s[0], -s[1], s[2])
    )
    ts, end = (np.array([s[i] for s in every]) for i in (0, 1))
    assert sorted((a, b, t, k) for a, b, t, _, k in rows) == sorted(
        (a, b, f"lane {lane}", k) for (a, b, k), lane in zip(every, arrange(ts, end)[1].tolist(), strict=True)
    )
    for above, below in pairwise(rows):
        if above[:3] == below[:3] and above[0] < above[1]:
            assert above[3] < below[3]
            assert above[4] <= below[4]


def test_what_lies_long_before_the_first_events_keeps_its_time() -> None:
    """Times are counted from a while before the first events of a sequence; these are from before that."""
    out, packets = sequence()
    packets.describe(process_track(1, 1, "rank 0", rank=0), track(2, "t", parent=1), track(3, "u", parent=1))
    packets.describe(counter_track(4, "count", parent=1, rank=0))
    for uuid, at in ((2, T0), (3, T0 - (1 << 40)), (2, T0 + (1 << 50))):
        packets.slices(frame(packets, [(at, at + 7)]), lambda _, uuid=uuid: uuid)  # type: ignore[misc]
    packets.counter(4, np.array([5, T0]), np.array([1, 2]))
    trace = loaded(out)
    assert trace.query("select ts, dur from slice order by ts") == [
        (T0 - (1 << 40), 7), (T0, 7), (T0 + (1 << 50), 7),
    ]  # fmt: skip
    assert trace.query("select ts, value from counter order by ts") == [(5, 1.0), (T0, 2.0)]


def test_slices_are_sorted_and_bad_intervals_refused() -> None:
    out, packets = sequence()
    packets.describe(process_track(1, 1, "rank 0", rank=0), track(2, "t", parent=1))
    packets.slices(frame(packets, [(30, 40), (10, 5), (10, 20), (-5, 3)]), lambda _: 2)
    assert loaded(out).query("select ts, dur from slice order by ts") == [(10, 10), (30, 10)]
    assert (packets.slices_written, packets.slices_refused) == (2, 2)


def test_arguments_come_back_with_type_and_value_and_null_means_absent() -> None:
    out, packets = sequence()
    packets.describe(process_track(1, 1, "rank 0", rank=0), track(2, "t", parent=1))
    spans = [(T0 + 10 * i, T0 + 10 * i + 5) for i in range(4)]
    texts = pl.Series(["ä <b>", None, "ä <b>", "x" * 5000], dtype=pl.Categorical())
    packets.slices(
        frame(packets, spans).with_columns(
            pl.Series("category", [packets.categories.id("moe"), 0, 0, 0]),
            pl.Series("correlation", [None, 3, None, None], dtype=pl.Int64),
            pl.Series("int:small", [0, 1, 300, None]),
            pl.Series("int:big", [-1, (1 << 63) - 1, -(1 << 63), None]),
            pl.Series("bool:yes", [True, False, None, None]),
            packets.texts.column(texts).alias("text:note"),
        ),
        lambda _: 2,
    )
    trace = loaded(out)
    got = trace.query(
        "select name, category, extract_arg(arg_set_id, 'debug.small'), extract_arg(arg_set_id, 'debug.big'), "
        "extract_arg(arg_set_id, 'debug.yes'), extract_arg(arg_set_id, 'debug.note'), "
        "extract_arg(arg_set_id, 'correlation_id') is not null from slice order by ts"
    )
    assert got == [
        ("s0", "moe", 0, -1, 1, "ä <b>", 0),
        ("s1", None, 1, (1 << 63) - 1, 0, None, 1),
        ("s2", None, 300, -(1 << 63), None, "ä <b>", 0),
        ("s3", None, None, None, None, "x" * 5000, 0),
    ]


def test_flows_with_64_bit_ids_bind_to_their_slices_even_at_equal_nanoseconds() -> None:
    out, packets = sequence()
    packets.describe(process_track(1, 1, "rank 0", rank=0), track(2, "t", parent=1), track(3, "u", parent=1))
    ids = [5 << 60 | 1, 7 << 60 | 1 << 40 | 2]
    first = frame(packets, [(100, 200), (100, 150), (200, 300)]).with_columns(
        pl.Series("flow:a", [None, ids[0], None], dtype=pl.UInt64),
        pl.Series("flow:b", [ids[1], None, None], dtype=pl.UInt64),
    )
    packets.slices(first, lambda _: 2)
    second = frame(packets, [(150, 160), (200, 210)]).with_columns(
        pl.Series("flow:c", [ids[0], ids[1]], dtype=pl.UInt64), name=pl.Series([packets.names.id(x) for x in "xy"])
    )
    packets.slices(second, lambda _: 3)
    rows = loaded(out).query(
        "select o.name, i.name from flow f join slice o on o.id = f.slice_out join slice i on i.id = f.slice_in"
    )
    assert sorted(rows) == [("s0", "y"), ("s1", "x")]


def test_an_arrow_can_end_where_its_slice_ends_and_a_slice_can_bear_many() -> None:
    """At equal starts the order in the file would decide the direction of an arrow; its later end does not."""
    out, packets = sequence()
    packets.describe(process_track(1, 1, "rank 0", rank=0), track(2, "t", parent=1), track(3, "u", parent=1))
    count = 70
    effects = frame(packets, [(100, 110 + i) for i in range(count, 0, -1)]).with_columns(
        pl.Series("flow_end:a", list(range(1, count + 1)), dtype=pl.UInt64)
    )
    packets.slices(effects, lambda _: 2)
    cause = frame(packets, [(100, 500)]).with_columns(
        [pl.Series(f"flow:{i}", [i + 1], dtype=pl.UInt64) for i in range(count)], name=pl.lit(packets.names.id("cause"))
    )
    packets.slices(cause, lambda _: 3)
    rows = loaded(out).query(
        "select o.name, i.name from flow f join slice o on o.id = f.slice_out join slice i on i.id = f.slice_in"
    )
    assert sorted(rows) == sorted(("cause", f"s{i}") for i in range(count))


def test_counters_take_whole_and_broken_numbers() -> None:
    out, packets = sequence()
    packets.describe(track(1, "Cluster", explicit=True))
    packets.describe(counter_track(2, "count", parent=1, rank=0), counter_track(3, "power", parent=1, rank=1, unit="W"))
    packets.counter(2, np.array([T0, T0 + 5]), np.array([3, -2]))
    packets.counter(3, np.array([T0]), np.array([451.25]))
    rows = loaded(out).query(
        "select t.name, c.ts, c.value, t.unit from counter c join counter_track t on t.id = c.track_id "
        "order by t.name, c.ts"
    )
    assert rows == [("count", T0, 3.0, None), ("count", T0 + 5, -2.0, None), ("power", T0, 451.25, "W")]
    assert packets.samples_written == 3


def test_sequences_made_apart_can_be_put_one_after_another() -> None:
    data = b""
    for number in (3, 4):
        out = io.BytesIO()
        packets = PacketSequence(out.write, number)
        base = number << 20
        packets.describe(
            process_track(base, number, f"p{number}", rank=0), thread_track(base + 1, number, 50, "t", rank=0)
        )
        packets.slices(frame(packets, [(T0, T0 + number)]), lambda _, uuid=base + 1: uuid)  # type: ignore[misc]
        data += out.getvalue()
    trace = WasmTraceProcessor().load(data)
    assert trace.problems() == []
    assert trace.query(
        "select p.name, t.tid, s.name, s.dur from slice s join thread_track k on k.id = s.track_id "
        "join thread t using (utid) join process p using (upid) order by p.name"
    ) == [("p3", 50, "s0", 3), ("p4", 50, "s0", 4)]


@pytest.mark.parametrize("count", [1, 1 << 15, (1 << 15) + 1, 100_000])
def test_blocks_of_any_number_of_slices(count: int) -> None:
    out, packets = sequence()
    packets.describe(process_track(1, 1, "rank 0", rank=0), track(2, "t", parent=1))
    ts = T0 + np.arange(count, dtype=np.int64) * 3
    name = packets.names.id("k")
    rows = pl.DataFrame({"ts_ns": ts, "end_ns": ts + 2, "name": np.full(count, name), "int:n": np.arange(count)})
    packets.slices(rows, lambda _: 2)
    trace = loaded(out)
    assert trace.query("select count(*), sum(dur), max(ts) from slice") == [(count, 2 * count, int(ts[-1]))]
    assert trace.scalar("select sum(extract_arg(arg_set_id, 'debug.n')) from slice") == count * (count - 1) // 2


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("fused_moe_kernel", "fused_moe_kernel"),
        ("void at::native::reduce_kernel<512, 1, f<float> >(f<float>)", "at::native::reduce_kernel"),
        ("void (anonymous namespace)::qknorm<128l, ((anonymous namespace)::K)0>(P)", "qknorm"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_SendRecv"),
        ("void f<(bool)1, g(int)::{lambda(float)#1}>(int*, g(int))", "f"),
        ("broken<name", "broken<name"),
        ("a>b", "a>b"),
        ("", ""),
    ],
)
def test_short_kernel_names(name: str, short: str) -> None:
    assert short_kernel_name(name) == short

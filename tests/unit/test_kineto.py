"""The Kineto reader: both paths give what a plain JSON parse gives, whatever the layout and the size of the chunks."""

from __future__ import annotations

import gc
import gzip
import json
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Any

import kineto_files as kf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceana import demo_capture
from traceana.sources.kineto import RawTrace, read_kineto
from traceana.sources.kineto_events import COLUMNS, INTS, KIND_OF, NULL

DEMO = sorted((Path(demo_capture.__file__).parent / "capture" / "ranks").glob("*.gz"))

ROUNDED = ("109.70000000000002", "2.0005", "2.0015")

names = st.one_of(
    st.sampled_from(
        ["aten::mm", "x", "twelve_chars", "void k<{lambda(int)#1}>(a, b)", '}, {"', "}], ", "naïve_µs", ""]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)
times = st.integers(0, 10**16)
small = st.integers(0, 2**40)


@st.composite
def spans(draw: st.DrawFn) -> kf.Event:
    cat = draw(st.sampled_from([*KIND_OF, "python_function", "Trace", "unheard_of"]))
    args: dict[str, object] = {}
    for key in INTS:
        if draw(st.booleans()):
            args[key] = draw(st.integers(-(2**40), 2**62))
    for key, values in {
        "finished": st.booleans(),
        "Collective name": st.sampled_from(["send", "recv", "allreduce"]),
        "Src Rank": st.integers(0, 7),
        "dtype": st.sampled_from(["BFloat16", "Int"]),
        "Concrete Inputs": st.lists(st.text(max_size=8), max_size=3),
        "grid": st.lists(st.integers(0, 9), max_size=3),
        "nested": st.dictionaries(st.sampled_from(["ts", "stream", "b"]), st.integers(0, 9), max_size=2),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "nothing": st.none(),
    }.items():
        if draw(st.integers(0, 4)) == 0:
            args[key] = draw(values)
    event = kf.span(cat, draw(names), draw(times), draw(small), pid=draw(st.integers(-1, 2**31)), tid=draw(small))
    if draw(st.booleans()):
        event["args"] = args
    elif draw(st.booleans()):
        del event["args"]
    keys = draw(st.permutations(list(event))) if draw(st.integers(0, 3)) == 0 else list(event)
    return {key: event[key] for key in keys}


others = st.sampled_from(
    [
        {"ph": "s", "id": 3, "pid": 7, "tid": 7, "ts": kf.us(5), "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": 3, "pid": 0, "tid": 7, "ts": kf.us(5), "cat": "ac2g", "name": "ac2g", "bp": "e"},
        {
            "ph": "i",
            "cat": "cpu_instant_event",
            "s": "t",
            "name": "[memory]",
            "pid": 7,
            "tid": 7,
            "ts": 5,
            "args": {"a": 1},
        },
        {"name": "process_name", "ph": "M", "ts": kf.us(0), "pid": 7, "tid": 0, "args": {"name": "python"}},
        {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": kf.us(9)},
        {
            "ph": "X",
            "cat": "Trace",
            "ts": kf.us(1),
            "dur": kf.us(2),
            "pid": "Spans",
            "tid": "PyTorch Profiler",
            "name": "P",
        },
    ]
)


def expected(data: str | bytes) -> list[dict[str, Any]]:
    """The events that tables hold, by the standard library's JSON."""
    found = json.loads(data, parse_float=Decimal)
    rows = found["traceEvents"] if isinstance(found, dict) else found
    return [e for e in rows if e["ph"] == "X" and e["cat"] in KIND_OF]


def check(trace: RawTrace, rows: list[dict[str, Any]]) -> None:
    columns = trace.events.columns
    assert trace.events.names.to_list() == [e["name"] for e in rows]
    assert columns["kind"].tolist() == [KIND_OF[e["cat"]] for e in rows]
    for key in ("ts", "dur"):
        assert columns[key].tolist() == [int(Decimal(e[key]) * 1000) for e in rows]
    for key in ("pid", "tid"):
        assert columns[key].tolist() == [e[key] for e in rows]
    for key, column in INTS.items():
        assert columns[column].tolist() == [(e.get("args") or {}).get(key, NULL) for e in rows]
    assert columns["finished"].tolist() == [(e.get("args") or {}).get("finished", True) for e in rows]
    assert trace.events.talks.get_column("row").to_list() == [
        i for i, e in enumerate(rows) if (e.get("args") or {}).get("Collective name")
    ]


@pytest.mark.parametrize("chunks", [None, 2])
def test_nothing_of_a_trace_outlives_it(chunks: int | None) -> None:
    gc.disable()  # a cycle would keep it until some later time
    try:
        with ThreadPoolExecutor(chunks) if chunks else nullcontext() as pool:
            trace = read_kineto(DEMO[0], block=1 << 16, pool=pool)
            left = [weakref.ref(trace.events.columns[name]) for name in ("ts", "kind")]
            assert all(ref() is not None for ref in left)
            del trace
            assert all(ref() is None for ref in left)
    finally:
        gc.enable()


def same(a: RawTrace, b: RawTrace) -> None:
    assert a.events.names.to_list() == b.events.names.to_list()
    for name in COLUMNS:
        assert a.events.columns[name].tolist() == b.events.columns[name].tolist()
    assert a.events.talks.equals(b.events.talks)
    assert (a.events.metadata, a.events.unused) == (b.events.metadata, b.events.unused)
    assert (a.header, a.lost) == (b.header, b.lost)


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(st.one_of(spans(), others), min_size=1, max_size=25),
    layout=st.sampled_from(kf.LAYOUTS),
    block=st.integers(16, 3000),
    escaped=st.booleans(),
)
def test_every_path_gives_what_json_gives(
    tmp_path_factory: pytest.TempPathFactory, events: list[kf.Event], layout: str, block: int, escaped: bool
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.json"
    data = kf.text(events, kf.header(), layout, escaped=escaped)
    path.write_bytes(data.encode())
    fast = read_kineto(path)
    check(fast, expected(data))
    assert fast.lost == ()
    assert fast.header["distributedInfo"]["rank"] == 0
    same(fast, read_kineto(path, tolerant=True))
    same(fast, read_kineto(path, block=block))
    same(fast, read_kineto(path, block=block, tolerant=True))


@pytest.mark.parametrize("path", DEMO, ids=lambda p: p.name[-24:])
def test_real_traces_are_read_exactly(path: Path) -> None:
    fast = read_kineto(path)
    check(fast, expected(gzip.decompress(path.read_bytes())))
    assert fast.lost == ()
    assert fast.events.unused["phase f"] > 1000  # flow arrows are left out, and counted
    assert {m["args"]["name"] for m in fast.events.metadata if m["name"] == "process_name"} >= {
        "sglang::scheduler_PP0"
    } or ("PP1" in str(fast.events.metadata))


def test_chunks_and_threads_change_nothing_on_a_real_trace() -> None:
    whole = read_kineto(DEMO[0])
    for block in (70_001, 1 << 22):
        same(whole, read_kineto(DEMO[0], block=block))
    same(whole, read_kineto(DEMO[0], tolerant=True))
    with ThreadPoolExecutor(3) as pool:
        same(whole, read_kineto(DEMO[0], block=100_003, pool=pool))


def test_plain_text_in_a_file_called_gz_and_the_reverse(tmp_path: Path) -> None:
    events = [kf.kernel("k", 1000, 5, 1)]
    data = kf.text(events, kf.header()).encode()
    (tmp_path / "plain.json.gz").write_bytes(data)
    (tmp_path / "packed.json").write_bytes(gzip.compress(data))
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + data)
    for name in ("plain.json.gz", "packed.json", "bom.json"):
        trace = read_kineto(tmp_path / name)
        assert (trace.events.size, trace.lost) == (1, ())


def test_epoch_microseconds_keep_every_nanosecond(tmp_path: Path) -> None:
    stamps = [1_755_000_000_000_100_001 + n for n in range(50)]
    path = kf.write(tmp_path / "t.json", [kf.kernel("k", ts, 1, n) for n, ts in enumerate(stamps)])
    assert read_kineto(path).events.columns["ts"].tolist() == stamps
    assert [round(float(kf.us(ts)) * 1000) for ts in stamps] != stamps  # a float would not have kept them


@pytest.mark.parametrize(
    ("written", "ns"),
    [
        ("12", 12_000),
        ("12.5", 12_500),
        ("12.05", 12_050),
        ("0.001", 1),
        ("-3.25", -3_250),
        ("-0.001", -1),
        ("1e3", 1_000_000),
        ("1.5E-1", 150),
        ("4999999999999999.999", 4_999_999_999_999_999_999),
        ("123456789012.345", 123_456_789_012_345),
        ('"77.125"', 77_125),
        ("109.70000000000002", 109_700),
        ("2.0005", 2_000),
        ("2.0015", 2_002),
    ],
)
def test_every_way_to_write_a_time(tmp_path: Path, written: str, ns: int) -> None:
    data = kf.text([kf.kernel("k", 0, 1, 1), kf.kernel("l", 0, 1, 2), kf.kernel("m", 0, 1, 3)], kf.header())
    (tmp_path / "t.json").write_text(data.replace('"ts": 0.000', f'"ts": {written}'))
    for tolerant in (False, True):
        trace = read_kineto(tmp_path / "t.json", tolerant=tolerant)
        assert trace.events.columns["ts"].tolist() == [ns, ns, ns]
        rounded = [item.name for item in trace.lost]
        assert rounded == ["sub_nanosecond_rounded"] * (3 if written in ROUNDED else 0)


def test_integers_of_every_length(tmp_path: Path) -> None:
    values = [10**n for n in range(19)] + [9 * 10**n for n in range(18)] + [2**63 - 1, -(2**62), -1, 0]
    events = [kf.kernel("k", 10, 1, value) for value in values]
    path = kf.write(tmp_path / "t.json", events, layout="compact")
    assert read_kineto(path).events.columns["correlation"].tolist() == values


def test_top_level_list_and_odd_spacing(tmp_path: Path) -> None:
    rows = [kf.kernel("a", 1, 1, 1), kf.launch(0, 1, 1), kf.kernel("b", 5, 1, 2)]
    (tmp_path / "list.json").write_text(kf.text(rows, {}, "compact").removeprefix('{"traceEvents": ').removesuffix("}"))
    spaced = kf.text(rows, kf.header(), "compact").replace('"ts": ', '"ts"  :\t ').replace("}, {", "}\n\n,\r\n {")
    (tmp_path / "spaced.json").write_text(spaced)
    for name in ("list.json", "spaced.json"):
        trace = read_kineto(tmp_path / name)
        assert trace.events.names.to_list() == ["a", "cudaLaunchKernel", "b"]
        assert trace.lost == ()


def test_facts_after_the_events_are_found(tmp_path: Path) -> None:
    data = '{"traceEvents": [' + json.dumps(
        {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 2}
    )
    data += '], "deviceProperties": [{"id": 0}, {"id": 1}], "baseTimeNanoseconds": 1719853884000000000, '
    data += '"distributedInfo": {"rank": 3, "world_size": 4}}'
    (tmp_path / "t.json").write_text(data)
    for block in (20, 64, 1 << 19):
        trace = read_kineto(tmp_path / "t.json", block=block)
        assert (trace.events.size, trace.lost) == (1, ())
        assert trace.header["baseTimeNanoseconds"] == 1719853884000000000
        assert trace.header["distributedInfo"]["rank"] == 3

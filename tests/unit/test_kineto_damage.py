"""Damaged traces: what is sound is kept, what is lost is counted with its place, and nothing raises a traceback."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path
from typing import Any

import kineto_files as kf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceana.errors import SourceError
from traceana.sources.kineto import MergedTrace, RawTrace, read_kineto
from traceana.sources.limits import Limits

EVENTS = [
    event
    for n in range(40)
    for event in (kf.launch(100 * n, 5, n + 1), kf.kernel(f"kernel_{n}", 100 * n + 10, 50, n + 1, est=kf.Number("0.5")))
]
TEXT = kf.text(EVENTS, kf.header())


def read(tmp_path: Path, data: str | bytes, **how: object) -> RawTrace:
    path = tmp_path / "t.json"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return read_kineto(path, **how)  # type: ignore[arg-type]


def losses(trace: RawTrace) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in trace.lost:
        found[item.name] = found.get(item.name, 0) + item.count
    return found


def spoil(old: str, new: str, text: str = TEXT) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "kept", "lost"),
    [
        ('"kernel_3"', r'"ker\nel_3"', 80, {}),
        ('"kernel_3"', r'"ker\qel_3"', 80, {"event_repaired": 1}),
        ('"kernel_3"', r'"C:\Users\uxyz"', 80, {"event_repaired": 1}),
        ('"kernel_3"', '"ker\x01\n\tnel_3"', 80, {}),
        ('"kernel_3"', '"a"b"', 80, {"event_repaired": 1}),
        ('"kernel_3"', '\ufeffkernel_3"', 79, {"event_broken": 1}),
        ('"kernel_3"', '"Library("_x", "IMPL")\n(1)"', 80, {"event_repaired": 1}),
        ('"est": 0.5', '"est": NaN', 80, {}),
        ('"est": 0.5', '"est": -Infinity, "b": Infinity', 80, {}),
        ('"est": 0.5', '"est": -nan', 80, {}),
        ('"grid": [1, 1, 1]', '"grid": [1, 1, 1,]', 80, {}),
        ('"name": "kernel_3", "pid"', '"name": "kernel_3",, "pid"', 80, {}),
        ('"ts": 0.110', '"ts": NaN', 79, {"event_without_time": 1}),
        ('"ts": 0.110', '"ts": "NaN"', 79, {"event_without_time": 1}),
        ('"ts": 0.110', '"ts": null', 79, {"event_without_time": 1}),
        ('"ts": 0.110', '"ts": [1]', 79, {"event_without_time": 1}),
        ('"ts": 0.110', '"ts": 1e300', 79, {"event_absurd_time": 1}),
        ('"ts": 0.110', '"ts": 1e999999999', 79, {"event_absurd_time": 1}),
        ('"ts": 0.110', '"ts": 1e99999999999999999999', 79, {"event_without_time": 1}),
        ('"est": 0.5', '"est": 1e99999999999999999999', 80, {}),
        ('"ts": 0.110', '"ts": 99999999999999999999999999', 79, {"event_absurd_time": 1}),
        ('"ts": 0.110', '"ts": 5000000000000000.000', 79, {"event_absurd_time": 1}),
        ('"ts": 0.110, "dur": 0.050', '"ts": 0.110', 79, {"event_without_time": 1}),
        ('"ts": 0.110', '"ts": "0.110"', 80, {}),
        ('"ts": 0.110', '"ts": 0.120, "ts": 0.110', 80, {"event_duplicate_key": 1}),
        ('"pid": 0, "tid": 7', '"pid": "x", "tid": 7', 79, {"event_without_thread": 1}),
        ('"pid": 0, "tid": 7', '"pid": 0, "tid": "stream 7 "', 80, {}),
        ('"correlation": 4,', '"correlation": "4",', 80, {}),
        ('"correlation": 4,', '"correlation": 4.5,', 80, {}),
        ('"correlation": 4,', '"correlation": 99999999999999999999,', 80, {}),
        ('"cat": "kernel", ', "", 79, {"event_without_category": 1}),
        ('"ph": "X", "cat": "kernel"', '"cat": "kernel"', 79, {"not_an_event": 1}),
        ('"name": "kernel_3", ', "", 80, {}),
        ('"traceEvents": [', '"traceEvents": [17, null, "text", [1, 2],', 80, {"not_an_event": 4}),
        ('  }\n  ],\n  "traceName"', '  },\n  ],\n  "traceName"', 80, {}),
        ('"traceName": "t.json"', '"traceName": oops', 80, {"header_broken": 1}),
        ("  },\n  {\n", "  },\n ]{\n", 80, {"not_an_event": 1}),
        ("  },\n  {\n", "  }],\n  {\n", 80, {"not_an_event": 1}),
        ("  },\n  {\n", "  }]\n, [\n  {\n", 80, {"not_an_event": 2}),
    ],
)
def test_one_flaw(tmp_path: Path, old: str, new: str, kept: int, lost: dict[str, int]) -> None:
    data = spoil(old, new)
    for how in ({}, {"tolerant": True}, {"block": 700}):
        trace = read(tmp_path, data, **how)
        assert trace.events.size == kept
        # The fast path does not look at what no table needs; where it gives an event as it is, nothing was lost.
        seen = {name: n for name, n in losses(trace).items() if lost or name != "event_repaired"}
        assert seen == lost
        assert trace.header["distributedInfo"]["rank"] == 0
        for item in trace.lost:
            if item.start >= 0 and item.name != "not_an_event":
                piece = data.encode()[item.start : item.stop].decode()
                assert piece.startswith("{") and piece.endswith("}") and piece.count('"name"') <= 1


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    trace = read(tmp_path, TEXT.encode().replace(b"kernel_3", b"ker\xff\xfe_3", 1))
    assert trace.events.size == 80
    assert losses(trace) == {"bad_utf8": 1}
    assert "ker\ufffd\ufffd_3" in trace.events.names.to_list()


def test_a_broken_event_in_the_middle_is_dropped_with_its_bytes(tmp_path: Path) -> None:
    data = spoil('"name": "kernel_3", "pid": 0,', '"name": {{{, "pid"')
    for how in ({}, {"tolerant": True}, {"block": 500}):
        trace = read(tmp_path, data, **how)
        assert trace.events.size == 79
        [item] = trace.lost
        assert item.name == "event_broken"
        assert '"name": {{{' in data[item.start : item.stop]
        assert data[item.start : item.stop].count('"cat"') == 1


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, len(TEXT)))
def test_a_text_cut_anywhere_gives_the_events_before_the_cut(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "t.json"
    path.write_text(TEXT[:cut])
    ends = [m.end() for m in re.finditer(r"\n    }\n  }", TEXT)]
    whole = sum(end <= cut for end in ends)
    try:
        trace = read_kineto(path)
    except SourceError as error:
        assert whole == 0 and error.hint and error.where
        return
    assert trace.events.size == whole
    if cut < len(TEXT) - 30:
        assert "trace_truncated" in losses(trace)
        # Zero to 2 ms of text may hold the facts beside the events or not; the base before the events is kept.
        assert trace.header["baseTimeNanoseconds"] == kf.BASE_NS


def mutated(data: st.DataObject, raw: bytearray) -> None:
    at = data.draw(st.integers(0, len(raw) - 1))
    cut = data.draw(st.integers(0, 60))
    raw[at : at + cut] = data.draw(st.binary(max_size=12) | st.sampled_from([bytes([c]) for c in b'"{}[]\\,:\0']))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_one_random_flaw_loses_little_and_never_in_silence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    raw = bytearray(TEXT.encode())
    head = TEXT.index('"traceEvents": [') + 20
    body = raw[head:-60]
    mutated(data, body)
    path = tmp_path_factory.mktemp("flaw") / "t.json"
    path.write_bytes(bytes(raw[:head] + body + raw[-60:]))
    whole, chunked = read_kineto(path), read_kineto(path, block=800)
    assert whole.events.names.to_list() == chunked.events.names.to_list()
    assert whole.events.size >= 76
    assert whole.events.size >= 80 or whole.lost or whole.events.unused or whole.events.metadata


@settings(max_examples=80, deadline=None)
@given(data=st.data(), flaws=st.integers(1, 12), block=st.integers(40, 4000))
def test_many_random_flaws_raise_nothing_but_a_source_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, flaws: int, block: int
) -> None:
    raw = bytearray(TEXT[:5000].encode() + TEXT[-900:].encode())
    for _ in range(flaws):
        mutated(data, raw)
    path = tmp_path_factory.mktemp("flaws") / "t.json"
    path.write_bytes(bytes(raw))
    ways: list[dict[str, Any]] = [{}, {"block": block}, {"tolerant": True}]
    for how in ways:
        try:
            trace = read_kineto(path, **how)
        except SourceError as error:
            assert error.hint
        else:
            assert all(0 <= item.start <= item.stop <= len(raw) for item in trace.lost if item.start >= 0)


def test_gz_cut_short(tmp_path: Path) -> None:
    packed = gzip.compress(TEXT.encode())
    trace = read(tmp_path, packed[: len(packed) // 2])
    assert 0 < trace.events.size < 80
    assert losses(trace) == {"gz_truncated": 1, "trace_truncated": 1}


def test_gz_with_trailing_bytes_and_padding(tmp_path: Path) -> None:
    packed = gzip.compress(TEXT.encode())
    assert losses(read(tmp_path, packed + b"\0" * 512)) == {}
    trace = read(tmp_path, packed + b"garbage")
    assert trace.events.size == 80
    assert losses(trace) == {"gz_trailing_bytes": 1}


def test_gz_of_two_members_is_one_text(tmp_path: Path) -> None:
    data = TEXT.encode()
    trace = read(tmp_path, gzip.compress(data[:5000]) + gzip.compress(data[5000:]))
    assert trace.events.size == 80
    assert trace.lost == ()


def test_gz_with_a_wrong_checksum_keeps_everything(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(TEXT.encode()))
    packed[-6] ^= 0xFF
    trace = read(tmp_path, bytes(packed))
    assert trace.events.size == 80
    assert losses(trace) == {"gz_damaged": 1}


def test_gz_with_a_flipped_bit_keeps_what_was_before_it(tmp_path: Path) -> None:
    noise = [kf.kernel(f"k{zlib.crc32(str(n).encode())}", 100 * n, 50, n) for n in range(4000)]
    packed = bytearray(gzip.compress(kf.text(noise, kf.header()).encode()))
    packed[len(packed) // 2] ^= 0xFF
    trace = read(tmp_path, bytes(packed))
    assert 1000 < trace.events.size < 4000
    assert trace.events.columns["correlation"].tolist()[:1000] == list(range(1000))
    assert {"gz_damaged", "trace_truncated"} & set(losses(trace))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"\x1f\x8b\x08\x00", "damaged before its first event"),
        (gzip.compress(b""), "not a Kineto trace"),
        (b'{"traceEvents": [', "nothing in the trace is sound"),
        (b'{"model": 1}', "not a Kineto trace"),
        (b"not json at all", "not a Kineto trace"),
        (b"PK\x03\x04rest", "is zip"),
        ("{}".encode("utf-16"), "UTF-16"),
    ],
)
def test_nothing_sound_is_refused_with_a_hint(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(SourceError, match=says) as raised:
        read(tmp_path, data)
    assert raised.value.where == str(tmp_path / "t.json")
    assert raised.value.hint


def test_two_traces_written_into_one_file_are_an_error_row(tmp_path: Path) -> None:
    trace = read(tmp_path, TEXT + TEXT)
    assert trace.events.size == 80
    assert losses(trace) == {"several_traces_in_one_file": 1}


def test_a_merge_is_told_by_its_process_ids(tmp_path: Path) -> None:
    merged = [{**event, "pid": f"[TP00-PP0{n % 2}] {event['pid']}"} for n, event in enumerate(EVENTS)]
    with pytest.raises(MergedTrace) as raised:
        read(tmp_path, kf.text(merged, kf.header()), block=900)
    assert raised.value.labels == ("TP00-PP00", "TP00-PP01")


def test_a_gz_bomb_is_refused_and_can_be_allowed(tmp_path: Path) -> None:
    bomb = gzip.compress(b'{"traceEvents": [' + b" " * (8 << 20) + b"]}")
    with pytest.raises(SourceError, match="times its size"):
        read(tmp_path, bomb, limits=Limits(ratio_from_bytes=1 << 20))
    with pytest.raises(SourceError, match="larger than"):
        read(tmp_path, bomb, limits=Limits(text_bytes=1 << 20))
    assert read(tmp_path, bomb, limits=Limits(ratio=5000, ratio_from_bytes=1 << 20)).events.size == 0


def test_deep_nesting_and_gigantic_strings_cost_one_event(tmp_path: Path) -> None:
    deep = spoil('"grid": [1, 1, 1]', '"grid": ' + "[" * 200_000 + "]" * 200_000)
    trace = read(tmp_path, deep)
    assert trace.events.size == 80  # no table needs the grid, and the fast path does not descend into it
    deep = spoil('"grid": [1, 1, 1]', '"grid": ' + '{"a":' * 100_000 + "1" + "}" * 100_000)
    trace = read(tmp_path, deep)
    assert (trace.events.size, losses(trace)) == (79, {"event_broken": 1})
    trace = read(tmp_path, spoil('"kernel_3"', '"' + "x" * (3 << 20) + '"'))
    assert trace.events.size == 80
    trace = read(tmp_path, spoil('"kernel_3"', '"' + "x" * (40 << 20) + '"'))
    assert trace.events.size == 79
    assert trace.lost

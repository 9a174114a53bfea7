"""The path by keys gives what the structural index gives, on every stretch it takes, and refuses the others."""

from __future__ import annotations

from collections.abc import Sequence

import kineto_files as kf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceana.sources import kineto_fast
from traceana.sources.kineto_events import NULL, Events
from traceana.sources.kineto_fast import parse_plain
from traceana.sources.kineto_index import NotPlain
from traceana.sources.kineto_keys import parse_keys
from traceana.sources.kineto_words import SLACK, different, word_view

PAD = b" " * SLACK


MARK = kf.kernel("the event after the stretch", 0, 0, 1)


def stretch(events: Sequence[kf.Event], layout: str) -> tuple[bytes, int, int]:
    """`events`, followed by one more, and where they start and stop."""
    data = kf.text([*events, MARK], kf.header(), layout).encode()
    start = data.index(b"{", data.index(b'"traceEvents"'))
    stop = data.rindex(b"}", start, data.rindex(b"{", start, data.index(b'"the event after'))) + 1
    buffer = PAD + data[start:] + PAD
    return buffer, SLACK, stop + SLACK - start


def both(events: Sequence[kf.Event], layout: str) -> tuple[Events, Events]:
    """`events` by either path."""
    where = stretch(events, layout)
    return parse_keys(*where), parse_plain(*where)


def same(one: Events, two: Events) -> None:
    assert one.names.to_list() == two.names.to_list()
    assert {name: values.tolist() for name, values in one.columns.items()} == {
        name: values.tolist() for name, values in two.columns.items()
    }
    assert one.talks.equals(two.talks)
    assert (one.metadata, one.unused, one.lost) == (two.metadata, two.unused, two.lost)


PLAIN: list[kf.Event] = [
    event
    for n in range(30)
    for event in (
        kf.launch(100 * n, 5, n),
        kf.kernel(f"void f<{n}>(int)", 100 * n + 10, 50, n, bytes=n, est=kf.Number("0.5")),
        {"ph": "s", "id": n, "pid": 7, "tid": 7, "ts": kf.us(100 * n), "cat": "ac2g", "name": "ac2g"},
        kf.span("python_function", f"file.py({n})", 100 * n, 3),
        kf.span("user_annotation", "step", 100 * n, 3, finished=False),
    )
]


@pytest.mark.parametrize("layout", kf.LAYOUTS)
def test_every_layout_of_a_writer_is_taken(layout: str) -> None:
    found, expected = both(PLAIN, layout)
    same(found, expected)
    assert found.size == 90
    assert found.unused == {"phase s": 30, "category python_function": 30}


@pytest.mark.parametrize("layout", kf.LAYOUTS)
def test_white_space_of_its_own_in_the_first_event_moves_no_other(layout: str) -> None:
    buffer, start, stop = stretch([*PLAIN, OP, ODD[0], *PLAIN], layout)
    buffer = buffer[: start + 1] + b" \n " + buffer[start + 1 :]
    one, two = parse_keys(buffer, start, stop + 3), parse_plain(buffer, start, stop + 3)
    same(one, two)
    assert one.lost == []


def message(n: int, **args: object) -> kf.Event:
    said = {
        "External id": n,
        "Collective name": "send",
        "dtype": "Byte",
        "In msg nelems": n,
        "Process Group Name": "7",
    }
    return {**kf.span("cpu_op", "record_param_comms", 100 * n, 3), "args": {**said, **args}}


@pytest.mark.parametrize("layout", kf.LAYOUTS)
def test_messages_are_read_by_their_columns(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [message(n, **{"Dst Rank": n % 3, "Ratio": kf.Number("1.50"), "Seq": str(n)}) for n in range(40)]
    where = stretch(events, layout)
    expected = parse_plain(*where)

    def never(*_: object, **__: object) -> tuple[int, bool]:
        raise AssertionError

    monkeypatch.setattr(kineto_fast, "parse_tolerant", never)
    found = parse_keys(*where)
    same(found, expected)
    assert found.talks.select("row", "dst_rank", "in_elements", "seq").rows() == [(n, n % 3, n, n) for n in range(40)]


@pytest.mark.parametrize(
    "odd",
    [
        {"Collective name": None}, {"Collective name": 7}, {"Src Rank": 1 << 70}, {"Src Rank": kf.Number("1e3")},
        {"dtype": kf.Number("NaN")}, {"dtype": kf.Number("Naughty")}, {"dtype": kf.Number("1, \"dtype\": 2")},
        {"dtype": kf.Number("\"a\\u0062\"")}, {"dtype": {"Seq": 3}}, {"dtype": ["Seq", {"dtype": 2}]},
        {"dtype": kf.Number("3}, \"args\": {\"dtype\": 4")}, {"dtype": kf.Number("3}, \"more\": {\"x\": 4")},
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", kf.LAYOUTS)
def test_odd_messages_are_what_the_tolerant_path_makes_of_them(layout: str, odd: dict[str, object]) -> None:
    events = [message(n, **(odd if n == 23 else {"Src Rank": n})) for n in range(40)]
    same(*both(events, layout))


def test_a_stretch_of_events_that_no_table_needs_gives_none() -> None:
    unneeded = [event for event in PLAIN if event["ph"] == "s" or event.get("cat") == "python_function"]
    found, expected = both(unneeded, "kineto")
    same(found, expected)
    assert (found.size, found.unused.total()) == (0, 60)


@pytest.mark.parametrize("layout", kf.LAYOUTS)
def test_a_key_that_ends_as_a_needed_one_is_another(layout: str) -> None:
    """Only the last eight bytes of a long key are compared with those of the event that its shape was learned from."""
    events = [dict(event) for event in PLAIN]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    for n, key in enumerate(["decorrelation", "an External id", "un finished", "Collective Collective name"], 3):
        kernels[n]["args"] = {key: 77, **kernels[n]["args"]}
    kernels[9]["args"] = {f"de{key}": value for key, value in kernels[9]["args"].items()}
    found, expected = both(events, layout)
    same(found, expected)
    correlations = found.columns["correlation"][found.columns["kind"] == 0].tolist()
    assert correlations == [NULL if n == 9 else n for n in range(30)]


NAMES = st.sampled_from(
    ["k", "", "void f<{lambda(int)#1}>", "{", "}}, {", "n\u00e9e", 'a "quote"', "back\\slash", "x" * 40]
)
OP = kf.span("cpu_op", "aten::mm", 5, 5)
ODD: list[kf.Event] = [
    {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}},
    {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": 1},
    {"ph": "i", "name": "mark", "pid": 1, "tid": 1, "ts": 1, "args": {"a": {"b": 1}}},
    {**OP, "name": "nested", "args": {"External id": 1, "more": {"correlation": 9, "ph": "X"}}},
    {**kf.launch(5, 5, 3), "correlation": 12},
    {"ph": "X", "cat": "cpu_op", "name": "no args", "pid": 7, "tid": 7, "ts": kf.us(5), "dur": kf.us(7)},
    {"ph": "X", "cat": "cpu_op", "name": "empty args", "pid": 7, "tid": 7, "ts": kf.us(5), "dur": kf.us(7), "args": {}},
    {"cat": "kernel", "name": "no phase", "pid": 7, "tid": 7, "ts": kf.us(5), "dur": kf.us(7)},
    {**OP, "name": "c10d::send", "args": {"External id": 4, "Collective name": "send", "Dst Rank": 1}},
    kf.span("cpu_op", "text in args", 5, 5, said='"correlation": 5, "stream": 7', empty="", deep=[[1, "]"], {}]),
    kf.kernel("large", 5, 5, 1 << 70),
]


@settings(max_examples=120, deadline=None)
@given(
    odd=st.lists(st.tuples(st.integers(0, 150), st.sampled_from(ODD)), max_size=4),
    names=st.lists(st.tuples(st.integers(0, 149), NAMES), max_size=6),
    layout=st.sampled_from(kf.LAYOUTS),
)
def test_events_out_of_the_ordinary_are_read_as_by_the_index(
    odd: list[tuple[int, kf.Event]], names: list[tuple[int, str]], layout: str
) -> None:
    events = [dict(event) for event in PLAIN]
    for at, name in names:
        events[at]["name"] = name
    for at, event in odd:
        events.insert(at, event)
    try:
        found, expected = both(events, layout)
    except NotPlain:
        return
    same(found, expected)


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=70) | st.sampled_from(["a" * 40, "a" * 39 + "b"])))
def test_strings_are_told_apart_and_come_back(texts: list[str]) -> None:
    data = [text.encode() for text in texts]
    stop = np.cumsum([len(text) for text in data], dtype=np.int64) + SLACK
    buffer = PAD + b"".join(data) + PAD
    found, place = different(buffer, word_view(buffer), stop - np.array([len(t) for t in data], dtype=np.int64), stop)
    assert [found[at] for at in place] == texts
    assert sorted(found) == sorted(set(texts))


def test_strings_with_the_same_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceana.sources.kineto_words._MIX", np.zeros(3, dtype=np.uint64))
    buffer = PAD + b"x" * 30 + b"y" * 30 + b"x" * 20 + b"z" * 10 + PAD
    start = np.array([0, 30, 60, 0], dtype=np.int64) + SLACK
    found, place = different(buffer, word_view(buffer), start, start + 30)
    assert [found[at] for at in place] == ["x" * 30, "y" * 30, "x" * 20 + "z" * 10, "x" * 30]


def test_a_last_event_that_lost_where_its_args_begin_is_said() -> None:
    """Its two closing braces promise args that no key of the stretch opens."""
    text = """
  {
    "ph": "X", "cat": "user_annotation", "name": "recv_requests", "pid": 7, "tid": 7,
    "ts": 0.000, "dur": 0.100,
    "args": {

    }
  },
  {
    "ph": "X", "cat": "user_annotation", "name": "run_batch", "pid": 7, "tid": 7,
    "ts": 0.200, "dur": 0.3
    }
  }"""
    buffer = PAD + text.encode() + b",\n  {\n    " + PAD
    start, stop = buffer.index(b"{"), SLACK + len(text)
    found = parse_keys(buffer, start, stop)
    assert found.names.to_list() == ["recv_requests", "run_batch"]
    assert [(lost.name, lost.count) for lost in found.lost] == [("event_broken", 1)]

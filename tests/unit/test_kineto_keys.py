"""The path by keys gives what the structural index gives, on every stretch it takes, and refuses the others."""

from __future__ import annotations

from collections.abc import Sequence

import kineto_files as kf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceana.sources.kineto_events import NULL, Events
from traceana.sources.kineto_fast import parse_plain
from traceana.sources.kineto_index import NotPlain
from traceana.sources.kineto_keys import parse_keys
from traceana.sources.kineto_words import SLACK, different, word_view

PAD = b" " * SLACK


MARK = kf.kernel("the event after the stretch", 0, 0, 1)


def both(events: Sequence[kf.Event], layout: str) -> tuple[Events, Events]:
    """`events`, followed by one more, by either path."""
    data = kf.text([*events, MARK], kf.header(), layout).encode()
    start = data.index(b"{", data.index(b'"traceEvents"'))
    stop = data.rindex(b"}", start, data.rindex(b"{", start, data.index(b'"the event after'))) + 1
    buffer = PAD + data[start:] + PAD
    stop += SLACK - start
    return parse_keys(buffer, SLACK, stop), parse_plain(buffer, SLACK, stop)


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

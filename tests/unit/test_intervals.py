"""Intervals against brute force over small integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from traceana.intervals import Intervals, intersect, intersect_pairs, subtract, union, within

Pairs = list[tuple[int, int]]
pairs = st.lists(st.tuples(st.integers(-30, 30), st.integers(-30, 30)), max_size=12)


def _arrays(items: Pairs) -> Intervals:
    return Intervals(np.array([a for a, _ in items], dtype=np.int64), np.array([b for _, b in items], dtype=np.int64))


def _points(items: Intervals) -> set[int]:
    return {x for a, b in zip(items.start.tolist(), items.end.tolist(), strict=True) for x in range(a, b)}


def _is_set(items: Intervals) -> bool:
    return bool(np.all(items.start < items.end)) and bool(np.all(items.start[1:] > items.end[:-1]))


@given(pairs)
def test_union_covers_the_same_points_and_is_a_set(items: Pairs) -> None:
    merged = union(*_arrays(items))
    assert _points(merged) == _points(_arrays(items))
    assert _is_set(merged)
    assert merged.total == len(_points(merged))


@given(pairs, pairs)
def test_intersect_and_subtract_partition_the_first_set(a: Pairs, b: Pairs) -> None:
    first, second = union(*_arrays(a)), union(*_arrays(b))
    both, rest = intersect(first, second), subtract(first, second)
    assert _points(both) == _points(first) & _points(second)
    assert _points(rest) == _points(first) - _points(second)
    assert both.total + rest.total == first.total


@given(pairs, pairs)
def test_intersect_pairs_names_both_sides(a: Pairs, b: Pairs) -> None:
    first, second = _arrays([p for p in a if p[0] < p[1]]), union(*_arrays(b))
    left, right, over = intersect_pairs(first, second)
    expected = {
        (i, k, max(x, int(s)), min(y, int(e)))
        for i, (x, y) in enumerate(zip(first.start.tolist(), first.end.tolist(), strict=True))
        for k, (s, e) in enumerate(zip(second.start.tolist(), second.end.tolist(), strict=True))
        if max(x, s) < min(y, e)
    }
    got = set(zip(left.tolist(), right.tolist(), over.start.tolist(), over.end.tolist(), strict=True))
    assert got == expected


@given(pairs, st.lists(st.integers(-35, 35), max_size=20))
def test_within_finds_the_span_that_holds_a_point(items: Pairs, points: list[int]) -> None:
    spans = union(*_arrays(items))
    for point, index in zip(points, within(np.array(points, dtype=np.int64), spans).tolist(), strict=True):
        holds = [k for k in range(spans.start.size) if spans.start[k] <= point < spans.end[k]]
        assert holds == ([index] if index >= 0 else [])

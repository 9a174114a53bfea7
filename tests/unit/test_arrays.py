"""Distinct values and groups against numpy's own."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from traceana.arrays import distinct, groups_of, mapped, numbered

SMALL = st.integers(-3, 3)  # few enough for a table of all values
VALUES = st.lists(SMALL, max_size=20) | st.lists(SMALL | st.integers(-(1 << 63), (1 << 63) - 1), max_size=20)


@given(values=VALUES)
def test_distinct_values_in_order_and_the_place_of_each(values: list[int]) -> None:
    column = np.array(values, dtype=np.int64)
    expected, place = np.unique(column, return_inverse=True)
    assert distinct(column).tolist() == expected.tolist()
    found, at = numbered(column)
    assert (found.tolist(), at.tolist()) == (expected.tolist(), place.tolist())


@given(rows=st.lists(st.tuples(st.integers(-2, 2), st.integers(-1, 1 << 62), st.integers(0, 2)), max_size=20))
def test_rows_are_in_one_group_where_all_columns_are_equal(rows: list[tuple[int, int, int]]) -> None:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    groups = groups_of(*columns).tolist()
    assert [[a == b for a in rows] for b in rows] == [[a == b for a in groups] for b in groups]


@given(values=st.lists(SMALL, max_size=20))
def test_a_function_is_asked_once_for_each_value(values: list[int]) -> None:
    asked: list[int] = []

    def square(value: int) -> int:
        asked.append(value)
        return value * value

    assert mapped(np.array(values, dtype=np.int64), square).tolist() == [v * v for v in values]
    assert asked == sorted(set(values))

"""Distinct values of integer columns by sorting (numpy's own `unique` hashes, which takes ten times as long), and columns
in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["distinct", "groups_of", "mapped", "narrow", "numbered", "once"]

IntArray = NDArray[np.int64]


def distinct(values: IntArray) -> IntArray:
    """The different values in order."""
    ordered = np.sort(values, kind="stable")
    if ordered.size:
        ordered = ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))]
    return ordered


def numbered(values: IntArray) -> tuple[IntArray, IntArray]:
    """The different values in order, and for each of `values` its place among them."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    if high - low < 4 * values.size:  # few enough for a table of all
        offset = values.astype(np.int64) - low
        place = np.zeros(high - low + 1, dtype=np.int64)
        place[offset] = 1
        used = np.flatnonzero(place)
        place[used] = np.arange(used.size)
        return (used + low).astype(values.dtype), place[offset]
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    new = np.ones(values.size, dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    place = np.empty(values.size, dtype=np.int64)
    place[order] = np.cumsum(new) - 1
    return ordered[new], place


def mapped(values: IntArray, function: Callable[[int], int]) -> IntArray:
    """`function` of each of `values`, asked once for each different one."""
    different, place = numbered(values)
    return np.array([function(value) for value in different.tolist()], dtype=np.int64)[place]


def groups_of(*columns: IntArray) -> IntArray:
    """A number for each row; two rows have the same where all `columns` are equal."""
    key = np.zeros(columns[0].size, dtype=np.int64)
    for column in columns:
        _, place = numbered(column)
        key = numbered(key * (int(place.max(initial=0)) + 1) + place)[1]
    return key


def once(*columns: IntArray) -> tuple[IntArray, IntArray]:
    """The first row of each combination of values that occurs in `columns`, and for each row which of these it equals."""
    place = groups_of(*columns)
    first = np.empty(int(place.max(initial=-1)) + 1, dtype=np.int64)
    first[place[::-1]] = np.arange(place.size - 1, -1, -1)
    return first, place


def narrow(values: IntArray) -> IntArray:
    """The same numbers in the smallest type that holds them all, to be kept. Arithmetic with them has to have an int64 on
    the other side; a plain number takes their type, and may leave it."""
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    small = next(
        t for t in (np.int8, np.int16, np.int32, np.int64) if np.iinfo(t).min <= low and high <= np.iinfo(t).max
    )
    return cast(IntArray, values.astype(small))

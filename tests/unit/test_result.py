"""Tables that are made when they are first asked for."""

from __future__ import annotations

import polars as pl
import pytest

from traceana.result import Tables


def test_a_table_is_made_once_and_only_when_asked_for() -> None:
    made: list[str] = []

    def make() -> pl.DataFrame:
        made.append("late")
        return pl.DataFrame({"a": [1]})

    tables = Tables({"early": pl.DataFrame()}, {"late": make})
    assert list(tables) == ["early", "late"] and len(tables) == 2 and "late" in tables
    assert made == []
    assert tables["late"] is tables["late"]
    assert made == ["late"]
    with pytest.raises(KeyError):
        tables["never"]


def test_a_table_that_cannot_be_made_is_tried_again() -> None:
    tables = Tables({}, {"broken": lambda: pl.DataFrame({"a": [1], "b": [1, 2]})})
    for _ in range(2):
        with pytest.raises(pl.exceptions.ShapeError):
            tables["broken"]

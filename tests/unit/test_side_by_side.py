"""Work in a few threads gives what work one after the other gives, in order, and raises what it raises."""

from __future__ import annotations

import threading

import polars as pl
import pytest

from traceana.categories import matching
from traceana.engine import beside, side_by_side


@pytest.mark.parametrize("alone", [True, False])
def test_results_come_in_the_order_of_the_items(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    begun = [threading.Event() for _ in range(3)]

    def work(n: int) -> int:
        if not alone:  # the first may only end once the second has begun
            begun[n].set()
            assert begun[min(n + 1, 1)].wait(10)
        return n * n

    assert list(side_by_side(work, range(3), alone=alone)) == [0, 1, 4]
    assert list(side_by_side(work, [], alone=alone)) == []


def test_alone_works_on_an_item_when_it_is_asked_for() -> None:
    seen: list[int] = []
    found = side_by_side(seen.append, range(3), alone=True)
    next(found)
    assert seen == [0]


@pytest.mark.parametrize("alone", [True, False])
def test_what_the_work_raises_is_raised(alone: bool) -> None:
    with pytest.raises(ZeroDivisionError):
        list(side_by_side(lambda n: 1 // n, [1, 0, 1], alone=alone))
    with beside(lambda: 1 // 0, alone=alone) as found:
        pass
    with pytest.raises(ZeroDivisionError):
        found()


@pytest.mark.parametrize("alone", [True, False])
def test_beside_gives_the_result(alone: bool) -> None:
    with beside(lambda: 5, alone=alone) as found:
        assert found() == 5
    assert found() == 5


def test_words_match_as_their_rows_would() -> None:
    words = pl.Series(["cudaLaunchKernel", None, "cuLaunch", "aten::mm", "cudaLaunchKernel"], dtype=pl.Categorical)
    rows = words.cast(pl.String).str.contains("^cuda|mm$")
    assert matching(words, "^cuda|mm$").to_list() == rows.to_list() == [True, None, False, True, True]
    assert matching(words.clear(), "x").to_list() == []

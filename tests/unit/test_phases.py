"""The innermost span of nested ones, against brute force."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from traceana.model.phases import innermost


@st.composite
def nested(draw: st.DrawFn, depth: int = 3, low: int = 0, high: int = 60) -> list[tuple[int, int]]:
    """Properly nested spans."""
    spans: list[tuple[int, int]] = []
    at = low
    while at + 2 < high and draw(st.booleans()):
        start = draw(st.integers(at, high - 2))
        end = draw(st.integers(start + 1, high))
        spans.append((start, end))
        if depth:
            spans += draw(nested(depth=depth - 1, low=start, high=end))
        at = end
    return spans


@given(nested())
def test_innermost_is_the_shortest_open_span(spans: list[tuple[int, int]]) -> None:
    ordered = sorted(set(spans), key=lambda s: (s[0], -s[1]))
    start = np.array([s for s, _ in ordered], dtype=np.int64)
    end = np.array([e for _, e in ordered], dtype=np.int64)
    at = np.arange(-1, 62, dtype=np.int64)
    for time, index in zip(at.tolist(), innermost(start, end, at).tolist(), strict=True):
        open_ = [s for s in ordered if s[0] <= time < s[1]]
        shortest = min(open_, key=lambda s: (s[1] - s[0], -s[0]), default=None)
        assert (ordered[index] if index >= 0 else None) == shortest

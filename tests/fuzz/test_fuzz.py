"""A few hundred damaged inputs, the same every time: an answer that adds up, or words, and nothing else.

More, by hand: `python -m fuzz --help` in tests/.
"""

from __future__ import annotations

import pytest

from fuzz.__main__ import attempt
from fuzz.cases import KINDS
from fuzz.memory import Peak

# How many of each kind: about half a minute in all.
COUNTS = {"events": 24, "text": 80, "sqlite": 40, "sqlite_bytes": 60}
OTHERS = 21


@pytest.mark.parametrize("kind", list(KINDS))
def test_damaged_inputs_are_answered_or_refused(kind: str) -> None:
    results = [attempt(kind, number) for number in range(COUNTS.get(kind, OTHERS))]
    assert [r for r in results if r.startswith("BROKEN")] == []
    assert "read" in results or "report" in results  # the damage is not so great that nothing is tested


def test_the_peak_of_a_piece_of_work_is_seen() -> None:
    with Peak() as peak:
        held = bytearray(b"x") * (200 << 20)
        del held
    if not peak.known:
        pytest.skip(
            "this kernel does not let a process start its peak anew: the memory of damaged inputs is not checked"
        )
    assert 190 << 20 <= peak.bytes < 240 << 20  # the kernel's counters lag by some pages

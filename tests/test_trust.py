"""docs/trust.md: every attack and fault of its checklist has a test, and the count is what it says."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PAGE = (TESTS.parent / "docs" / "trust.md").read_text(encoding="utf-8")
ROWS = re.findall(r"(?m)^\| (\d+) \| .+ \| `([\w/.]+)::(\w+)` \|$", PAGE)


def test_every_attack_and_fault_has_its_test() -> None:
    absent = []
    for _, file, name in ROWS:
        text = (TESTS / file).read_text(encoding="utf-8") if (TESTS / file).is_file() else ""
        if not re.search(rf"(?m)^def {name}\(", text):
            absent.append(f"{file}::{name}")
    assert absent == []


def test_the_checklist_is_counted() -> None:
    assert [int(number) for number, _, _ in ROWS] == list(range(1, len(ROWS) + 1))
    assert len(ROWS) == len(re.findall(r"(?m)^\| \d+ \|", PAGE)) >= 40
    assert f"\n{len(ROWS)} attacks and faults" in PAGE

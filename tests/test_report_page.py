"""The reference page of the report names every key that a report of a real capture has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from captures import real, report_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "report.md"
# Their keys are the server's or the trace's own words.
OPEN = {"arguments", "environment", "versions", "modes", "skipped"}


def keys(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """(where, key) of every key in a document, those of open mappings left out."""
    if isinstance(value, dict):
        for key, inside in value.items():
            yield path, str(key)
            if key not in OPEN:
                yield from keys(inside, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from keys(inside, path)


@pytest.mark.parametrize("letter", ["demo", "A", "F", "O"])
def test_every_key_is_on_the_page(letter: str) -> None:
    words = set(re.findall(r"\w+", PAGE.read_text(encoding="utf-8")))
    missing = sorted({f"{where}.{key}" for where, key in keys(report_of(real(letter)).document) if key not in words})
    assert missing == []


def test_top_keys_head_their_rows() -> None:
    """A key named in passing is not documented: top-level keys must open a row or be in the page's head."""
    page = PAGE.read_text(encoding="utf-8")
    head = page.split("\n## ")[0]
    rows = set(re.findall(r"^(?:\| |## )`(\w+)", page, flags=re.MULTILINE)) | set(re.findall(r"`(\w+)`", head))
    assert set(report_of(real("A")).document) <= rows

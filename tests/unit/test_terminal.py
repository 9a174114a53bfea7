"""The terminal report: narrow, plain, harmless, and its numbers add up as printed."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_sample import HOSTILE, sample

from traceana.outputs.terminal import render_terminal
from traceana.outputs.words import CAUSES, CLASSES, apportion, duration, exact_ms, plain_text, stage_names


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_fits(ranks: int, width: int) -> None:
    text = render_terminal(sample(ranks=ranks)[0], width=width, color=False)
    assert max(map(columns, text.splitlines())) <= width
    assert "\x1b" not in text


def test_colour_only_adds_colour() -> None:
    document, _ = sample()
    plain, coloured = (render_terminal(document, color=c) for c in (False, True))
    assert "\x1b[" in coloured
    bare = "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines())
    assert bare == plain.rstrip("\n")


def test_order() -> None:
    text = render_terminal(sample()[0])
    heads = [
        "Answers",
        "What to change",
        "Where each stage's time went",
        "Who holds whom up",
        "Batch sizes",
        "Messages",
        "MoE",
        "CUDA graphs",
        "Clocks",
        "Lost",
    ]
    at = [text.index(f"\n{head}") for head in heads]
    assert at == sorted(at)


def test_hostile_names_cannot_act() -> None:
    document, _ = sample(hostile=True)
    text = render_terminal(document, color=False)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028]", text)
    assert r"\x1b[31mred" in text
    coloured = re.sub(r"\x1b\[[0-9;]*m", "", render_terminal(document, color=True))
    assert "\x1b" not in coloured and "\x07" not in coloured


def amounts(text: str) -> dict[str, list[int]]:
    """Label -> milliseconds in thousandths and percent in tenths, as printed in the stage table."""
    out: dict[str, list[int]] = {}
    for line in text.split("Where each stage's time went")[1].split("Who holds")[0].splitlines():
        found = re.findall(r"(?<![\w.])([\d,]+\.\d+)(?![\w.])", line)
        if found and "%" not in line:
            out[line[: line.index(found[0])].strip()] = [int(n.replace(",", "").replace(".", "")) for n in found]
    return out


@pytest.mark.parametrize("kernels", [3, 7, 19])
def test_stage_table_adds_up_as_printed(kernels: int) -> None:
    rows = amounts(render_terminal(sample(steps=7, kernels=kernels)[0]))
    for column in range(4):
        busy = sum(rows[k.label][column] for k in CLASSES if k.label in rows)
        bubble = sum(rows[k.label][column] for k in CAUSES if k.label in rows)
        assert (rows["busy"][column], rows["bubble"][column]) == (busy, bubble)
        assert busy + rows["transfer"][column] + bubble == rows["window"][column]
    assert rows["window"][1] == 1000


def test_unknown_facts() -> None:
    assert "Nothing: this capture gives no evidence for a change." in render_terminal({})
    document, _ = sample()
    for key in document:
        render_terminal({k: v for k, v in document.items() if k != key})
        render_terminal({k: None if k == key else v for k, v in document.items()})


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=20), st.integers(1, 10**7))
def test_apportion_sums_and_stays_close(parts: list[int], into: int) -> None:
    total = sum(parts)
    cells = apportion(parts, total, into)
    if total == 0:
        assert cells == [0] * len(parts)
        return
    assert sum(cells) == into
    assert all(abs(c * total - p * into) < total for c, p in zip(cells, parts, strict=True))


@given(st.integers(-(10**15), 10**15))
def test_exact_ms_is_exact(ns: int) -> None:
    assert int(exact_ms(ns).replace(",", "").replace(".", "")) == ns


def test_durations() -> None:
    said = {
        0: "0 ns",
        416: "416 ns",
        999: "999 ns",
        1000: "1.00 us",
        39_744: "39.7 us",
        999_400: "999 us",
        999_600: "1.00 ms",
        5_850_692: "5.85 ms",
        1_263_258_175: "1.26 s",
        60 * 10**9: "60.0 s",
        -1500: "-1.50 us",
    }
    assert {ns: duration(ns) for ns in said} == said
    assert duration(None) == "–"


def test_plain_text_keeps_what_is_harmless() -> None:
    assert plain_text("µs → ✓ 日本 é") == "µs → ✓ 日本 é"
    assert plain_text(HOSTILE[4]) == r"\x1b[31mred\x1b[0m \x1b]0;title\x07 \u202egnp.exe"


def test_stage_names() -> None:
    def named(*pairs: tuple[int, int | None], pp: int | None = 2) -> list[str]:
        return list(
            stage_names({"stages": [{"rank": r, "pp_rank": p} for r, p in pairs], "pipeline": {"pp_size": pp}}).values()
        )

    assert named((0, 0), (1, 1)) == ["stage 0", "stage 1"]
    assert named((0, 0), (1, 0), pp=1) == ["rank 0", "rank 1"]
    assert named((0, 0), (1, 0), (2, 1), (3, 1)) == [
        "stage 0, rank 0",
        "stage 0, rank 1",
        "stage 1, rank 2",
        "stage 1, rank 3",
    ]

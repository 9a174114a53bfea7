"""The HTML report as text: it adds up, it is closed, and whatever a trace holds stays text in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_sample import GAP, HOSTILE, KERNEL, LAUNCH, START, WAIT, sample

from traceana.errors import OutputError
from traceana.outputs import html_timeline
from traceana.outputs.html import render_html, write_html
from traceana.outputs.html_pack import Pack, unpack
from traceana.outputs.html_palette import PAINTS, SLOTS, ink_on
from traceana.outputs.html_timeline import CODES, MIXED, gather, lanes, pack_timeline
from traceana.outputs.words import CAUSES, CLASSES, plain_text


class Page(HTMLParser):
    """What a browser sees: elements with their attributes, text, tables by caption, scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self.texts: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._rows: list[list[str]] = []
        self._caption = ""
        self._inside: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        elif tag == "style":
            self.styles.append("")
        elif tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass
        if tag == "table":
            self.tables[self._caption] = self._rows

    def handle_data(self, data: str) -> None:
        if "script" in self._inside:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif "style" in self._inside:
            self.styles[-1] += data
        else:
            self.texts.append(data)
            if "caption" in self._inside:
                self._caption += data
            elif {"td", "th"} & set(self._inside) and not {"small", "svg"} & set(self._inside):
                self._rows[-1][-1] += data


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_stage_table_adds_up() -> None:
    document, tables = sample(ranks=3, steps=5, kernels=7)
    rows = Page(render_html(document, tables)).tables[
        "Nanoseconds of the window by stage: busy + transfer + bubble = window"
    ]
    labels = [r[0] for r in rows]
    for column in range(1, 4):
        values = {label: number(row[column]) for label, row in zip(labels[1:], rows[1:], strict=True)}
        busy = sum(values.get(k.label, 0) for k in CLASSES)
        bubble = sum(values.get(k.label, 0) for k in CAUSES)
        assert (busy, bubble) == (values["= busy"], values["= bubble"])
        assert (
            busy + values.get("transfer", 0) + bubble == values["= window"] == 5 * (WAIT + LAUNCH + 7 * (KERNEL + GAP))
        )


def test_blame_rows_add_up_to_the_bubble() -> None:
    document, tables = sample(ranks=3)
    page = Page(render_html(document, tables))
    head, *rows = page.tables["Blame: nanoseconds that the stage of the row idles because of the stage of the column"]
    assert head[-1] == "sum"
    for row in rows:
        assert sum(number(cell) for cell in row[1:-1]) == number(row[-1])


def test_waterfall_and_stage_steps_add_up() -> None:
    document, tables = sample()
    page = Page(render_html(document, tables))
    values = [number(r[2]) for r in page.tables["From ideal to measured: the period of one micro-batch step"][1:]]
    assert sum(values[:-1]) == values[-1]
    for row in page.tables["Where a stage's step goes"][1:]:
        assert sum(number(c) for c in row[1:6]) == number(row[6])


def test_page_is_closed() -> None:
    """No address but fragments and data:, no handler, and a policy that lets nothing in but the hashed script."""
    document, tables = sample()
    page = Page(render_html(document, tables))
    for tag, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, value)
    policy = next(a["content"] for t, a in page.elements if t == "meta" and "http-equiv" in a)
    assert policy is not None
    run = [text for attributes, text in page.scripts if "type" not in attributes]
    assert len(run) == 1 and len(page.styles) == 1

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert policy.startswith(f"default-src 'none'; script-src {digest(run[0])}; style-src {digest(page.styles[0])};")
    assert "unsafe" not in policy and "http" not in policy


def test_hostile_names_stay_text() -> None:
    clean, hostile = (Page(render_html(*sample(hostile=h))) for h in (False, True))
    assert [t for t, _ in hostile.elements] == [t for t, _ in clean.elements]
    assert [sorted(a) for _, a in hostile.elements] == [sorted(a) for _, a in clean.elements]
    assert len(hostile.scripts) == 3
    everything = "".join(hostile.texts)
    for name in HOSTILE:
        assert plain_text(name) in everything
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028]", everything)


def test_hostile_names_survive_in_the_data() -> None:
    document, tables = sample(hostile=True)
    words = next(text for a, text in Page(render_html(document, tables)).scripts if a.get("id") == "words")
    assert "<" not in words
    assert json.loads(words)["ranks"] == {"0": "stage 0", "1": "stage 1"}
    packed = pack_timeline(document, tables)
    assert packed is not None
    strings = unpack(packed)[1]["strings"]
    assert isinstance(strings, list)
    assert plain_text(HOSTILE[1]) in strings
    assert f"from {plain_text(HOSTILE[3])} to {plain_text(HOSTILE[3])}" in strings


@given(
    st.lists(st.integers(-(2**52), 2**52), max_size=40),
    st.lists(st.integers(0, 300), min_size=1, max_size=20),
    st.booleans(),
)
def test_packing_loses_nothing(values: list[int], small: list[int], delta: bool) -> None:
    pack = Pack()
    pack.add("a", values, delta=delta)
    pack.add("b", pl.Series(small, dtype=pl.Int32))
    pack.add("c", pl.Series([None, 5], dtype=pl.Int64))
    pack.fact("x", ["ü", 1])
    columns, facts = unpack(pack.text())
    assert columns == {"a": values, "b": small, "c": [-1, 5]}
    assert facts == {"x": ["ü", 1]}


def lengths(packed: str) -> Mapping[int, dict[str, int]]:
    """Nanoseconds by rank and code, gathered stretches taken apart, as the page would count them."""
    columns, facts = unpack(packed)
    ranks = facts["ranks"]
    assert isinstance(ranks, list)
    parts = list(zip(columns["part_mixed"], columns["part_code"], columns["part_ns"], strict=True))
    out: dict[int, dict[str, int]] = {}
    mixed = 0
    for rank in ranks:
        mine = out.setdefault(int(rank), {})
        for code, ns in zip(columns[f"code{rank}"], columns[f"length{rank}"], strict=True):
            if code == MIXED:
                held = [(c, part) for m, c, part in parts if m == mixed]
                assert sum(part for _, part in held) == ns
                mixed += 1
            else:
                held = [(code, ns)]
            for c, part in held:
                mine[CODES[c]] = mine.get(CODES[c], 0) + part
    return out


@pytest.mark.parametrize("limit", [10_000, 100, 20, 4])
def test_timeline_keeps_every_nanosecond(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few stretches may be drawn, the nanoseconds of each cause and class stay what they are."""
    monkeypatch.setattr(html_timeline, "_MAX_STRETCHES", limit)
    steps, kernels = 6, 20
    packed = pack_timeline(*sample(steps=steps, kernels=kernels))
    assert packed is not None
    columns, facts = unpack(packed)
    assert len(columns["code0"]) + len(columns["code1"]) <= limit
    assert (facts["gathered_below_ns"] == 0) == (limit >= 2 * steps * (2 + 2 * kernels))
    expected = {
        "control_message": steps * WAIT, "host_launch": steps * LAUNCH, "moe": steps * kernels * KERNEL,
        "launch_latency": steps * kernels * GAP,
    }  # fmt: skip
    assert lengths(packed) == {0: expected, 1: expected}


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), min_size=1, max_size=60), st.integers(0, 60))
def test_gathering_keeps_extents_and_sums(spans: list[tuple[int, int]], shorter: int) -> None:
    ends = np.cumsum([n for n, _ in spans])
    stretches = pl.DataFrame(
        {
            "rank": [0] * len(spans), "ts_ns": ends - np.array([n for n, _ in spans]), "end_ns": ends,
            "code": pl.Series([c for _, c in spans], dtype=pl.Int32), "visit": [None] * len(spans),
        },
        schema_overrides={"visit": pl.Int64},
    )  # fmt: skip
    drawn, parts = gather(stretches, shorter)
    assert drawn.get_column("ts_ns").to_list() == [0, *drawn.get_column("end_ns").to_list()[:-1]]
    assert drawn.get_column("end_ns")[-1] == ends[-1]
    whole = drawn.filter(pl.col("code") == MIXED).select((pl.col("end_ns") - pl.col("ts_ns")).alias("ns"))
    assert (
        parts.group_by("mixed", maintain_order=True).agg(pl.col("ns").sum()).get_column("ns").to_list()
        == whole.get_column("ns").to_list()
    )
    assert int(parts.get_column("stretches").sum()) + drawn.height - whole.height == len(spans)


def test_lanes_must_tile() -> None:
    document, tables = sample()
    hole = tables["attribution"].filter(pl.int_range(pl.len()) != 5)
    with pytest.raises(OutputError, match="do not tile"):
        pack_timeline(document, tables | {"attribution": hole})


def test_links_explain_stretches_where_given() -> None:
    _, tables = sample()
    links = tables["attribution"].select("rank", "gap", "chain", pl.lit("the chain's own words").alias("what")).unique()
    drawn = lanes(tables | {"links": links}, START)
    assert drawn.filter(pl.col("gap").is_not_null()).get_column("what").unique().to_list() == ["the chain's own words"]


def test_worst_gaps_explain_their_stretches() -> None:
    document, tables = sample()
    worst = document["worst_gaps"]
    assert isinstance(worst, list)
    drawn = lanes(tables, START, worst).filter(pl.col("gap") == 0)
    words = "void fused_moe_kernel<float>(int, float*)"
    assert dict(drawn.filter(pl.col("rank") == 0).select("ts_ns", "what").iter_rows()) == {0: words, WAIT: words}
    assert words not in drawn.filter(pl.col("rank") == 1).get_column("what")


def test_many_ranks_stay_small(tmp_path: Path) -> None:
    """8 stages of 200 steps with 300 stretches each: half a million stretches."""
    document, tables = sample(ranks=8, steps=200, kernels=150)
    write_html(tmp_path / "report.html", document, tables)
    assert (tmp_path / "report.html").stat().st_size < 6_000_000


def test_nothing_known_is_a_report_too(tmp_path: Path) -> None:
    write_html(tmp_path / "a.html", {}, {})
    page = Page((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert "No finding: nothing in this capture gives evidence for a change." in page.texts
    document, tables = sample()
    for key in list(document):
        render_html({k: v for k, v in document.items() if k != key}, tables)
        render_html({k: None if k == key else v for k, v in document.items()}, tables)
    for name in tables:
        render_html(document, {k: v for k, v in tables.items() if k != name})
        if name not in ("states", "attribution"):  # without one of these the other leaves holes
            render_html(document, tables | {name: tables[name].clear()})
    assert pack_timeline(document, tables | {k: tables[k].clear() for k in ("states", "attribution")}) is None


def test_no_place_to_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(OutputError, match="cannot write"):
        write_html(tmp_path / "file" / "report.html", *sample())


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_text_has_contrast() -> None:
    """WCAG AA: 4.5 for text on the page and on its cards in both themes, and for labels on slots and bars."""
    style = Page(render_html({}, {})).styles[0]
    themes = [
        dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in re.findall(r"\{([^{}]*--page:[^{}]*)\}", style)
    ]
    assert len(themes) == 4
    for theme in themes:
        for ink in ("ink", "soft", "accent", "warn", "bad"):
            for ground in ("page", "card"):
                assert contrast(theme[ink], theme[ground]) >= 4.5, (ink, ground, theme)
    for fill, ink in SLOTS:
        assert contrast(fill, ink) >= 4.5
    for paint in PAINTS:
        for colour in (paint.light, paint.dark):
            assert contrast(colour, ink_on(colour)) >= 4.5
    assert len({p.light + p.pattern for p in PAINTS}) == len({p.dark + p.pattern for p in PAINTS}) == len(PAINTS)

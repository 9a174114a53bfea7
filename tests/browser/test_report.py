"""The HTML report in a headless Chromium: it opens in silence, asks for nothing, and can be used by pointer and keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from browser.chromium import Browser, Page
from report_sample import GAP, HOSTILE, KERNEL, LAUNCH, WAIT, sample

from traceana.outputs.html import write_html
from traceana.outputs.words import plain_text

STEPS, KERNELS = 6, 20
PERIOD = WAIT + LAUNCH + KERNELS * (KERNEL + GAP)
GUTTER, LANE_0 = 104, 24


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """The sample's report, opened; at the end it must have kept silent and asked for its own file only."""
    write_html(tmp_path / "report.html", *sample(steps=STEPS, kernels=KERNELS))
    opened = browser.open(tmp_path / "report.html")
    yield opened
    assert opened.requests == [(tmp_path / "report.html").as_uri()]
    assert opened.complaints == []


def box(page: Page) -> tuple[float, float, float]:
    """Left, top and width of the timeline in the window, once it is in sight."""
    page.run("document.getElementById('timeline').scrollIntoView({block: 'center'})")
    page.frame()
    found = page.run(
        "(() => { const b = document.getElementById('timeline').getBoundingClientRect(); return [b.x, b.y, b.width]; })()"
    )
    return found[0], found[1], found[2]


def x_of(page: Page, ns: float) -> float:
    left, _, width = box(page)
    start, end = view(page)
    return left + GUTTER + (ns - start) / (end - start) * (width - GUTTER)


def view(page: Page) -> tuple[float, float]:
    """The stretch of the window that the timeline shows, in ns; the whole of it before any zoom."""
    start, end = page.run("(() => { const d = document.getElementById('timeline').dataset; return [d.from, d.to]; })()")
    return (0.0, float(STEPS * PERIOD)) if start is None else (float(start), float(end))


def tip(page: Page) -> str:
    """The text of the tooltip, empty while it is hidden."""
    return str(page.run("document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText"))


def said(page: Page) -> str:
    return str(page.run("document.getElementById('live').textContent"))


def test_opens_in_silence(page: Page) -> None:
    page.frame()
    assert page.run("document.querySelectorAll('section').length") >= 14
    # Something was drawn: lanes are not of one colour.
    assert (
        page.run(
            "(() => { const c = document.getElementById('timeline'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data,"
            " seen = new Set(); for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return seen.size; })()"
        )
        > 8
    )


def test_hover_tells_what_is_there(page: Page) -> None:
    _, top, _ = box(page)
    page.point(x_of(page, PERIOD + WAIT / 2), top + LANE_0 + 20)
    words = tip(page)
    assert "control message" in words and "400" in words and "stage 1" in words and "micro-batch step 1" in words
    assert "token return" in words and "from a kernel to a kernel" in words
    page.point(x_of(page, PERIOD + WAIT + LAUNCH + 5 * (KERNEL + GAP) + KERNEL / 2), top + LANE_0 + 20)
    words = tip(page)
    assert "MoE" in words and "39.0" in words and "slot 1" in words
    page.point(10, 10)
    assert tip(page) == ""


def test_zoom_keeps_the_instant_under_the_pointer(page: Page) -> None:
    left, top, width = box(page)
    offset = 480  # pointer events tell whole pixels of the canvas
    x, instant = left + offset, (offset - GUTTER) / (width - GUTTER) * STEPS * PERIOD
    for _ in range(8):
        page.zoom(x, top + 60, -240)
    start, end = view(page)
    assert end - start < STEPS * PERIOD / 50 and start < instant < end
    assert x_of(page, instant) == pytest.approx(x, abs=1)
    for _ in range(40):
        page.zoom(x, top + 60, 240)
    assert view(page) == (0, STEPS * PERIOD)


def test_drag_moves_and_stays_inside(page: Page) -> None:
    left, top, _ = box(page)
    page.run("document.querySelector('button[data-act=in]').click()")
    page.frame()
    before = view(page)
    page.point(left + 600, top + 40)
    page.point(left + 600, top + 40, "mousePressed", button="left", clickCount=1)
    page.point(left + 500, top + 40, buttons=1)
    page.point(left + 500, top + 40, "mouseReleased", button="left", clickCount=1)
    after = view(page)
    assert after[0] > before[0] and after[1] - after[0] == pytest.approx(before[1] - before[0])
    for _ in range(30):
        page.run("document.querySelector('button[data-act=right]').click()")
    page.frame()
    assert view(page)[1] == STEPS * PERIOD


def test_keyboard_alone_reaches_the_evidence(page: Page) -> None:
    for _ in range(80):
        page.press("Tab")
        if page.run("document.activeElement.id") == "timeline":
            break
    assert page.run("document.activeElement.id") == "timeline"
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.press("ArrowDown")
    assert said(page) == "stage 1"
    page.press("n")
    assert (
        said(page).startswith("stage 1, idle 600") and "control message" in said(page) and "root stage 0" in said(page)
    )
    chain = page.run("[...document.querySelectorAll('#evidence tbody tr')].map((r) => r.cells[1].textContent)")
    assert [int(ns.replace(",", "")) for ns in chain] == [WAIT, LAUNCH]
    page.press("n")
    assert page.run("document.querySelector('#evidence h3').textContent").endswith("awaiting micro-batch step 1")
    page.press("Enter")
    start, end = view(page)
    assert start == PERIOD - (WAIT + LAUNCH) / 3 and end == PERIOD + (WAIT + LAUNCH) * 4 / 3
    page.press("+")
    assert view(page)[1] - view(page)[0] < end - start
    page.press("0")
    assert view(page) == (0, STEPS * PERIOD)
    page.press("Escape")
    assert page.run("document.querySelector('#evidence table')") is None


def test_worst_gap_leads_into_the_timeline(page: Page) -> None:
    page.run("document.querySelector('#gaps button').click()")
    page.frame()
    assert page.run("document.querySelector('#evidence h3').textContent").startswith("stage 0 is idle for 600,000")
    assert view(page) == (0, (WAIT + LAUNCH) * 5 / 3)


def test_panels_follow_the_timeline(page: Page) -> None:
    page.run("document.querySelector('button[data-act=in]').click()")
    page.frame()
    left, top, _ = box(page)
    page.point(left + 700, top + 60)
    values = page.run("[...document.querySelectorAll('#panels .u-value')].map((v) => v.textContent)")
    assert any("W" in v and v[0].isdigit() for v in values), values
    shown = page.run("[...document.querySelectorAll('#panels .u-cursor-x')].map((c) => getComputedStyle(c).transform)")
    assert len(shown) == 3 and len(set(shown)) == 1 and shown[0] != "none"


@pytest.mark.parametrize("dark", [False, True])
def test_theme_follows_the_system_and_the_button(browser: Browser, tmp_path: Path, dark: bool) -> None:
    write_html(tmp_path / "report.html", *sample())
    opened = browser.open(tmp_path / "report.html", dark=dark)

    def ground() -> int:
        return int(opened.run("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"))

    assert (ground() < 60) == dark
    opened.run("document.getElementById('theme').click()")
    opened.frame()
    assert (ground() < 60) != dark
    assert opened.complaints == []


def test_paper_is_light_and_whole(browser: Browser, tmp_path: Path) -> None:
    write_html(tmp_path / "report.html", *sample())
    opened = browser.open(tmp_path / "report.html", dark=True)
    assert opened.pdf().startswith(b"%PDF")
    opened.run("dispatchEvent(new Event('beforeprint'))")
    opened.call("Emulation.setEmulatedMedia", media="print")
    opened.frame()
    assert opened.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.run("document.getElementById('timeline').width") == 680
    assert opened.run("[...document.querySelectorAll('details[data-print]')].every((d) => d.open)")
    assert opened.complaints == []


@pytest.mark.parametrize("width", [420, 800, 1600])
def test_page_never_scrolls_sideways(browser: Browser, tmp_path: Path, width: int) -> None:
    write_html(tmp_path / "report.html", *sample(ranks=8))
    opened = browser.open(tmp_path / "report.html", width=width)
    opened.frame()
    assert opened.run("document.documentElement.scrollWidth") <= width
    assert opened.complaints == []


def test_hostile_names_do_nothing(browser: Browser, tmp_path: Path) -> None:
    write_html(tmp_path / "report.html", *sample(hostile=True))
    opened = browser.open(tmp_path / "report.html")
    opened.run("document.querySelector('#gaps button').click()")
    opened.frame()
    left, top, _ = box(opened)
    opened.point(left + 300, top + 40)
    assert opened.run("window.hacked") is None
    assert opened.run("document.querySelectorAll('script').length") == 3
    assert opened.run("document.querySelectorAll('img, iframe, object, embed').length") == 0
    evidence = opened.run("document.getElementById('evidence').textContent")
    assert plain_text(HOSTILE[1]) in evidence and plain_text(HOSTILE[0]) in evidence
    everything = opened.run(
        "document.body.innerText + [...document.querySelectorAll('details')].map((d) => d.textContent)"
    )
    for name in HOSTILE[:4]:
        assert name in everything
    assert len(opened.requests) == 1 and opened.complaints == []


def test_policy_forbids_what_escaping_missed(browser: Browser, tmp_path: Path) -> None:
    """Even a script that were written into the page would not run, and a picture would not be asked for."""
    write_html(tmp_path / "report.html", *sample())
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    evil = "<script>window.hacked=1</script><img src='https://example.invalid/x.png' onerror='window.hacked=2'>"
    (tmp_path / "evil.html").write_text(text.replace("</main>", f"{evil}</main>"), encoding="utf-8")
    opened = browser.open(tmp_path / "evil.html")
    assert opened.run("window.hacked") is None
    assert opened.complaints, "the policy must have spoken"
    failed = [e for e in browser.events if e.get("method") == "Network.loadingFailed"]
    asked = [u for u in opened.requests if "example.invalid" in u]
    assert not asked or any(e["params"].get("blockedReason") == "csp" for e in failed)


def test_largest_report_hovers_and_zooms(browser: Browser, tmp_path: Path) -> None:
    """8 stages of 200 steps: half a million stretches, and each can still be reached."""
    steps, kernels = 200, 150
    document, tables = sample(ranks=8, steps=steps, kernels=kernels)
    write_html(tmp_path / "report.html", document, tables)
    opened = browser.open(tmp_path / "report.html")
    period = WAIT + LAUNCH + kernels * (KERNEL + GAP)
    left, top, width = box(opened)
    instant = 100 * period + WAIT / 2
    x = left + GUTTER + instant / (steps * period) * (width - GUTTER)
    opened.point(x, top + LANE_0 + 20)
    assert "zoom in for single stretches" in tip(opened)
    for _ in range(12):
        opened.zoom(x, top + 60, -600)
    opened.point(x + 1, top + LANE_0 + 20)
    assert "control message" in tip(opened) and "micro-batch step 100" in tip(opened)
    assert opened.complaints == []


def test_without_scheduler_spans(browser: Browser, tmp_path: Path) -> None:
    """A trace without CPU events: no forwards, no slots, no messages; work is coloured by kernel class."""
    document, tables = sample()
    bare: dict[str, pl.DataFrame] = {k: tables[k] for k in ("states", "attribution")}
    write_html(tmp_path / "report.html", document | {"micro_batches": None, "model": None, "gpu": None}, bare)
    opened = browser.open(tmp_path / "report.html")
    assert opened.run("document.querySelector('input[name=colour]:checked').value") == "class"
    assert opened.run("document.getElementById('no-samples').hidden") is False
    assert opened.complaints == []


def test_numbers_in_the_page_are_the_documents(page: Page) -> None:
    """Lengths on the canvas side: what the script unpacked adds up to the window on every lane."""
    document, _ = sample(steps=STEPS, kernels=KERNELS)
    assert isinstance(document["stages"], list)
    stage = document["stages"][0]
    cells = page.run(
        "[...document.querySelectorAll('.sums tr.total td:nth-child(2)')].map((c) => c.firstChild.textContent)"
    )
    assert [int(c.replace(",", "")) for c in cells] == [stage["busy_ns"], stage["bubble_ns"], stage["window_ns"]], (
        json.dumps(cells)
    )

"""The HTML report: one file that holds everything, asks for nothing, and runs only the script that it names.

Tables, bars and the waterfall are plain HTML and SVG made here; the timeline and its panels are drawn by the script in
`html_assets`, from the packed columns of `html_timeline`. The page forbids itself every request (its policy allows no
source at all) and every script but its own, by hash. uPlot draws the line charts: 50 kB, no dependencies, MIT.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path

import polars as pl

from traceana.outputs.files import new_file
from traceana.outputs.html_blame import blame, worst_gaps
from traceana.outputs.html_machine import clock, gpu, host, losses, server
from traceana.outputs.html_palette import SLOTS, palette_css, palette_json, pattern_defs
from traceana.outputs.html_parts import Markup, element, fold, join, paragraph, swatch
from traceana.outputs.html_stages import bound, legend, stages
from traceana.outputs.html_summary import answers, findings, header
from traceana.outputs.html_tables import cuda_graph, micro_batches, moe, p2p
from traceana.outputs.html_timeline import pack_timeline
from traceana.outputs.words import CAUSES, CLASSES, TRANSFER, integer, mapping, stage_names

__all__ = ["render_html", "write_html"]

Document = Mapping[str, object]
_SCRIPTS = ("words.js", "data.js", "paint.js", "timeline.js", "inspect.js", "panels.js", "report.js")
_MIXED = "several short stretches, gathered to keep this file small"

_BEFORE: tuple[tuple[str, str, str, Callable[[Document], Markup | None]], ...] = (
    ("answers", "Answers", "Answers", answers),
    ("findings", "Changes", "What to change", findings),
    ("stages", "Stages", "Where each stage’s time went", stages),
)
_AFTER: tuple[tuple[str, str, str, Callable[[Document], Markup | None]], ...] = (
    ("blame", "Blame", "Who holds whom up", blame),
    ("gaps", "Gaps", "The worst gaps", worst_gaps),
    ("bound", "Bound", "From ideal to measured", bound),
    ("micro-batches", "Micro-batches", "Micro-batches", micro_batches),
    ("p2p", "P2P", "Messages between stages", p2p),
    ("moe", "MoE", "MoE", moe),
    ("graphs", "Graphs", "CUDA graphs", cuda_graph),
    ("host", "Host", "Host work", host),
    ("gpu", "GPUs", "GPUs", gpu),
    ("server", "Server", "Server", server),
    ("clock", "Clocks", "Clocks and window", clock),
    ("losses", "Losses", "Losses", losses),
)


def write_html(path: Path, document: Document, tables: Mapping[str, pl.DataFrame]) -> None:
    """Write the report of `document` (what `traceana report --json` prints) to `path`, whole or not at all.

    `tables` are those of the report; `states`, `attribution`, `forwards`, `messages`, `in_flight`, `gpu_samples` and
    `links` draw the timeline, and each may be missing. Raises OutputError where the file cannot be written.
    """
    text = render_html(document, tables)
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def render_html(document: Document, tables: Mapping[str, pl.DataFrame]) -> str:
    """The report as one HTML document."""
    packed = pack_timeline(document, tables)
    before = [(key, short, title, make(document)) for key, short, title, make in _BEFORE]
    after = [(key, short, title, make(document)) for key, short, title, make in _AFTER]
    if packed is not None:
        # Where the script draws power and utilisation of the whole recording.
        place = element("div", id_="recording", class_="panels")
        after = [(k, s, t, join(body, place) if k == "gpu" else body) for k, s, t, body in after]
    drawing = _timeline(packed is not None, document)
    blocks = [b for b in (*before, ("timeline-section", "Timeline", "Timeline", drawing), *after) if b[3] is not None]
    script = _script()
    style = palette_css() + _asset("uPlot.min.css") + _asset("report.css")
    sources = f"script-src {_hash(script)}; style-src {_hash(style)}; img-src data:"
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    nav = element("nav", *(element("a", short, href=f"#{key}") for key, short, _, _ in blocks), aria_label="sections")
    theme = element("button", "Theme", id_="theme", type_="button", hidden="hidden", title="light or dark")
    sections = (
        element(
            "section", element("h2", title, id_=f"{key}-title"), body or "", id_=key, aria_labelledby=f"{key}-title"
        )
        for key, _, title, body in blocks
    )
    data = _data("words", json.dumps(_words(document), separators=(",", ":"), ensure_ascii=False))
    data += f'<script type="text/plain" id="packed">{packed}</script>' if packed else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        "<title>traceana report</title>\n"
        f"<style>{style}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">skip to the report</a>\n'
        f'<div class="bar-top">{element("strong", "traceana")}{nav}{theme}</div>\n'
        f'<main id="main">\n{header(document)}\n{"".join(sections)}\n</main>\n{pattern_defs()}\n{data}\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (files("traceana.outputs") / "html_assets" / name).read_text(encoding="utf-8")


def _script() -> str:
    own = "\n".join(_asset(name) for name in _SCRIPTS)
    return f"{_asset('uPlot.iife.min.js')}\n(() => {{\n'use strict';\n{own}}})();\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _data(name: str, text: str) -> str:
    """JSON that no name in it can break out of: `<`, `>` and `&` only appear escaped."""
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json" id="{name}">{safe}</script>\n'


def _words(document: Document) -> dict[str, object]:
    """What the script needs besides the columns: labels, names of ranks, colours, the steady window."""
    kinds = (*CLASSES, TRANSFER, *CAUSES)
    start = integer(mapping(document.get("window")).get("start_ns"))
    steady = mapping(document.get("server")).get("steady_window_ns")
    ends = [integer(x) for x in steady] if isinstance(steady, list | tuple) else []
    return {
        "palette": palette_json(),
        "labels": {k.name: k.label for k in kinds} | {"mixed": "several"},
        "meanings": {k.name: k.meaning for k in kinds} | {"mixed": _MIXED},
        "ranks": {str(rank): name for rank, name in stage_names(document).items()},
        "steady": [e - start for e in ends if e is not None] if start is not None and len(ends) == 2 else None,
        "hint": "Choose a stretch with the pointer, or an idle one with n and p, to see its evidence here.",
    }


def _timeline(drawn: bool, document: Document) -> Markup:
    if not drawn:
        return paragraph("No stretch of any stage lies in the window, so there is no timeline.", class_="hint")
    buttons = (
        ("out", "−", "zoom out (-)"),
        ("in", "+", "zoom in (+)"),
        ("left", "←", "back (arrow left)"),
        ("right", "→", "on (arrow right)"),
        ("all", "whole window", "whole window (0)"),
        ("previous", "‹ gap", "previous idle stretch (p)"),
        ("next", "gap ›", "next idle stretch (n)"),
        ("frame", "zoom to gap", "zoom to the chosen gap (Enter)"),
    )
    tools = element(
        "div",
        *(
            element("button", text, type_="button", data_act=act, title=title, aria_label=title)
            for act, text, title in buttons
        ),
        element(
            "fieldset",
            element("legend", "colour work by"),
            *(
                element("label", Markup(f'<input type="radio" name="colour" value="{value}">'), text)
                for value, text in (("slot", "micro-batch slot"), ("class", "kernel class"))
            ),
        ),
        class_="tools",
    )
    slots = integer(mapping(document.get("micro_batches")).get("slots")) or 0
    square = '<li><svg class="swatch" aria-hidden="true"><rect width="100%" height="100%" fill="{}"/></svg>slot {}</li>'
    slot_keys = "".join(square.format(fill, i) for i, (fill, _) in zip(range(slots), SLOTS, strict=False))
    again = element("li", "and so on: eight colours, then again from the first") if slots > len(SLOTS) else ""
    keys = join(
        element(
            "ul",
            Markup(slot_keys),
            again,
            class_="legend",
            id_="legend-slot",
        ),
        element(
            "ul",
            *(element("li", swatch(k.name), k.label) for k in CLASSES),
            class_="legend",
            id_="legend-class",
            hidden="hidden",
        ),
        element(
            "ul",
            *(element("li", swatch(k.name), k.label, title=k.meaning) for k in (TRANSFER, *CAUSES)),
            class_="legend",
        ),
    )
    canvas = Markup(
        '<div class="canvas"><canvas id="timeline" tabindex="0" role="application" aria-roledescription="timeline" '
        'aria-label="Pipeline timeline: a lane for each stage over time" aria-describedby="timeline-keys"></canvas>'
        '<div id="tip" class="tip" hidden></div></div>'
    )
    help_ = paragraph(
        "Above: work, as high as its share of the time; below, the causes of the idle rest. Drag to move, ctrl + wheel "
        "or the buttons to zoom, double-click to zoom in, click for evidence and the path of blame. Keys: ← → move, "
        "+ − zoom, 0 whole window, ↑ ↓ stage, n p next and previous idle stretch, Enter zoom to it, Esc let go. "
        "When zoomed in, lines are messages: they end in a dot, dashed ones carry tokens.",
        class_="hint",
        id_="timeline-keys",
    )
    return join(
        element(
            "p",
            "The timeline needs JavaScript; everything else on this page does not.",
            id_="timeline-note",
            class_="hint",
        ),
        element(
            "div",
            tools,
            canvas,
            element("div", id_="panels", class_="panels"),
            element(
                "p",
                "No GPU sample lies in the window, so no power is shown beside it.",
                id_="no-samples",
                class_="hint",
                hidden="hidden",
            ),
            keys,
            help_,
            element("div", id_="evidence", class_="evidence"),
            element("div", id_="live", class_="unseen", aria_live="polite"),
            id_="timeline-body",
            hidden="hidden",
        ),
        fold("all colours and causes", legend()),
    )

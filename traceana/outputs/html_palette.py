"""Colours and patterns of the HTML report, for both themes.

Work is blue, transfer is teal, waiting is anything else; within a family patterns differ too, so neither colour sight
nor colour print is needed. Slots take the eight colours of Okabe and Ito, adjusted to carry a label.
"""

from __future__ import annotations

from dataclasses import dataclass

from traceana.outputs.words import CAUSES, CLASSES, TRANSFER

__all__ = ["PAINTS", "SLOTS", "Paint", "ink_on", "palette_css", "palette_json", "pattern_defs"]


@dataclass(frozen=True, slots=True)
class Paint:
    """A fill: its colour on a light and on a dark page, and the pattern over it (see `_PATTERNS`)."""

    name: str
    light: str
    dark: str
    pattern: str = "solid"


_FILLS: dict[str, tuple[str, str, str]] = {
    "moe": ("#1f4e9c", "#6fa3f2", "solid"),
    "attention": ("#5a9ae0", "#a9cbfa", "solid"),
    "gemm": ("#2b72c4", "#3f7fd6", "solid"),
    "norm": ("#9cc4ee", "#d3e4fb", "solid"),
    "sampling": ("#12305f", "#2d5fa8", "solid"),
    "collective": ("#4b8fb0", "#7cc4e6", "down"),
    "memory": ("#7f9fbf", "#8aa6c4", "across"),
    "other": ("#b4c3d3", "#5d7389", "dots"),
    "transfer": ("#0b7f79", "#3cc9bf", "solid"),
    "no_work": ("#d4d2cc", "#5b5a57", "dots"),
    "upstream_compute": ("#7a4ab0", "#b48ae6", "solid"),
    "downstream_backpressure": ("#a982d1", "#8760b8", "up"),
    "p2p_transfer_wait": ("#2f9e8f", "#57cfbd", "across"),
    "control_message": ("#7fbfb0", "#2f8a7d", "upright"),
    "host_schedule": ("#d4642a", "#f08a52", "solid"),
    "host_launch": ("#efae2e", "#f5c55e", "up"),
    "host_sync": ("#8f5417", "#c98a4a", "down"),
    "launch_latency": ("#b3a78f", "#a39a86", "solid"),
    "stream_dependency": ("#857b66", "#7a7160", "across"),
    "collective_late": ("#c03a78", "#ee7fb0", "solid"),
    "profiler": ("#7f9430", "#b2c75c", "cross"),
    "ambiguous": ("#9a9a9a", "#8d8d8d", "down"),
    "unknown": ("#5c5c5c", "#c4c4c4", "cross"),
}
PAINTS: tuple[Paint, ...] = tuple(Paint(k.name, *_FILLS[k.name]) for k in (*CLASSES, TRANSFER, *CAUSES))

# (fill, ink of a label on it), the same in both themes: each pair has a contrast of 4.5 or more.
SLOTS: tuple[tuple[str, str], ...] = (
    ("#0072b2", "#ffffff"),
    ("#e69f00", "#000000"),
    ("#009e73", "#000000"),
    ("#cc79a7", "#000000"),
    ("#56b4e9", "#000000"),
    ("#b84a00", "#ffffff"),
    ("#d9cf3f", "#000000"),
    ("#5b6670", "#ffffff"),
)

# Lines of the panels, one a rank: (on a light page, on a dark one).
_LINES: tuple[tuple[str, str], ...] = (
    ("#0072b2", "#56b4e9"),
    ("#b84a00", "#ff9d5c"),
    ("#00805d", "#3ddbac"),
    ("#a3527f", "#e79cc5"),
    ("#8a6d00", "#e6c542"),
    ("#5b6670", "#b5c0ca"),
    ("#5f45b0", "#ab97f2"),
    ("#1f2a33", "#f2f2f2"),
)

# Strokes on a tile of 6 x 6 that repeats without a seam; drawn twice, in HTML by pattern_defs, on the canvas by script.
_PATTERNS: dict[str, str] = {
    "up": "M-1 1L1 -1M0 6L6 0M5 7L7 5",
    "down": "M-1 5L1 7M0 0L6 6M5 -1L7 1",
    "across": "M0 3H6",
    "upright": "M3 0V6",
    "cross": "M0 0L6 6M0 6L6 0",
    "dots": "M2 3H4M5 0H6M0 0H1",
}


def ink_on(colour: str) -> str:
    """Black or white, whichever has more contrast on `colour` (`#rrggbb`), by the luminance of WCAG 2."""
    return "#000000" if (_luminance(colour) + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


def _luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def palette_css() -> str:
    """Custom properties `--k-NAME` for both themes; classes `.k-NAME` to fill SVG shapes, `.t-NAME` for text on them."""
    light = "".join(f"--k-{p.name}:{p.light};--t-{p.name}:{ink_on(p.light)};" for p in PAINTS)
    dark = "".join(f"--k-{p.name}:{p.dark};--t-{p.name}:{ink_on(p.dark)};" for p in PAINTS)
    inks = "".join(f".t-{p.name}{{fill:var(--t-{p.name});stroke:var(--k-{p.name})}}" for p in PAINTS)
    fills = "".join(
        f".k-{p.name}{{fill:var(--k-{p.name})}}"
        if p.pattern == "solid"
        else f".k-{p.name}{{fill:url(#p-{p.name})}}.b-{p.name}{{fill:var(--k-{p.name})}}"
        for p in PAINTS
    )
    return (
        f":root{{{light}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f":root[data-theme=dark]{{{dark}}}"
        f"@media print{{:root:root{{{light}}}}}"
        f"{fills}{inks}"
    )


def pattern_defs() -> str:
    """The SVG that holds the patterns which `.k-NAME` refers to."""
    patterns = "".join(
        f'<pattern id="p-{p.name}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" class="b-{p.name}"/><path d="{_PATTERNS[p.pattern]}" class="hatch"/></pattern>'
        for p in PAINTS
        if p.pattern != "solid"
    )
    return f'<svg class="defs" width="0" height="0" aria-hidden="true"><defs>{patterns}</defs></svg>'


def palette_json() -> dict[str, object]:
    """The same for the canvas: paints in the order of the codes, slots, and the strokes of the patterns."""
    return {
        "paints": [{"name": p.name, "light": p.light, "dark": p.dark, "pattern": p.pattern} for p in PAINTS],
        "slots": [{"fill": fill, "ink": ink} for fill, ink in SLOTS],
        "lines": [{"light": light, "dark": dark} for light, dark in _LINES],
        "patterns": _PATTERNS,
    }

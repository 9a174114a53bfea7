"""The report in a terminal: answers in words, what to change, then figures that add up; readable without colour.

Everything is text that was made harmless first: no name from a trace can move the cursor or colour the screen.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from traceana.outputs.terminal_tables import QUIET, TERM, figures, heading, item, plain_table, say
from traceana.outputs.words import (
    CAUSES,
    CLASSES,
    TRANSFER,
    apportion,
    decimal,
    duration,
    gain,
    integer,
    label,
    mapping,
    number,
    plain_text,
    rank_name,
    rows,
    share,
    stage_names,
    text,
)

__all__ = ["render_terminal"]

Document = Mapping[str, object]
_BAR = (("busy", "█", "blue"), ("transfer", "▓", "cyan"), ("bubble", "·", "yellow"))


def render_terminal(document: Document, *, width: int = 80, color: bool = False) -> str:
    """The document of `traceana report --json` as text of at most `width` columns, with ANSI colours if `color`."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    names = stage_names(document)
    for part in (
        _top(document),
        *_answers(document),
        *_findings(document),
        *_stages(document, names, width),
        *figures(document),
    ):
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _under(value: RenderableType, indent: int = 3) -> Padding:
    return Padding(value, (0, 0, 0, indent))


def _top(document: Document) -> Text:
    server, window = mapping(document.get("server")), mapping(document.get("window"))
    model, versions = mapping(server.get("model")), mapping(server.get("versions"))
    sizes = [
        f"{n.upper()}{s}" for n in ("pp", "tp", "dp") if (s := integer(server.get(f"{n}_size"))) is not None and s > 1
    ]
    words = [text(model["architecture"])] if model.get("architecture") else []
    words += [" x ".join(sizes)] if sizes else []
    words += [text(server["gpu_name"]).replace("_", " ")] if server.get("gpu_name") else []
    words += [f"SGLang {text(versions['sglang'])}"] if versions.get("sglang") else []
    n = len(rows(document.get("stages")))
    words.append(f"{n} rank{'s' * (n != 1)}, window of {duration(window.get('duration_ns'))}")
    return say(" · ".join(words), QUIET)


def _answers(document: Document) -> list[RenderableType]:
    found = rows(document.get("answers"))
    out: list[RenderableType] = [heading("Answers")] if found else []
    for i, a in enumerate(found, 1):
        out += [item(f"{i}.", say(a.get("question"), TERM)), _under(say(a.get("answer")))]
    return out


def _findings(document: Document) -> list[RenderableType]:
    found = rows(document.get("findings"))
    out: list[RenderableType] = [heading("What to change, by what it would give")]
    if not found:
        return [*out, _under(say("Nothing: this capture gives no evidence for a change."))]
    names = stage_names(document)
    now = number(mapping(mapping(document.get("server")).get("throughput")).get("decode"))
    for i, f in enumerate(found, 1):
        lost = f"{duration(f.get('lost_ns'))} lost" if integer(f.get("lost_ns")) is not None else ""
        if lost and integer(f.get("rank")) is None:
            lost += ", all stages together"
        part = gain(f)
        where = rank_name(names, f.get("rank"), "")
        out.append(item(f"{i}.", say(f.get("title"), TERM)))
        if f.get("action"):
            out.append(_under(Text.assemble("do: ", (plain_text(text(f["action"])), "green"))))
        for line in (_predicted(mapping(f.get("predicted")), now), " · ".join(x for x in (where, lost, part) if x)):
            if line:
                out.append(_under(say(line)))
        evidence = f.get("evidence")
        if isinstance(evidence, list | tuple):
            out += [item("-", say(e, QUIET), 3) for e in evidence]
    return out


def _predicted(predicted: Mapping[str, object], now: float | None) -> str:
    value = number(predicted.get("throughput_tokens_per_s"))
    if value is None:
        return ""
    bounds = (number(predicted.get("low")), number(predicted.get("high")))
    between = f" ({decimal(bounds[0], 0)} to {decimal(bounds[1], 0)})" if None not in bounds else ""
    against = f", now {decimal(now, 0)}: {'+' if value >= now else ''}{share(value / now - 1, 0)}" if now else ""
    return f"predicted: {decimal(value, 0)} tokens/s{between}{against}"


def _stages(document: Document, names: Mapping[int, str], width: int) -> list[RenderableType]:
    found = rows(document.get("stages"))
    if not found:
        return []
    out: list[RenderableType] = [heading("Where each stage's time went"), _legend()]
    longest = max(len(n) for n in names.values())
    room = max(10, width - longest - 34)
    for s in found:
        parts = [integer(s.get(k)) or 0 for k in ("busy_ns", "transfer_ns", "bubble_ns")]
        cells = apportion(parts, integer(s.get("window_ns")) or 0, room)
        line = Text(f"{rank_name(names, s.get('rank')):<{longest}} ")
        for (_, glyph, style), n in zip(_BAR, cells, strict=True):
            line.append(glyph * n, style=style)
        line.append(f" {share(s.get('utilisation'))} useful, {share(s.get('reported_utilisation'))} reported")
        out.append(line)
    out.append(Text(""))
    each = max(1, (width - 25) // 19)
    for first in range(0, len(found), each):
        out.append(_sums(found[first : first + each], names))
    out.append(say("ms and percent, rounded so that columns add up; exact nanoseconds: --json", QUIET))
    return out


def _legend() -> Text:
    line = Text("")
    for name, glyph, style in _BAR:
        line.append(f"{glyph} ", style=style)
        line.append({"busy": "useful", "bubble": "waiting"}.get(name, name) + "   ")
    return line.append("(reported: any kernel on the device, spinning ones too)", style=QUIET)


def _sums(found: Sequence[Mapping[str, object]], names: Mapping[int, str]) -> Table:
    """Classes, transfer and causes of some stages, in microseconds and tenths of a percent that add up."""
    columns = [_rounded(s) for s in found]
    lines: list[list[str]] = []
    totals: list[int] = []

    def total(head: str, groups: Sequence[str]) -> None:
        totals.append(len(lines))
        lines.append([head, *_cells([(sum(c[g][0] for g in groups), sum(c[g][1] for g in groups)) for c in columns])])

    def each(kinds: Sequence[str]) -> None:
        for kind in kinds:
            if any(c[kind][0] for c in columns):
                lines.append([f"  {label(kind)}", *_cells([c[kind] for c in columns])])

    busy, idle = [k.name for k in CLASSES], [k.name for k in CAUSES]
    total("busy", busy)
    each(busy)
    total("transfer", ["transfer"])
    total("bubble", idle)
    each(idle)
    total("window", [*busy, "transfer", *idle])
    heads: list[tuple[str, bool]] = [("", False)]
    for s in found:
        heads += [(f"{rank_name(names, s.get('rank'))}, ms", True), ("%", True)]
    return plain_table(heads, lines, totals=totals)


def _rounded(stage: Mapping[str, object]) -> dict[str, tuple[int, int]]:
    """Class, transfer or cause -> (microseconds, tenths of a percent): busy, transfer and bubble are rounded to fit the
    window, then the parts of each to fit it, so that totals are rounded as they are elsewhere."""
    window = integer(stage.get("window_ns")) or 0
    totals = [integer(stage.get(k)) or 0 for k in ("busy_ns", "transfer_ns", "bubble_ns")]
    groups = ((CLASSES, mapping(stage.get("busy_by_class_ns"))), ((TRANSFER,), {TRANSFER.name: totals[1]}))
    found = [*groups, (CAUSES, mapping(stage.get("causes_ns")))]
    scaled = [apportion(totals, window, into) for into in ((window + 500) // 1000, 1000)]
    out: dict[str, tuple[int, int]] = {}
    for i, (kinds, facts) in enumerate(found):
        parts = [integer(facts.get(k.name)) or 0 for k in kinds]
        micro, tenths = (apportion(parts, totals[i], into[i]) for into in scaled)
        out |= {k.name: (a, b) for k, a, b in zip(kinds, micro, tenths, strict=True)}
    return out


def _cells(values: Sequence[tuple[int, int]]) -> list[str]:
    out: list[str] = []
    for micro, tenths in values:
        out += [f"{micro // 1000:,}.{micro % 1000:03d}", f"{tenths // 10}.{tenths % 10}"]
    return out

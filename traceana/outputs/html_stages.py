"""Stages in the HTML report: bars and a table that add up, the formula's waterfall."""

from __future__ import annotations

from collections.abc import Mapping

from traceana.outputs.html_parts import Cell, Column, Markup, bar, element, join, paragraph, swatch, table
from traceana.outputs.words import (
    CAUSES,
    CLASSES,
    TRANSFER,
    UNKNOWN,
    count,
    decimal,
    duration,
    integer,
    label,
    mapping,
    number,
    rows,
    share,
    stage_names,
    text,
)

__all__ = ["bound", "legend", "stages"]

Document = Mapping[str, object]
_NAMES = {
    "compute": "the slowest stage",
    "host": "host work",
    "last_stage_serial": "the last stage, serially",
    "ring": "the ring: too few micro-batches",
}


def legend() -> Markup:
    """All colours and patterns with what they mean."""
    items = [
        element("li", swatch(k.name), element("b", k.label), element("span", f" {k.meaning}"))
        for k in (*CLASSES, TRANSFER, *CAUSES)
    ]
    return element("ul", *items, class_="legend long")


def _parts(stage: Mapping[str, object]) -> list[tuple[str, int]]:
    """(class, transfer or cause, nanoseconds) of a stage, in the order of the legend."""
    classes, causes = mapping(stage.get("busy_by_class_ns")), mapping(stage.get("causes_ns"))
    out = [(k.name, integer(classes.get(k.name)) or 0) for k in CLASSES]
    out.append(("transfer", integer(stage.get("transfer_ns")) or 0))
    return out + [(k.name, integer(causes.get(k.name)) or 0) for k in CAUSES]


def stages(document: Document) -> Markup | None:
    """One bar a stage that fills the window, and the same in nanoseconds."""
    found = rows(document.get("stages"))
    if not found:
        return None
    names = stage_names(document)
    bars = [_bar(s, names) for s in found]
    used = {kind for s in found for kind, ns in _parts(s) if ns}
    keys = [
        element("li", swatch(k.name), k.label, title=k.meaning) for k in (*CLASSES, TRANSFER, *CAUSES) if k.name in used
    ]
    return join(
        paragraph(
            "Each bar is the whole window. Blue computes; the rest is transfer and, by cause, waiting. The thin bar "
            "beneath is what utilisation counters call busy: any kernel on the device, one that spins for a peer too."
        ),
        element("div", *bars, class_="bars"),
        element("ul", *keys, class_="legend", aria_label="colours"),
        _table(found, names),
    )


def _bar(stage: Mapping[str, object], names: Mapping[int, str]) -> Markup:
    rank, window = integer(stage.get("rank")) or 0, integer(stage.get("window_ns")) or 0
    name = names.get(rank, f"rank {rank}")
    parts = [
        (k, ns, f"{label(k)} {share(ns / window, 0)}", f"{name}: {label(k)} {duration(ns)}, {share(ns / window)}")
        for k, ns in _parts(stage)
        if window
    ]
    useful, seen = stage.get("utilisation"), number(stage.get("reported_utilisation"))
    told = f"{name}: useful {share(useful)}, reported {share(seen)}"
    width = 0.0 if seen is None else 100 * seen
    rect = f'<rect width="{width:.3f}%" height="100%"/>'
    thin = Markup(f'<svg class="reported" width="100%" height="7" aria-hidden="true">{rect}</svg>')
    return element(
        "div",
        element("div", element("b", name), class_="name"),
        element("div", bar(parts, window, told), thin, class_="both"),
        element(
            "div", element("b", share(useful)), " useful", element("small", f"{share(seen)} reported"), class_="says"
        ),
        class_="stage",
    )


def _table(found: list[Mapping[str, object]], names: Mapping[int, str]) -> Markup:
    parts = [dict(_parts(s)) for s in found]
    body: list[list[Cell]] = []
    totals: list[int] = []

    def add(head: Cell, values: list[int | None], total: bool = False) -> None:
        if total:
            totals.append(len(body))
        body.append([head, *(_amount(v, integer(s.get("window_ns"))) for v, s in zip(values, found, strict=True))])

    for kinds, sum_label, key in (
        (CLASSES, "= busy", "busy_ns"),
        ((TRANSFER,), None, ""),
        (CAUSES, "= bubble", "bubble_ns"),
    ):
        for kind in kinds:
            values: list[int | None] = [p[kind.name] for p in parts]
            if any(values):
                add(join(swatch(kind.name), kind.label), values)
        if sum_label:
            add(sum_label, [integer(s.get(key)) for s in found], total=True)
    add("= window", [integer(s.get("window_ns")) for s in found], total=True)
    absent = [k.label for k in (*CLASSES, TRANSFER, *CAUSES) if not any(p[k.name] for p in parts)]
    columns: list[Column | str] = [
        Column("nanoseconds", numeric=False),
        *(names.get(integer(s.get("rank")) or 0, "") for s in found),
    ]
    gaps = [mapping(s.get("gaps")) for s in found]
    extra: list[list[Cell]] = [
        ["idle gaps", *(count(g.get("count")) for g in gaps)],
        ["median gap", *(duration(g.get("p50_ns")) for g in gaps)],
        ["99th percentile", *(duration(g.get("p99_ns")) for g in gaps)],
        ["longest", *(duration(g.get("max_ns")) for g in gaps)],
        ["bubble explained", *(share(s.get("coverage")) for s in found)],
    ]
    caption = "Nanoseconds of the window by stage: busy + transfer + bubble = window"
    return element(
        "div",
        table(caption, columns, body, totals=totals, class_="sums" if len(found) <= 4 else "sums stacked"),
        element(
            "div",
            table("Idle gaps by stage", [Column("gaps", numeric=False), *columns[1:]], extra),
            paragraph(f"No time at all in: {', '.join(absent)}.", class_="hint") if absent else "",
        ),
        class_="side",
    )


def _amount(ns: int | None, window: int | None) -> Markup:
    part = share(ns / window) if ns is not None and window else UNKNOWN
    return join(count(ns), element("small", part))


def bound(document: Document) -> Markup | None:
    """The period of a step: what bounds it, from the slowest stage's own work to what was measured."""
    model = mapping(document.get("model"))
    period, tau = integer(model.get("measured_period_ns")), integer(model.get("tau_ns"))
    per_stage = rows(model.get("per_stage"))
    if period is None or tau is None or not per_stage:
        reason = model.get("reason")
        return paragraph(f"The formula does not apply: {text(reason)}.", class_="hint") if reason else None
    names = stage_names(document)
    terms = mapping(model.get("terms_ns"))
    binding = text(model.get("binding_term"))
    ranks = [integer(s.get("rank")) or 0 for s in per_stage]
    at = integer(model.get("binding_stage"))
    where = f" on {names.get(ranks[at], '')}" if at is not None and at < len(ranks) else ""
    need, have = integer(model.get("needed_in_flight")), integer(model.get("in_flight"))
    said = (
        f"A step takes {duration(period)}; what binds it is {_NAMES.get(binding, binding)}{where} ({duration(tau)}). "
    )
    if need is not None and have is not None:
        said += f"{have} micro-batch{'es are' if have != 1 else ' is'} in flight; {need} would fill the pipe."
    return join(
        paragraph(said),
        _waterfall(document, per_stage[0], integer(terms.get("compute")) or 0, period),
        _terms(terms, binding),
        _per_stage(per_stage, names, period),
    )


def _waterfall(document: Document, first: Mapping[str, object], compute: int, period: int) -> Markup:
    """From a pipeline bound by its slowest stage's GPU work alone to the period that was measured."""
    host, under, variance = (integer(first.get(k)) or 0 for k in ("host_ns", "under_filled_ns", "variance_ns"))
    throughput = number(mapping(mapping(document.get("server")).get("throughput")).get("decode"))
    steps = [
        ("slowest stage, always busy", "moe", 0, compute, True),
        ("+ host work", "host_schedule", compute, host, False),
        ("+ under-filled pipe", "no_work", compute + host, under, False),
        ("+ variance" if variance >= 0 else "− variance", "ambiguous", compute + host + under, variance, False),
        ("= measured", "moe", 0, period, True),
    ]
    whole = max(period, compute + host + under)
    lines: list[Markup] = []
    for name, kind, start, length, total in steps:
        left, width = (start, length) if length >= 0 else (start + length, -length)
        at, wide = 100 * left / whole, 100 * width / whole
        shape = f'<rect x="{at:.3f}%" width="{wide:.3f}%" height="100%" class="k-{kind} part"/>'
        end = start + length
        pace = decimal(throughput * period / end, 0) if throughput is not None and end > 0 else ""
        lines.append(
            element(
                "tr",
                element("th", name, scope="row"),
                element(
                    "td", element("svg", Markup(shape), width="100%", height="18", aria_hidden="true"), class_="flow"
                ),
                element("td", count(length), class_="n"),
                element("td", pace, class_="n") if throughput is not None else "",
                class_="total" if total else None,
            )
        )
    heads = ["", "to scale", "ns a step"] + (["tokens/s at this pace"] if throughput is not None else [])
    head = element("tr", *(element("th", h, scope="col", class_="n" if i > 1 else None) for i, h in enumerate(heads)))
    caption = "From ideal to measured: the period of one micro-batch step"
    hint = (
        "Tokens per second: the unprofiled throughput scaled by the period, as if profiling slowed every part alike."
        if throughput is not None
        else "No throughput was recorded, so the waterfall is in time only."
    )
    inner = join(element("caption", caption), element("thead", head), element("tbody", *lines))
    region = {"class_": "wide", "tabindex": "0", "role": "region", "aria_label": caption}
    return join(element("div", element("table", inner, class_="waterfall"), **region), paragraph(hint, class_="hint"))


def _terms(terms: Mapping[str, object], binding: str) -> Markup:
    words = {
        "compute": "max t: the slowest stage's GPU time a step",
        "host": "max k: the slowest stage's serial host work a step",
        "last_stage_serial": "t of the last stage and its serial host work: at depth 0 it waits for its own forward",
        "ring": "(sum of t and c) / micro-batches in flight: one round trip, shared by those in flight",
    }
    body: list[list[Cell]] = [
        [name.replace("_", " ") + (" ◀ binds" if name == binding else ""), words.get(name, ""), count(terms[name])]
        for name in terms
    ]
    columns: list[Column | str] = [Column("term"), Column("what it is", numeric=False), "ns a step"]
    return table("The terms: the largest one is the period that the pipeline can keep", columns, body)


def _per_stage(per_stage: list[Mapping[str, object]], names: Mapping[int, str], period: int) -> Markup:
    keys = (
        ("t_ns", "own GPU work", "t: busy time and gaps inside its forward"),
        ("imbalance_ns", "imbalance", "max t less t"),
        ("host_ns", "host-bound", "what k or the last stage's term adds"),
        ("under_filled_ns", "under-filled", "what the ring adds"),
        ("variance_ns", "variance", "measured period less tau; the signed remainder"),
    )
    body: list[list[Cell]] = []
    for s in per_stage:
        rank = integer(s.get("rank")) or 0
        body.append(
            [
                names.get(rank, f"rank {rank}"),
                *(count(s.get(k)) for k, _, _ in keys),
                count(period),
                count(s.get("k_ns")),
                count(s.get("c_ns")),
            ]
        )
    columns: list[Column | str] = [
        Column("ns a step"),
        *(Column(("" if i == 0 else "+ ") + head, title=title) for i, (_, head, title) in enumerate(keys)),
        Column("= period", title="between the starts of two steps of this stage"),
        Column("k", title="serial host work a step: the period less blocking waits"),
        Column(
            "c", title="from the end of its forward to the end of the next stage's, less that stage's t and queueing"
        ),
    ]
    return table("Where a stage's step goes", columns, body)

"""Blame in the HTML report: the matrix of who waits for whom and why, and the worst gaps with their chains."""

from __future__ import annotations

from collections.abc import Mapping

from traceana.outputs.html_parts import Cell, Column, Markup, bar, element, fold, join, paragraph, swatch, table
from traceana.outputs.words import CAUSES, count, duration, integer, label, mapping, rows, share, stage_names, text

__all__ = ["blame", "worst_gaps"]

Document = Mapping[str, object]
_ORDER = {k.name: i for i, k in enumerate(CAUSES)}


def blame(document: Document) -> Markup | None:
    """Waiting stage by root stage, each cell divided by cause; a row sums to the waiter's bubble. Then every row."""
    found = rows(document.get("blame"))
    if not found:
        return None
    names = stage_names(document)
    cells: dict[tuple[int, int | None], dict[str, int]] = {}
    for row in found:
        key = (integer(row.get("rank")) or 0, integer(row.get("root_rank")))
        cell = cells.setdefault(key, {})
        cause = text(row.get("cause"))
        cell[cause] = cell.get(cause, 0) + (integer(row.get("ns")) or 0)
    waiters = list(names)
    roots: list[int | None] = [r for r in names if any((w, r) in cells for w in waiters)]
    roots += [None] if any((w, None) in cells for w in waiters) else []
    bubble = {integer(s.get("rank")) or 0: integer(s.get("bubble_ns")) or 0 for s in rows(document.get("stages"))}
    widest = max(sum(c.values()) for c in cells.values())
    body: list[list[Cell]] = [
        [
            element("b", names[w]),
            *(
                _cell(
                    cells.get((w, r), {}), bubble.get(w, 0), widest, names[w], "nobody known" if r is None else names[r]
                )
                for r in roots
            ),
            _sum(sum(sum(c.values()) for (waiter, _), c in cells.items() if waiter == w), bubble.get(w)),
        ]
        for w in waiters
    ]
    columns: list[Column | str] = [
        Column("waits ↓ because of →", numeric=False),
        *(Column("not known" if r is None else names[r]) for r in roots),
        "sum",
    ]
    return join(
        paragraph(
            "Whose doing the idle time of a stage is: read a row. Nanoseconds, share of the row, and causes, with all "
            "bars to one scale."
        ),
        table(
            "Blame: nanoseconds that the stage of the row idles because of the stage of the column",
            columns,
            body,
            class_="matrix",
        ),
        fold(f"every row: cause, detail, token return ({len(found)})", _all(found, names)),
    )


def _sum(total: int, bubble: int | None) -> Markup:
    """A row's sum, and whether it is the bubble of its stage, which it has to be."""
    return join(count(total), element("small", "= bubble" if total == bubble else f"but the bubble is {count(bubble)}"))


def _cell(causes: Mapping[str, int], bubble: int, widest: int, waiter: str, root: str) -> Cell:
    total = sum(causes.values())
    if not total:
        return "0"
    ordered = sorted(causes.items(), key=lambda item: _ORDER.get(item[0], len(_ORDER)))
    parts = [
        (c, ns, "", f"{waiter} because of {root}: {label(c)} {duration(ns)}, {share(ns / bubble) if bubble else ''}")
        for c, ns in ordered
    ]
    most = max(ordered, key=lambda item: item[1])
    said = f"{waiter} because of {root}: " + ", ".join(f"{label(c)} {duration(ns)}" for c, ns in ordered)
    return join(
        count(total),
        element("small", share(total / bubble) if bubble else ""),
        bar(parts, widest, said, height=12),
        element("small", f"most: {label(most[0])} {duration(most[1])}"),
    )


def _all(found: list[Mapping[str, object]], names: Mapping[int, str]) -> Markup:
    body: list[list[Cell]] = []
    for row in found:
        cause, root = text(row.get("cause")), integer(row.get("root_rank"))
        body.append(
            [
                names.get(integer(row.get("rank")) or 0, text(row.get("rank"))),
                text(None) if root is None else names.get(root, f"rank {root}"),
                join(swatch(cause), label(cause)),
                text(row.get("detail")),
                "↺" if row.get("crossed_token_return") else "",
                count(row.get("ns")),
            ]
        )
    columns: list[Column | str] = [
        Column("waits"),
        Column("root", numeric=False),
        Column("cause", numeric=False),
        Column("detail", numeric=False),
        Column(
            "token return",
            numeric=False,
            title="the chain crossed from the last stage to the first: no other micro-batch was there to run",
        ),
        "ns",
    ]
    return table("Every row of the blame matrix", columns, body, hide_caption=True)


def worst_gaps(document: Document) -> Markup | None:
    """The longest gaps with the chain that explains each, time running down."""
    found = rows(document.get("worst_gaps"))
    if not found:
        return None
    names = stage_names(document)
    start = integer(mapping(document.get("window")).get("start_ns")) or 0
    return element("ol", *(_gap(g, names, start) for g in found), class_="gaps")


def _gap(gap: Mapping[str, object], names: Mapping[int, str], start: int) -> Markup:
    rank = integer(gap.get("rank")) or 0
    first, last = integer(gap.get("ts_ns")) or 0, integer(gap.get("end_ns")) or 0
    chain = list(reversed(rows(gap.get("chain"))))
    by_cause: dict[tuple[str, int | None], int] = {}
    for link in chain:
        key = (text(link.get("cause")), integer(link.get("root_rank")))
        by_cause[key] = by_cause.get(key, 0) + (integer(link.get("ns")) or 0)
    top = sorted(by_cause.items(), key=lambda item: (-item[1], item[0][0]))[:3]
    why = ", ".join(f"{label(c)}{'' if r is None else f' of {names.get(r, r)}'} {duration(ns)}" for (c, r), ns in top)
    visit = integer(gap.get("visit"))
    awaited = "" if visit is None else f", awaiting step {visit}"
    button = element(
        "button",
        "show in the timeline",
        type_="button",
        data_rank=str(rank),
        data_end=str(last - start),
        hidden="hidden",
    )
    body: list[list[Cell]] = []
    for link in chain:
        cause, root = text(link.get("cause")), integer(link.get("root_rank"))
        at = integer(link.get("ts_ns"))
        body.append(
            [
                duration(None if at is None else at - first),
                count(link.get("ns")),
                join(swatch(cause), label(cause), " ↺" if link.get("crossed_token_return") else ""),
                text(None) if root is None else names.get(root, f"rank {root}"),
                text(link.get("detail")),
                text(link.get("what") or None),
            ]
        )
    columns: list[Column | str] = [
        Column("from its start"),
        "ns",
        Column("cause", numeric=False),
        Column("root", numeric=False),
        Column("detail", numeric=False),
        Column("event", numeric=False),
    ]
    name = names.get(rank, f"rank {rank}")
    summary = join(element("b", f"{name} idles {duration(gap.get('ns'))}"), element("span", f"{awaited}: {why}"))
    return element(
        "li",
        fold(summary, table(f"chain of a gap of {name}", columns, body, class_="chain", hide_caption=True)),
        button,
    )

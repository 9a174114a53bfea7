"""The tables at the end of the terminal report, and the few pieces that all of it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from traceana.outputs.kernel_names import short_kernel_name
from traceana.outputs.words import (
    bytes_text,
    count,
    decimal,
    duration,
    integer,
    label,
    mapping,
    plain_text,
    rank_name,
    rows,
    share,
    stage_names,
    text,
)

__all__ = ["HEAD", "QUIET", "TERM", "figures", "heading", "item", "plain_table", "say"]

Document = Mapping[str, object]
HEAD, QUIET, TERM = "bold cyan", "dim", "bold"
_SEVERITY = {"error": "bold red", "warning": "yellow"}


def say(value: object, style: str = "") -> Text:
    """A fact as text that no terminal acts on."""
    return Text(plain_text(text(value)), style=style)


def heading(title: str) -> Text:
    """The heading of a section, with an empty line before it."""
    return Text(f"\n{title}", style=HEAD)


def item(bullet: str, value: RenderableType, indent: int = 0) -> Padding:
    """Text that hangs behind its bullet."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(bullet), value)
    return Padding(grid, (0, 0, 0, indent))


def plain_table(
    columns: Sequence[tuple[str, bool]], lines: Sequence[Sequence[str | Text]], *, totals: Sequence[int] = ()
) -> Table:
    """A table without frame; `columns` are (heading, numeric), rows with an index in `totals` are bold."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False, header_style=QUIET)
    for name, numeric in columns:
        table.add_column(Text(name), justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for i, line in enumerate(lines):
        cells = [c if isinstance(c, Text) else say(c) for c in line]
        table.add_row(*cells, style=TERM if i in totals else None)
    return table


def figures(document: Document) -> list[RenderableType]:
    """Blame, batch sizes, messages, MoE, CUDA graphs, clocks and losses, each with its heading, as far as known."""
    names = stage_names(document)
    return [
        *_blame(document, names),
        *_micro_batches(document),
        *_p2p(document),
        *_moe(document, names),
        *_cuda_graph(document, names),
        *_clock(document, names),
        *_losses(document, names),
    ]


def _blame(document: Document, names: Mapping[int, str]) -> list[RenderableType]:
    """Per stage its largest causes with their roots; what is left is summed, so a stage's rows are its bubble."""
    by_rank: dict[int, dict[tuple[int | None, str], int]] = {}
    for row in rows(document.get("blame")):
        key = (integer(row.get("root_rank")), text(row.get("cause")))
        mine = by_rank.setdefault(integer(row.get("rank")) or 0, {})
        mine[key] = mine.get(key, 0) + (integer(row.get("ns")) or 0)
    if not by_rank:
        return []
    each = 5 if len(by_rank) <= 2 else 3 if len(by_rank) <= 4 else 2
    lines: list[list[str]] = []
    for rank, cells in sorted(by_rank.items()):
        whole = sum(cells.values())
        ordered = sorted(cells.items(), key=lambda item: (-item[1], item[0][1], item[0][0] is None, item[0][0] or 0))
        for i, ((root, cause), ns) in enumerate(ordered[:each]):
            because = "itself" if root == rank else rank_name(names, root, "not known")
            lines.append(
                [
                    names.get(rank, f"rank {rank}") if i == 0 else "",
                    because,
                    label(cause),
                    duration(ns),
                    share(ns / whole) if whole else "",
                ]
            )
        rest = ordered[each:]
        if rest:
            ns = sum(v for _, v in rest)
            lines.append(["", "", f"{len(rest)} more", duration(ns), share(ns / whole) if whole else ""])
    columns = (("waits", False), ("because of", False), ("cause", False), ("time", True), ("of its bubble", True))
    return [heading("Who holds whom up"), plain_table(columns, lines)]


def _micro_batches(document: Document) -> list[RenderableType]:
    facts = mapping(document.get("micro_batches"))
    slots = rows(facts.get("by_slot"))
    if not slots:
        return []
    lines = [
        [
            f"slot {text(s.get('slot'))}",
            count(s.get("visits")),
            count(s.get("filled")),
            f"{count(s.get('batch_size_min'))} / {count(s.get('batch_size_p50'))} / {count(s.get('batch_size_max'))}",
            duration(s.get("forward_ns_p50")),
            ", ".join(f"{m} {count(n)}" for m, n in mapping(s.get("modes")).items()),
        ]
        for s in slots
    ]
    columns = (
        ("", False),
        ("visits", True),
        ("filled", True),
        ("batch min / p50 / max", True),
        ("forward p50", True),
        ("modes", False),
    )
    return [heading("Batch sizes by slot, on the first stage"), plain_table(columns, lines)]


def _p2p(document: Document) -> list[RenderableType]:
    found = rows(document.get("p2p"))
    if not found:
        return []
    lines: list[list[str]] = []
    for p in found:
        wait, move = mapping(p.get("wait_ns")), mapping(p.get("transfer_ns"))
        lines.append(
            [
                f"{text(p.get('src'))} > {text(p.get('dst'))}",
                text(p.get("kind")),
                bytes_text(p.get("bytes")),
                count(p.get("count")),
                count(p.get("unmatched")),
                duration(wait.get("p50_ns")),
                duration(move.get("p50_ns")),
                duration(move.get("p99_ns")),
                decimal(p.get("gbps_p50"), 1),
            ]
        )
    columns = (
        ("ranks", False),
        ("kind", False),
        ("size", True),
        ("count", True),
        ("alone", True),
        ("wait", True),
        ("transfer", True),
        ("p99", True),
        ("Gbit/s", True),
    )
    return [heading("Messages between stages (medians; alone: without a partner)"), plain_table(columns, lines)]


def _moe(document: Document, names: Mapping[int, str]) -> list[RenderableType]:
    found = [m for m in rows(document.get("moe")) if integer(m.get("total_ns"))]
    if not found:
        return []
    lines: list[list[str]] = []
    for m in found:
        per, kernels = mapping(m.get("per_forward_ns")), rows(m.get("kernels"))
        most = f"{_short(text(kernels[0].get('name')))} {duration(kernels[0].get('total_ns'))}" if kernels else ""
        lines.append(
            [
                rank_name(names, m.get("rank")),
                duration(m.get("total_ns")),
                share(m.get("share_of_busy")),
                duration(per.get("p50_ns")),
                duration(per.get("p99_ns")),
                most,
            ]
        )
    columns = (
        ("MoE", False),
        ("time", True),
        ("of busy", True),
        ("forward p50", True),
        ("p99", True),
        ("largest kernel", False),
    )
    return [heading("MoE"), plain_table(columns, lines)]


def _short(name: str) -> str:
    short = short_kernel_name(name)
    return short if len(short) <= 40 else f"{short[:39]}…"


def _cuda_graph(document: Document, names: Mapping[int, str]) -> list[RenderableType]:
    lines: list[list[str]] = []
    found = rows(document.get("cuda_graph"))
    for g in found:
        for m in rows(g.get("by_mode")):
            lines.append(
                [
                    rank_name(names, g.get("rank")),
                    text(m.get("mode")),
                    count(m.get("forwards")),
                    count(m.get("graphed")),
                    duration(m.get("launch_ns_p50")),
                    count(m.get("kernels_p50")),
                ]
            )
    if not lines:
        return []
    sizes = found[0].get("captured_sizes")
    out: list[RenderableType] = [heading("CUDA graphs")]
    columns = (
        ("", False),
        ("mode", False),
        ("forwards", True),
        ("as graphs", True),
        ("launch calls p50", True),
        ("activities", True),
    )
    out.append(plain_table(columns, lines))
    if isinstance(sizes, list | tuple):
        out.append(say(f"captured batch sizes: {', '.join(text(s) for s in sizes)}", QUIET))
    return out


def _clock(document: Document, names: Mapping[int, str]) -> list[RenderableType]:
    facts = mapping(document.get("clock"))
    reference, said = integer(facts.get("reference_rank")), []
    for c in rows(facts.get("ranks")):
        if integer(c.get("rank")) != reference:
            doubt = c.get("uncertainty_ns")
            said.append(f"{rank_name(names, c.get('rank'))} {'unbounded' if doubt is None else '±' + duration(doubt)}")
    if reference is None:
        return []
    violations = facts.get("violations")
    n = len(violations) if isinstance(violations, list | tuple) else integer(violations) or 0
    extra = f"; {n} contradiction{'s' * (n != 1)}" if n else ""
    known = "" if facts.get("identifiable") is not False else "; not every rank can be put on one clock"
    against = f"against {rank_name(names, reference)}: {', '.join(said)}" if said else "one rank"
    return [heading("Clocks"), say(f"{against}{extra}{known}")]


def _losses(document: Document, names: Mapping[int, str]) -> list[RenderableType]:
    """What was lost: errors and warnings in full, what only informs by name."""
    found = rows(document.get("losses"))
    out: list[RenderableType] = [heading("Lost, left out or not knowable")]
    skipped = mapping(document.get("skipped"))
    out += [item("analysis not run:", say(f"{name} ({text(why)})")) for name, why in skipped.items()]
    if not found and not skipped:
        return [*out, say("nothing")]
    quiet: dict[str, list[Mapping[str, object]]] = {}
    for r in found:
        severity = text(r.get("severity"))
        if severity not in _SEVERITY:
            quiet.setdefault(text(r.get("name")), []).append(r)
            continue
        where = rank_name(names, r.get("rank"), "")
        words = (
            f"{text(r.get('name'))}{' on ' + where if where else ''}, {count(r.get('count'))}: {text(r.get('detail'))}"
        )
        out.append(item("-", Text.assemble((f"{severity}: ", _SEVERITY[severity]), plain_text(words))))
    for name, group in quiet.items():
        n = sum(integer(r.get("count")) or 0 for r in group)
        more = f" (and {len(group) - 1} more)" if len(group) > 1 else ""
        out.append(item("-", say(f"info: {name}, {count(n)}: {text(group[0].get('detail'))}{more}", QUIET)))
    return out

"""`traceana check` as text: files, ranks, clocks, losses."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from traceana.outputs.words import plain_text

__all__ = ["render_check"]


def _harmless(value: object) -> object:
    """`value` with names that cannot act on a terminal."""
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, Mapping):
        return {k: _harmless(v) for k, v in value.items()}
    return [_harmless(v) for v in cast("Sequence[object]", value)] if isinstance(value, (list, tuple)) else value


def _rows(document: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    value = document.get(key)
    return cast("list[Mapping[str, object]]", value) if isinstance(value, list) else []


def _us(value: object) -> str:
    if not isinstance(value, int):
        return "unbounded"
    return f"{value / 1000:,.1f} us" if abs(value) < 10_000_000 else f"{value / 1_000_000:,.2f} ms"


def render_check(document: Mapping[str, object], *, width: int = 80, color: bool = False) -> str:
    """The document of `traceana check --json` as text of at most `width` columns."""
    document = cast("Mapping[str, object]", _harmless(document))
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=color, no_color=not color, highlight=False, legacy_windows=False
    )
    verdict = document.get("usable")
    console.print(Text("Usable: yes" if verdict is True else f"Usable: no, {document.get('reason')}"))
    window = document.get("window")
    if isinstance(window, Mapping):
        console.print(Text(f"Common window: {window['duration_ns']:,} ns ({window['basis']})"))
    ranks = Table(title="Ranks", title_justify="left", box=None, pad_edge=False)
    for name in ("rank", "stage", "kernels", "calls", "spans", "sends+recvs", "file"):
        ranks.add_column(
            name, justify="left" if name == "file" else "right", overflow="fold" if name == "file" else "ellipsis"
        )
    for row in _rows(document, "ranks"):
        stage = "-" if row["pp_rank"] is None else str(row["pp_rank"])
        cells = [f"{row[k]:,}" for k in ("kernels", "calls", "annotations", "messages")]
        ranks.add_row(str(row["rank"]), stage, *cells, Text(str(row["file"])))
    console.print(ranks)
    clock = document.get("clock")
    if isinstance(clock, Mapping):
        clocks = Table(title="Clocks", title_justify="left", box=None, pad_edge=False)
        for name in ("rank", "offset", "uncertainty", "drift", "told by"):
            clocks.add_column(name, justify="left" if name == "told by" else "right")
        for row in _rows(clock, "ranks"):
            doubt = row["uncertainty_ns"]
            clocks.add_row(
                str(row["rank"]), _us(row["offset_ns"]), "unbounded" if doubt is None else f"+-{_us(doubt)}",
                f"{row['drift_ppm']:.2f} ppm", Text(str(row["method"])),
            )  # fmt: skip
        console.print(clocks)
        for statement in clock.get("statements", []) or []:
            console.print(Text(f"  {statement}"))
        for violation in _rows(clock, "violations"):
            console.print(Text(f"  contradiction: {violation}"))
    losses = _rows(document, "losses")
    if losses:
        table = Table(title="Lost, missing or left out", title_justify="left", box=None, pad_edge=False)
        for name in ("severity", "rank", "count", "what"):
            table.add_column(name, justify="right" if name in ("rank", "count") else "left", overflow="fold")
        for row in losses:
            rank = "" if row["rank"] is None else str(row["rank"])
            table.add_row(str(row["severity"]), rank, f"{row['count']:,}", Text(f"{row['name']}: {row['detail']}"))
        console.print(table)
    else:
        console.print("Nothing was lost.")
    return out.getvalue()

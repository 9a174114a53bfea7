"""The few pieces that the sections of the HTML report are made of. Text is escaped unless it is `Markup`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from traceana.outputs.words import plain_text

__all__ = ["Cell", "Column", "Markup", "bar", "element", "fold", "join", "paragraph", "swatch", "table"]


class Markup(str):
    """HTML that this package made, with whatever came from outside already escaped."""

    __slots__ = ()


Cell = str | Markup


def html(value: Cell) -> Markup:
    """Text made safe; control characters shown by their escapes, which HTML has no way to write."""
    return value if isinstance(value, Markup) else Markup(escape(plain_text(value), quote=True))


def element(tag: str, *children: Cell, **attributes: str | None) -> Markup:
    """`<tag ...>children</tag>`; a trailing underscore of an attribute goes, others become hyphens."""
    pairs = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{pairs}>{''.join(html(c) for c in children)}</{tag}>")


def join(*parts: Cell | None) -> Markup:
    """Parts one after the other; None is nothing."""
    return Markup("".join(html(p) for p in parts if p is not None))


def paragraph(*parts: Cell, class_: str | None = None, id_: str | None = None) -> Markup:
    """A paragraph."""
    return element("p", *parts, class_=class_, id_=id_)


def fold(summary: Cell, *children: Cell, open_: bool = False, print_: bool = False) -> Markup:
    """Something to open; `print_` opens it on paper."""
    head = element("summary", summary)
    attributes = " open" * open_ + " data-print" * print_
    return Markup(f"<details{attributes}>{head}{''.join(html(c) for c in children)}</details>")


def swatch(kind: str) -> Markup:
    """A small square in the colour and pattern of a class, the transfer or a cause."""
    return Markup(
        f'<svg class="swatch" aria-hidden="true"><rect width="100%" height="100%" class="k-{escape(kind)}"/></svg>'
    )


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading, whether it holds numbers, and what it means (shown on its heading)."""

    label: Cell
    numeric: bool = True
    title: str | None = None


def table(
    caption: str,
    columns: Sequence[Column | str],
    rows: Sequence[Sequence[Cell]],
    *,
    totals: Sequence[int] = (),
    class_: str | None = None,
    hide_caption: bool = False,
) -> Markup:
    """A table whose first cell of a row is the row's heading; rows with an index in `totals` are sums.

    It lies in a region that scrolls sideways by keyboard too.
    """
    heads = [c if isinstance(c, Column) else Column(c) for c in columns]
    head = "".join(
        element("th", c.label, scope="col", class_="n" if c.numeric and i else None, title=c.title)
        for i, c in enumerate(heads)
    )
    body: list[str] = []
    for r, row in enumerate(rows):
        cells = [element("th", row[0], scope="row")]
        cells += [element("td", c, class_="n" if h.numeric else None) for c, h in zip(row[1:], heads[1:], strict=True)]
        body.append(element("tr", *cells, class_="total" if r in totals else None))
    label = element("caption", caption, class_="unseen" if hide_caption else None)
    inner = Markup(f"{label}<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>")
    region = {"class_": "wide", "tabindex": "0", "role": "region", "aria_label": caption}
    return element("div", element("table", inner, class_=class_), **region)


def bar(parts: Sequence[tuple[str, int, str, str]], whole: int, label: str, *, height: int = 26) -> Markup:
    """A bar of `whole`: parts (kind, length, label, what it says on hover) from left to right, each to scale.

    Parts that are wide enough carry their label.
    """
    shapes: list[str] = []
    at = 0
    for kind, length, short, words in parts:
        if length > 0 and whole > 0:
            left, width = 100 * at / whole, 100 * length / whole
            fits = short and width > 0.85 * len(short) + 1
            shapes.append(
                f'<svg x="{left:.4f}%" width="{width:.4f}%"><title>{html(words)}</title>'
                f'<rect width="100%" height="100%" class="k-{escape(kind)} part"/>'
                + (f'<text x="50%" y="50%" class="t-{escape(kind)}">{html(short)}</text>' if fits else "")
                + "</svg>"
            )
        at += length
    return Markup(
        f'<svg class="bar" width="100%" height="{height}" role="img" aria-label="{html(label)}">{"".join(shapes)}</svg>'
    )

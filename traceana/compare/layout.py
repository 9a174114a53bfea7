"""How a server is spread over its GPUs, and what two ways of it cost each other: pipeline against tensor parallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from traceana.compare.side import Side

__all__ = ["ONE_GPU", "Layout", "layout_of", "spread_finding"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a server's parallel groups, and `clients`: requests in its closed loop, None where unknown."""

    pp: int = 1
    tp: int = 1
    dp: int = 1
    ep: int = 1
    clients: int | None = None

    @property
    def words(self) -> str:
        """`PP2`, `PP2 TP4`, `TP8 EP8`, `one GPU`."""
        sizes = (("PP", self.pp), ("TP", self.tp), ("DP", self.dp), ("EP", self.ep))
        return " ".join(f"{name}{n}" for name, n in sizes if n > 1) or "one GPU"

    @property
    def gpus(self) -> int:
        """GPUs of the server; data parallel copies that share the tensor parallel ranks have none of their own."""
        return self.pp * max(self.tp, self.dp)


ONE_GPU = Layout()


def layout_of(document: Mapping[str, object]) -> Layout:
    """From the server's facts, and where they are silent from the ranks in the capture."""

    def integer(value: object) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def part(value: object) -> Mapping[str, object]:
        return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}

    server = part(document.get("server"))
    pp = integer(server.get("pp_size")) or integer(part(document.get("pipeline")).get("pp_size")) or 1
    ranks = len(cast("Sequence[object]", document.get("stages") or ()))
    return Layout(
        pp,
        integer(server.get("tp_size")) or max(1, ranks // pp),
        integer(server.get("dp_size")) or 1,
        integer(part(server.get("arguments")).get("ep_size")) or 1,
        integer(part(server.get("clients")).get("concurrency")),
    )


def spread_finding(a: Side, b: Side, token_ns: tuple[int, int], noise: float) -> dict[str, object] | None:
    """What the captures say of one spread against the other: `title` and `evidence`. None where both are spread alike.

    Time per token is of the whole server; per GPU it is multiplied by the server's GPUs.
    """
    one, other = a.layout, b.layout
    if (one.pp, one.tp, one.dp, one.ep) == (other.pp, other.tp, other.dp, other.ep):
        return None
    before, after = token_ns
    rates = [1e9 / ns for ns in token_ns]
    costs = before * one.gpus, after * other.gpus
    better, worse = (one, other) if costs[0] < costs[1] else (other, one)
    gain = max(costs) / min(costs) - 1
    each = "" if one.gpus == other.gpus else " for each GPU"
    title = f"{better.words} serves {100 * gain:.0f} % more{each} than {worse.words} here"
    if abs(costs[1] / costs[0] - 1) <= noise:
        title = f"{one.words} and {other.words} serve the same{each}, within noise of {100 * noise:.0f} %"
    evidence = [
        f"{side.layout.words}: {rate:,.0f} tokens/s on {side.layout.gpus} GPU{'s' if side.layout.gpus > 1 else ''}, "
        f"{side.tokens / side.forwards:.1f} tokens a forward"
        for side, rate in zip((a, b), rates, strict=True)
    ]
    if one.clients is not None and other.clients is not None and one.clients != other.clients:
        evidence.append(
            f"the loads differ: {one.clients} and {other.clients} requests open, so this is not like with like"
        )
    for side in (a, b):
        words = ", ".join(f"{name} {ns:,} ns" for name, ns in _costs(side))
        evidence.append(f"of a token in {side.layout.words} (rank {side.rank}, profiled): {words}")
    return {"id": "spread", "title": title, "evidence": evidence}


def _costs(side: Side) -> list[tuple[str, int]]:
    """What a way of spreading pays: computing, collectives, messages, and idling, ns of a token."""
    busy = sum(ns for name, ns in side.parts.items() if name.startswith("busy: "))
    collective = side.parts["busy: collective"]
    idle = sum(ns for name, ns in side.parts.items() if name.startswith("idle: "))
    rows = (
        ("computing", busy - collective),
        ("collectives", collective),
        ("transfers", side.parts["transfer"]),
        ("idle", idle),
    )
    return [row for row in rows if row[1]]

"""Typed looks into the facts of a report, so that rules read like sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

__all__ = ["Facts", "held", "ints", "ms", "number", "percent"]

Row = Mapping[str, object]


def ms(ns: float) -> str:
    """Nanoseconds as milliseconds in words; what is short as microseconds."""
    value = ns / 1e6
    if 0 < value < 0.1:
        return f"{ns / 1e3:.1f} us"
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms"


def percent(share: float) -> str:
    """A share as a percentage in words."""
    fine = share < 0.095 or 0.99 <= share < 1
    return f"{share * 100:.1f} %" if fine else f"{share * 100:.0f} %"


@dataclass(frozen=True, slots=True)
class Facts:
    """The document of a report (docs/reference/report.md)."""

    document: Row

    def rows(self, key: str) -> list[Row]:
        """A list of objects; empty where it is missing."""
        value = self.document.get(key)
        return cast("list[Row]", value) if isinstance(value, list) else []

    def part(self, key: str) -> Row:
        """An object; empty where it is missing or null."""
        value = self.document.get(key)
        return cast("Row", value) if isinstance(value, Mapping) else {}

    def server(self, *path: str) -> object:
        """A fact of the server, or None."""
        value: object = self.part("server")
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def server_int(self, *path: str) -> int | None:
        """A whole number of the server's facts, or None."""
        value = self.server(*path)
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def stages(self) -> list[Row]:
        """One row a rank."""
        return self.rows("stages")

    @property
    def window_ns(self) -> int:
        """Length of the window."""
        return number(self.part("window"), "duration_ns")

    @property
    def is_pipeline(self) -> bool:
        """More than one stage."""
        return number(self.part("pipeline"), "pp_size") > 1

    @property
    def period_ns(self) -> int | None:
        """Measured period of a micro-batch step."""
        value = self.part("model").get("measured_period_ns")
        return value if isinstance(value, int) else None

    @property
    def steps(self) -> float:
        """Micro-batch steps that fit into the window."""
        return self.window_ns / self.period_ns if self.period_ns else 1.0

    def name(self, rank: object) -> str:
        """What to call a rank: its stage where each stage is one rank, else the rank."""
        one_each = self.is_pipeline and len({s.get("pp_rank") for s in self.stages}) == len(self.stages)
        return f"stage {self.document_stage(rank)}" if one_each and isinstance(rank, int) else f"rank {rank}"

    def document_stage(self, rank: int) -> int:
        """Pipeline stage of a rank; the rank itself where unknown."""
        for stage in self.stages:
            if stage["rank"] == rank and isinstance(stage.get("pp_rank"), int):
                return number(stage, "pp_rank")
        return rank

    def rows_of_bound(self) -> list[Row]:
        """Per stage, the terms of the formula."""
        value = self.part("model").get("per_stage")
        return cast("list[Row]", value) if isinstance(value, list) else []

    @property
    def slots(self) -> list[Row]:
        """One row a slot of the first stage."""
        value = self.part("micro_batches").get("by_slot")
        return cast("list[Row]", value) if isinstance(value, list) else []

    def slot_sizes(self) -> list[int]:
        """Median batch of each slot, 0 for a slot that was empty in most of its visits."""
        out: list[int] = []
        for slot in self.slots:
            size = slot.get("batch_size_p50")
            mostly = 2 * number(slot, "filled") >= number(slot, "visits")
            out.append(int(size) if isinstance(size, int) and mostly else 0)
        return out

    def running(self) -> int:
        """Requests in all slots together."""
        return sum(self.slot_sizes())

    def waiting(self) -> int | None:
        """Median length of the server's queue."""
        return self.server_int("queue", "p50")

    def throughput(self) -> float | None:
        """Unprofiled decode tokens a second of the whole server."""
        value = self.server("throughput", "decode")
        return float(value) if isinstance(value, int | float) else None

    def prefills(self) -> bool:
        """Whether most forwards of the window are prefills."""
        by_mode: dict[str, int] = {}
        for row in self.rows("forward_modes"):
            by_mode[str(row["mode"])] = by_mode.get(str(row["mode"]), 0) + number(row, "forwards")
        return 2 * by_mode.get("decode", 0) < sum(by_mode.values())

    def cause_ns(self, rank: int | None, *causes: str) -> int:
        """Bubble nanoseconds of some causes, of one rank or of all."""
        total = 0
        for stage in self.stages:
            if rank is None or stage["rank"] == rank:
                mine = cast("Row", stage["causes_ns"])
                total += sum(number(mine, c) for c in causes)
        return total

    def blamed_ns(
        self, *, root: int | None = None, cause: str | None = None, detail: str | None = None, waiter: int | None = None
    ) -> int:
        """Nanoseconds of the blame matrix that fit."""
        wanted = {"root_rank": root, "cause": cause, "detail": detail, "rank": waiter}
        keys = {k: v for k, v in wanted.items() if v is not None}
        return sum(number(row, "ns") for row in self.rows("blame") if all(row.get(k) == v for k, v in keys.items()))


def number(row: Row, key: str) -> int:
    """A whole number of a row; 0 where it is missing or null."""
    value = row.get(key)
    return int(value) if isinstance(value, int | float) else 0


def ints(values: Sequence[int]) -> str:
    """`31 and 1`, `8, 8, 8 and 0`."""
    words = [str(v) for v in values]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else "none"


def held(sizes: Sequence[int]) -> str:
    """What the slots hold: `31 and 1`, and of more than four `4 slots of 8, 12 empty`."""
    if len(sizes) <= 4:
        return ints(sizes)
    counts = {size: sum(s == size for s in sizes) for size in sorted(set(sizes), reverse=True)}
    words = [f"{n} empty" if not size else f"{n} slot{'s' if n > 1 else ''} of {size}" for size, n in counts.items()]
    return ", ".join(words)

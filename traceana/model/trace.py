"""`Trace`: everything the analyses read, on one clock, frozen. `build_trace` makes it from tables and a clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import polars as pl

from traceana import schema
from traceana.matching.topology import Topology
from traceana.tables import CaptureTables

__all__ = ["Trace", "Window"]


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch of trace time that every figure is about, and what was cut away to get it.

    `trimmed` has one entry per cut: {rank, side: head or tail, ns, why}. `basis` is visits, gpu or option.
    """

    start_ns: int
    end_ns: int
    basis: str
    trimmed: tuple[Mapping[str, object], ...] = ()
    first_visit: int | None = None
    last_visit: int | None = None

    @property
    def duration_ns(self) -> int:
        """Length."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Trace:
    """A capture on one clock. Every frame is on trace time; per-rank frames are keyed by rank.

    `launches[rank]` has one row per row of that rank's device table. `p2p_floor_ns` gives the shortest transfer seen
    of a (src, dst, bytes). `uncertainty_ns[rank]` is the half width of the rank's clock against trace time.
    """

    capture: CaptureTables
    topology: Topology
    window: Window
    visits: pl.DataFrame
    forwards: pl.DataFrame
    messages: pl.DataFrame
    controls: pl.DataFrame
    collectives: pl.DataFrame
    launches: Mapping[int, pl.DataFrame]
    clock: pl.DataFrame
    kernel_class: Mapping[str, str]
    uncertainty_ns: Mapping[int, int | None]
    unmatched: pl.DataFrame = field(default_factory=pl.DataFrame)
    losses: pl.DataFrame = field(default_factory=schema.LOSSES.empty)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks in order."""
        return tuple(r.info.rank for r in self.capture.ranks)

    @property
    def slots(self) -> int | None:
        """Slots of the loop (pp_size + async depth), where the server's facts tell."""
        facts = self.capture.server.facts if self.capture.server is not None else {}
        slots = facts.get("slots")
        return slots if isinstance(slots, int) else None

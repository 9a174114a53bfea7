"""The result of the clock: per rank offset, drift, uncertainty and what to subtract; what bounds it; what was wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceana.clock.prior import Prior
from traceana.intervals import IntArray

__all__ = ["ClockModel", "Correction"]


@dataclass(frozen=True, slots=True)
class Correction:
    """How far a clock is ahead of the reference: `offset_ns` when it shows `local_ns`; linear between, and beyond."""

    local_ns: tuple[int, ...]
    offset_ns: tuple[int, ...]

    def offset(self, local: IntArray) -> IntArray:
        """Offset at readings `local` (int64 ns), rounded down, so that later readings stay later."""
        if len(self.local_ns) == 1:
            return np.full(local.shape, self.offset_ns[0], dtype=np.int64)
        at, off = np.array(self.local_ns, dtype=np.int64), np.array(self.offset_ns, dtype=np.int64)
        k = np.clip(np.searchsorted(at, local, side="right") - 1, 0, at.size - 2)
        since, rise, run = local - at[k], off[k + 1] - off[k], at[k + 1] - at[k]
        if since.size and int(np.abs(since).max()) * max(int(np.abs(rise).max()), 1) >= 1 << 62:
            exact = [s * r // n for s, r, n in zip(since.tolist(), rise.tolist(), run.tolist(), strict=True)]
            return off[k] + np.array(exact, dtype=np.int64)
        exact_enough: IntArray = off[k] + since * rise // run
        return exact_enough


@dataclass(frozen=True, slots=True)
class ClockModel:
    """The clocks of a capture.

    `ranks` (CLOCK_RANKS) and `pairs` (CLOCK_PAIRS: all pairs up to 64 ranks, else neighbours and the reference) hold at
    `mid_ns` on the reference's clock. `binding` is CLOCK_BOUNDS with `rank` and `side` ("high", "low"): the chain of
    bounds that makes each end of a rank's interval against the reference. `cpu` and `gpu` are the corrections to
    apply; `worst_ns` is the largest possible error of a rank over the whole window (None: unbounded); `components`
    are the sets of ranks that are related both ways; `statements` says in words what limits all this.
    """

    reference_rank: int
    mid_ns: int
    ranks: pl.DataFrame
    pairs: pl.DataFrame
    binding: pl.DataFrame
    cpu: Mapping[int, Correction]
    gpu: Mapping[int, Correction]
    worst_ns: Mapping[int, int | None]
    components: tuple[tuple[int, ...], ...]
    violations: tuple[Mapping[str, object], ...]
    statements: tuple[str, ...]
    prior: Prior
    losses: pl.DataFrame

    @property
    def identifiable(self) -> bool:
        """Every rank is bounded both ways against the reference."""
        return len(self.components) <= 1

    @property
    def cpu_gpu_ns(self) -> dict[int, int]:
        """For each rank, its CPU clock minus its GPU clock, as chosen."""
        return {r: self.cpu[r].offset_ns[0] - self.gpu[r].offset_ns[0] for r in self.gpu}

    def pair_slack_ns(self, a: int, b: int) -> int | None:
        """Width of the feasible interval between two ranks; None where unbounded or not among `pairs`."""
        low, high = min(a, b), max(a, b)
        row = self.pairs.filter((pl.col("a") == low) & (pl.col("b") == high))
        if a == b or row.height == 0 or row.select(pl.any_horizontal(pl.all().is_null())).item():
            return 0 if a == b else None
        return int(row.select(pl.col("high_ns") - pl.col("low_ns")).item())

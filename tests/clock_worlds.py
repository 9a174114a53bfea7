"""Random worlds for the clock: true times first, then what each rank's clock shows of them. Shares no code with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from traceana import schema
from traceana.tables import RankInfo, RankTables

EPOCH_NS = 1_795_969_813_000_000_000


@dataclass
class ClockWorld:
    """Ranks whose clocks show true + offset + rate x (true - middle of the span), and the traffic between them."""

    offsets: list[int]
    rates_ppb: list[int]
    span_ns: int
    rng: np.random.Generator
    messages: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    controls: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    collectives: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    counts: dict[tuple[str, int, int, str], int] = field(default_factory=dict[tuple[str, int, int, str], int])

    def local(self, rank: int, true: int) -> int:
        """What the clock of `rank` shows at `true` (ns from the start of the span)."""
        rate = self.rates_ppb[rank] * (true - self.span_ns // 2) // 1_000_000_000
        return EPOCH_NS + true + self.offsets[rank] + rate

    def offset(self, a: int, b: int, reference: int, shown: int) -> int:
        """theta_b - theta_a at the instant when the clock of `reference` shows `shown`."""
        true = shown - EPOCH_NS
        for _ in range(3):
            true = shown - (self.local(reference, true) - true)
        return self.local(b, true) - self.local(a, true)

    def _next(self, what: str, src: int, dst: int, kind: str) -> int:
        n = self.counts.get((what, src, dst, kind), 0)
        self.counts[what, src, dst, kind] = n + 1
        return n

    def send(self, src: int, dst: int, at: int, *, wait: int, late: int, kind: str = "proxy", size: int = 4096) -> None:
        """An eager message: sent at `at`, its receive starts `late` after (before: negative) and takes `wait` more than
        the 6 us that a transfer needs."""
        n = self._next("nccl", src, dst, kind)
        start = at + late
        end = max(start, at) + 6_000 + wait
        self.messages.append(
            {
                "src": src, "dst": dst, "kind": kind, "ordinal": n, "bytes": size,
                "send_ts_ns": self.local(src, at), "send_end_ns": self.local(src, at + 5_000),
                "recv_ts_ns": self.local(dst, start), "recv_end_ns": self.local(dst, end),
                "send_row": n, "recv_row": n,
            }
        )  # fmt: skip

    def control(self, src: int, dst: int, at: int, *, late: int, lag: int) -> None:
        """A gloo message: send called at `at`, receive called `late` after, both done `lag` after the later."""
        n = self._next("gloo", src, dst, "requests")
        done = max(at, at + late) + lag
        self.controls.append(
            {
                "src": src, "dst": dst, "kind": "requests", "ordinal": n,
                "send_ts_ns": self.local(src, at), "send_end_ns": self.local(src, done + 1_000),
                "recv_ts_ns": self.local(dst, at + late), "recv_end_ns": self.local(dst, done),
            }
        )  # fmt: skip

    def collective(self, ranks: list[int], at: int, *, spread: int, transfer: int) -> None:
        """An all-reduce of `ranks` entered within `spread`, done `transfer` after the last entry, to 1 us."""
        n = self._next("collective", ranks[0], len(ranks), "")
        starts = {r: at + int(self.rng.integers(0, spread + 1)) for r in ranks}
        last = max(starts.values())
        for r in ranks:
            end = last + transfer + int(self.rng.integers(0, 1_000))
            self.collectives.append(
                {
                    "group": "g" + ",".join(map(str, ranks)), "instance": n, "rank": r, "collective": "allreduce",
                    "ts_ns": self.local(r, starts[r]), "end_ns": self.local(r, end), "row": n, "bytes": None,
                }
            )  # fmt: skip

    @property
    def ranks(self) -> list[RankTables]:
        """The ranks, without tables of their own."""
        return [RankTables(RankInfo(rank=r, file=Path(f"rank{r}"))) for r in range(len(self.offsets))]

    def frames(self) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
        """MESSAGES, CONTROLS, COLLECTIVES."""
        return (
            schema.MESSAGES.frame(self.messages), schema.CONTROLS.frame(self.controls),
            schema.COLLECTIVES.frame(self.collectives),
        )  # fmt: skip


def random_world(seed: int, ranks: int, span_ns: int, *, ppm: int = 30, traffic: int = 40) -> ClockWorld:
    """A ring with some shortcuts, gloo along it, and collectives of neighbours; parts of it one way or silent."""
    rng = np.random.default_rng(seed)
    offsets = [int(x) for x in rng.integers(-(10**9), 10**9, ranks)]
    rates = [int(x) for x in rng.integers(-ppm * 1000, ppm * 1000 + 1, ranks)]
    world = ClockWorld(offsets, rates, span_ns, rng)
    links = [(r, (r + 1) % ranks) for r in range(ranks) if rng.random() < 0.95]
    links += [(int(a), int(b)) for a, b in rng.integers(0, ranks, (ranks // 2, 2)) if a != b]
    times = np.sort(rng.integers(0, span_ns, traffic))
    for src, dst in links:
        slow = int(10 ** rng.uniform(3, 7))
        for at in times[rng.random(traffic) < 0.7].tolist():
            late = int(rng.integers(-slow, slow))
            wait = int(rng.integers(0, slow))
            world.send(src, dst, at, wait=wait, late=late, kind="proxy" if rng.random() < 0.8 else "output")
            if rng.random() < 0.5:
                world.control(
                    src, dst, at, late=int(rng.integers(-slow, slow)), lag=int(rng.integers(6_000, slow + 6_001))
                )
    if ranks >= 4 and rng.random() < 0.5:
        group = sorted(int(r) for r in rng.choice(ranks, 3, replace=False))
        for at in times[::4].tolist():
            world.collective(group, at, spread=int(rng.integers(0, 500_000)), transfer=int(rng.integers(4_000, 90_000)))
    return world

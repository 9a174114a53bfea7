"""One clock for all ranks: what the messages allow, what is chosen, and how sure it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import polars as pl

from traceana import schema
from traceana.clock.bounds import cpu, describe, gather, gpu, host
from traceana.clock.contradictions import Reconciled, instants, looks, reconcile
from traceana.clock.drift import PPB, bounds_at, edges_at
from traceana.clock.graph import UNREACHED, components, tight_path
from traceana.clock.lines import Ties, feasible, fit
from traceana.clock.model import ClockModel, Correction
from traceana.clock.prior import Assume, Prior, choose_prior, read_probes
from traceana.errors import ClockError
from traceana.intervals import IntArray
from traceana.tables import RankTables

__all__ = ["solve_clock"]

# All pairs up to this many ranks, and the chains behind every interval; above, only those of the widest few.
ALL_PAIRS_RANKS, WIDEST = 64, 8


def solve_clock(
    ranks: Sequence[RankTables],
    messages: pl.DataFrame,
    controls: pl.DataFrame,
    collectives: pl.DataFrame,
    *,
    assume: Assume | None = None,
    window_mid_ns: int | None = None,
    manifest: Mapping[str, object] | None = None,
    facts: Mapping[str, object] | None = None,
) -> ClockModel:
    """The clock of each rank from MESSAGES, CONTROLS and COLLECTIVES, all on the ranks' own clocks.

    `window_mid_ns` is on the reference's clock (default: the middle of the traffic). `facts` are the server's (`nnodes`
    is used), `manifest` the capture's (hosts of the ranks, round trips between hosts). Raises ClockError where the
    ranks contradict each other without end, or where there are none.
    """
    if not ranks:
        raise ClockError("no rank to align", hint="give a folder with at least one trace")
    infos = [t.info for t in ranks]
    nnodes = (facts or {}).get("nnodes")
    prior = choose_prior(
        infos, assume or Assume(), manifest=manifest, nnodes=nnodes if isinstance(nnodes, int) else None
    )
    probes, losses = read_probes(manifest, infos)
    numbers = sorted(i.rank for i in infos)
    told, beliefs = gather(ranks, messages, controls, collectives, prior=prior, probes=probes)
    clocks = [clock for r in numbers for clock in (2 * r, 2 * r + 1)]
    clocks += sorted(host(h) for h in set(prior.host_of.values()) | {e for p in probes for e in (p.a, p.b)})
    index = {clock: n for n, clock in enumerate(clocks)}
    settled, times, related = _settled(told, beliefs, index, numbers, numbers[0], window_mid_ns, prior)
    # The clock of the largest group of related ranks, not that of a rank nobody talks to.
    largest: tuple[int, ...] = max(related, key=len)
    reference = min(largest)
    if reference not in related[0]:
        settled, times, related = _settled(told, beliefs, index, numbers, reference, window_mid_ns, prior)
    else:
        reference = numbers[0]
    return _Solved(settled, index, numbers, reference, times, related, prior).model(losses)


def _settled(
    told: pl.DataFrame, beliefs: pl.DataFrame, index: dict[int, int], numbers: Sequence[int], reference: int,
    mid: int | None, prior: Prior,
) -> tuple[Reconciled, tuple[int, int, int], list[tuple[int, ...]]]:  # fmt: skip
    """Facts without contradiction, the window, and the sets of ranks whose GPU clocks bound each other both ways."""
    settled = reconcile(told, beliefs, index, gpu(reference), mid=mid, prior=prior)
    times = instants(settled.constraints, mid)
    group = components(edges_at(settled.constraints, times[1]))
    sets: dict[int, list[int]] = {}
    for rank in numbers:
        sets.setdefault(int(group[index[gpu(rank)]]), []).append(rank)
    return settled, times, [tuple(s) for s in sets.values()]


def _loss(name: str, count: int, detail: str) -> dict[str, object]:
    return {"name": name, "severity": "warning", "rank": None, "count": count, "detail": detail}


def _microseconds(ns: int) -> str:
    return f"{ns / 1000:,.1f} us"


class _Solved:
    """Constraints without contradiction, the clocks chosen, and the tables and words made from them."""

    def __init__(
        self, settled: Reconciled, index: dict[int, int], numbers: Sequence[int], reference: int,
        times: tuple[int, int, int], related: list[tuple[int, ...]], prior: Prior,
    ) -> None:  # fmt: skip
        self.settled, self.index, self.numbers, self.reference = settled, index, numbers, reference
        self.times, self.related, self.prior = times, related, prior
        self.c = settled.constraints
        self.at = np.array([index[gpu(r)] for r in numbers], dtype=np.int64)
        gpus = np.zeros(self.c.nodes, dtype=bool)
        gpus[self.at] = True
        rates = np.arange(self.c.nodes, dtype=np.int64)
        rates[[index[cpu(r)] for r in numbers]] = self.at
        self.ties = Ties(self._roots(), self._leaders(), rates, gpus)
        self.fit, self.bounds = fit(self.c, times, self.ties)
        self.edges = edges_at(self.c, times[1], self.fit.window.rates)
        from_root = np.full(self.c.nodes, self.c.root, dtype=np.int64)
        self.up, self.down = self.bounds.around(from_root)

    def _roots(self) -> IntArray:
        """Of every node the clock that it is told against: the GPU of the lowest rank it is related to both ways."""
        group = components(edges_at(self.c, self.times[1]))
        first: dict[int, int] = {int(group[self.c.root]): self.c.root}
        for node in [*self.at.tolist(), *range(self.c.nodes)]:
            first.setdefault(int(group[node]), node)
        return np.array([first[int(g)] for g in group], dtype=np.int64)

    def _leaders(self) -> IntArray:
        """The node each node should agree with: a CPU with its GPU, a GPU with the reference or else the lowest rank of
        its host if it kept its prior."""
        kept = set(self.settled.facts.filter(pl.col("source") == "same_host").get_column("kind").to_list())
        out = np.arange(self.c.nodes, dtype=np.int64)
        first: dict[int, int] = {}
        for rank in [self.reference, *self.numbers]:
            home = self.prior.host_of.get(rank) if self.prior.kind != "none" and f"rank {rank}" in kept else None
            leader = rank if home is None else first.setdefault(home, rank)
            out[self.index[gpu(rank)]] = out[self.index[cpu(rank)]] = self.index[gpu(leader)]
        for home, rank in first.items():
            out[self.index[host(home)]] = self.index[gpu(rank)]
        return out

    def model(self, losses: list[dict[str, object]]) -> ClockModel:
        """Everything a report needs."""
        worst = self._worst()
        binding = self._binding()
        chains = binding.group_by("rank", "side").agg(pl.col("source").unique(maintain_order=True).str.join(" + "))
        told = {(rank, side): words for rank, side, words in chains.iter_rows()}
        rows = [self._row(rank, int(node), told) for rank, node in zip(self.numbers, self.at, strict=True)]
        return ClockModel(
            reference_rank=self.reference,
            mid_ns=self.times[1],
            ranks=schema.CLOCK_RANKS.frame(pl.DataFrame(rows, schema=schema.CLOCK_RANKS.polars_schema)),
            pairs=self._pairs(),
            binding=binding,
            cpu=self._corrections(cpu),
            gpu=self._corrections(gpu),
            worst_ns=dict(zip(self.numbers, worst, strict=True)),
            components=tuple(self.related),
            violations=tuple(self.settled.violations),
            statements=tuple(self._statements(rows)),
            prior=self.prior,
            losses=self._losses(losses),
        )

    def _row(self, rank: int, node: int, told: Mapping[tuple[int, str], str]) -> dict[str, object]:
        up, down, theta = int(self.up[node]), int(self.down[node]), int(self.fit.theta[node])
        slope = int(self.fit.slope[node])
        if self.fit.knots:
            lo, _, hi = self.times
            slope = int(self.fit.at(hi)[node] - self.fit.at(lo)[node]) * PPB // (hi - lo)
        return {
            "rank": rank,
            # Of an unrelated rank this is what was applied: its stamps are taken as they are.
            "offset_ns": theta + int(self.c.crude[node]),
            "drift_ppm": slope / 1000,
            "uncertainty_ns": None if UNREACHED in (up, down) else max(up - theta, theta + down),
            "method": self._method(rank, up, down, int(self.c.crude[node]), told),
        }

    def _method(self, rank: int, up: int, down: int, crude: int, told: Mapping[tuple[int, str], str]) -> str:
        if rank == self.reference:
            return "reference"
        high, low = (told.get((rank, side), "all bounds together") for side in ("high", "low"))
        if up >= UNREACHED and down >= UNREACHED:
            return "unrelated: no message, probe or prior links it to the reference"
        if down >= UNREACHED:
            return f"one-sided: at most {up + crude} ns ahead of the reference ({high}), nothing bounds it below"
        if up >= UNREACHED:
            return f"one-sided: at least {crude - down} ns ahead of the reference ({low}), nothing bounds it above"
        both = high if high == low else f"above {high}, below {low}"
        return f"{both}, bent line" if self.fit.knots else both

    def _corrections(self, clock: Callable[[int], int]) -> dict[int, Correction]:
        """What to subtract from the readings of the CPU or GPU clocks."""
        lo, mid, hi = self.times
        fit = self.fit
        looks = fit.knots or (tuple(sorted({lo, mid, hi})) if fit.slope.any() else (mid,))
        offsets = np.stack([fit.at(t) + self.c.crude for t in looks])
        out: dict[int, Correction] = {}
        for rank in self.numbers:
            mine = offsets[:, self.index[clock(rank)]].tolist()
            at = tuple(t + o for t, o in zip(looks, mine, strict=True))
            flat = len(set(mine)) == 1
            out[rank] = Correction(at[:1], tuple(mine[:1])) if flat else Correction(at, tuple(mine))
        return out

    def _worst(self) -> list[int | None]:
        """Largest possible error of every rank's GPU clock over the window."""
        roots = np.full(self.c.nodes, self.c.root, dtype=np.int64)
        most = np.zeros(self.at.size, dtype=np.int64)
        for tau in looks(self.times, len(self.numbers)):
            bounds = self.bounds if tau == self.times[1] else feasible(self.c, self.fit.window, tau)
            if bounds is None:  # what was found possible without lines may not be with them
                return [None] * self.at.size
            up, down = bounds.around(roots)
            theta = self.fit.at(tau)
            most = np.maximum(most, np.maximum(up - theta, down + theta)[self.at])
        return [v if v < UNREACHED // 2 else None for v in most.tolist()]

    def _binding(self) -> pl.DataFrame:
        """The chains of bounds behind both ends of the intervals; in large captures of the widest ones only."""
        width = np.where((self.up < UNREACHED) & (self.down < UNREACHED), self.up + self.down, -1)[self.at]
        few = width.size if width.size <= ALL_PAIRS_RANKS else WIDEST
        shown = sorted(np.argsort(-width, kind="stable")[:few].tolist())
        back = self.edges.reversed
        rows: list[int] = []
        labels: list[tuple[int, str]] = []
        for n in shown:
            node = int(self.at[n])
            for side, graph, dist in (("high", self.edges, self.up), ("low", back, self.down)):
                path = tight_path(graph, dist, self.c.root, node)
                rows += [int(graph.fact[p]) for p in path]
                labels += [(self.numbers[n], side)] * len(path)
        return describe(self.settled.facts[rows]).with_columns(
            pl.Series("rank", [r for r, _ in labels], dtype=pl.Int32),
            pl.Series("side", [s for _, s in labels], dtype=pl.String),
        )

    def _pairs(self) -> pl.DataFrame:
        n = len(self.numbers)
        if n <= ALL_PAIRS_RANKS:
            a, b = np.triu_indices(n, 1)
            d = self.bounds.between(self.at)
            high, low = d[a, b], d[b, a]
        else:
            # Bounds between neighbours are exact in the closed matrix; those of the reference come from the sweeps.
            place = np.full(self.c.nodes, -1, dtype=np.int64)
            place[self.at] = np.arange(n)
            ends = np.stack([place[self.edges.a], place[self.edges.b]])
            near = np.sort(ends[:, (ends >= 0).all(axis=0)], axis=0)
            near = np.unique(near[:, near[0] != near[1]], axis=1)
            ref = self.numbers.index(self.reference)
            rest = np.setdiff1d(np.arange(n), near[:, (near == ref).any(axis=0)].ravel())
            rest = rest[rest != ref]
            a = np.concatenate([near[0], np.minimum(rest, ref)])
            b = np.concatenate([near[1], np.maximum(rest, ref)])
            high, low = self.bounds.w[self.at[a], self.at[b]], self.bounds.w[self.at[b], self.at[a]]
            far = np.arange(a.size) >= near.shape[1]
            other = self.at[np.where(a == ref, b, a)]
            up, down = self.up[other], self.down[other]
            high = np.where(far, np.where(a == ref, up, down), high)
            low = np.where(far, np.where(a == ref, down, up), low)
        step = self.c.crude[self.at[b]] - self.c.crude[self.at[a]]
        names = np.array(self.numbers)
        frame = pl.DataFrame({"a": names[a], "b": names[b], "low_ns": step - low, "high_ns": step + high})
        return schema.CLOCK_PAIRS.frame(
            frame.with_columns(
                pl.when(pl.Series(low < UNREACHED)).then("low_ns").alias("low_ns"),
                pl.when(pl.Series(high < UNREACHED)).then("high_ns").alias("high_ns"),
            ).sort("a", "b")
        )

    def _losses(self, losses: list[dict[str, object]]) -> pl.DataFrame:
        out = list(losses)
        found = self.settled.violations
        if found:
            count = sum(int(str(v["dropped_count"])) for v in found)
            out.append(_loss("clock_contradiction", count, "; ".join(str(v["reason"]) for v in found[:5])))
        if self.fit.worst > 0:
            out.append(_loss("clock_residual", 1, f"the chosen clocks break the worst bound by {self.fit.worst} ns"))
        apart = [r for g in self.related if self.reference not in g for r in g]
        if apart:
            words = f"not related to rank {self.reference} both ways: ranks {', '.join(map(str, apart[:20]))}"
            out.append(_loss("clock_unrelated", len(apart), words))
        return schema.LOSSES.frame(out) if out else schema.LOSSES.empty()

    def _statements(self, rows: Sequence[Mapping[str, object]]) -> list[str]:
        out = [f"Clock prior: {self.prior.kind} ({self.prior.reason})."]
        known = [int(str(r["uncertainty_ns"])) for r in rows if r["uncertainty_ns"] is not None]
        widest = max(known, default=0)
        if len(known) > 1:
            out.append(f"Offsets against rank {self.reference} are known to within {_microseconds(widest)}.")
            drift = self._room_for_drift()
            if 20 * drift > widest:
                out.append(f"Up to {_microseconds(drift)} of that is room for clocks that drift.")
        told = pl.col("source").cast(pl.String).is_in(["p2p", "gloo", "collective"])
        ways = self.settled.facts.filter(told).select(pl.col("a") // 2, pl.col("b") // 2).unique()
        returns = ways.join(ways, left_on=["a", "b"], right_on=["b", "a"], how="semi").height
        if len(known) > 2 and ways.height and not returns:
            out.append(
                "All messages go one way round a ring, so every pair is only known to the slack of the whole ring: "
                f"it leaves the clocks {_microseconds(2 * widest)} wide."
            )
        out += [f"Rank {r['rank']} is {r['method']}." for r in rows if r["uncertainty_ns"] is None]
        for group in self.related:
            if self.reference not in group and len(group) > 1:
                out.append(f"Ranks {', '.join(map(str, group))} are related to each other, not to the reference.")
        lo, _, hi = self.times
        if self.fit.knots:
            out.append(f"No straight line fits all clocks; they are bent at {len(self.fit.knots) - 2} instants.")
        elif self.fit.slope.any():
            ppm = int(self.fit.slope[np.argmax(np.abs(self.fit.slope))]) / 1000
            out.append(f"Clocks drift against the reference by up to {ppm:.3f} ppm over {(hi - lo) / PPB:.3f} s.")
        return out + [f"{str(v['reason'])[:1].upper()}{str(v['reason'])[1:]}." for v in self.settled.violations]

    def _room_for_drift(self) -> int:
        """By how much the widest half width would shrink if no clock drifted."""
        still = bounds_at(self.c, self.times[1], np.zeros((self.c.nodes, self.c.nodes), dtype=np.int64))
        if still is None or len(self.numbers) > ALL_PAIRS_RANKS:
            return 0
        up, down = still.around(np.full(self.c.nodes, self.c.root, dtype=np.int64))
        both = (self.up < UNREACHED) & (self.down < UNREACHED)
        gain = np.where(both, self.up + self.down - up - down, 0)[self.at]
        return int(gain.max(initial=0)) // 2

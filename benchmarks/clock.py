"""Time to solve the clocks of many ranks: `python benchmarks/clock.py [RANKS] [MESSAGES_EACH]`.

A world of pipelines of eight stages (and one of a single long ring), every rank sending its messages to the next one,
with offsets to a second and rates to 30 ppm. Prints seconds, and checks that every true offset lies in its interval.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import polars as pl

from traceana import schema
from traceana.clock.align import solve_clock
from traceana.clock.prior import Assume
from traceana.tables import RankInfo, RankTables

SPAN_NS = 10_000_000_000
EPOCH_NS = 1_795_969_813_000_000_000


def world(
    ranks: int, each: int, stages: int, seed: int = 1
) -> tuple[list[RankTables], pl.DataFrame, np.ndarray, np.ndarray]:
    """Ranks without tables, their MESSAGES, and of each rank the true offset at the middle of SPAN_NS and the rate."""
    rng = np.random.default_rng(seed)
    offset = rng.integers(-(10**9), 10**9, ranks)
    ppb = rng.integers(-30_000, 30_000, ranks)
    src = np.repeat(np.arange(ranks), each)
    first = src - src % stages
    dst = first + (src - first + 1) % np.minimum(stages, ranks - first)
    true = np.sort(rng.integers(0, SPAN_NS, (ranks, each)), axis=1).ravel()
    delay = rng.integers(6_000, 2_000_000, true.size)

    def local(rank: np.ndarray, t: np.ndarray) -> np.ndarray:
        return np.asarray(EPOCH_NS + t + offset[rank] + ppb[rank] * (t - SPAN_NS // 2) // 1_000_000_000)

    order = np.arange(ranks * each) % each
    frame = pl.DataFrame(
        {
            "src": src, "dst": dst, "ordinal": order,
            "send_ts_ns": local(src, true), "send_end_ns": local(src, true + 5_000),
            "recv_ts_ns": local(dst, true + delay - 5_000), "recv_end_ns": local(dst, true + delay),
            "send_row": order, "recv_row": order,
        }
    ).with_columns(pl.lit("proxy").alias("kind"))  # fmt: skip
    tables = [RankTables(RankInfo(rank=r, file=Path(f"rank{r}"))) for r in range(ranks)]
    return tables, schema.MESSAGES.frame(frame), offset, ppb


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    each = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
    for stages in (8, ranks):
        tables, messages, offset, ppb = world(ranks, each, stages)
        start, busy = time.perf_counter(), time.process_time()
        model = solve_clock(
            tables, messages, schema.CONTROLS.empty(), schema.COLLECTIVES.empty(), assume=Assume("none")
        )
        took, cpu = time.perf_counter() - start, time.process_time() - busy
        pairs = model.pairs.drop_nulls()
        a, b, low, high = (pairs.get_column(c).to_numpy() for c in ("a", "b", "low_ns", "high_ns"))
        # The intervals hold when the clock of the ring's lowest rank shows mid_ns.
        at = model.mid_ns - EPOCH_NS - offset[a - a % stages] - SPAN_NS // 2
        true = offset[b] - offset[a] + (ppb[b] - ppb[a]) * at // 1_000_000_000
        inside = (low <= true) & (true <= high)
        print(
            f"{ranks} ranks, rings of {stages}, {messages.height:,} messages: {took:.2f} s ({cpu:.2f} s of CPU); "
            f"{int(inside.sum())} of {pairs.height} pairs hold the offset, {len(model.components)} components"
        )


if __name__ == "__main__":
    main()

"""Waits for another stage's forward, cut into what is serial, structural and workload."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceana.model.chain import CODE, FORWARD
from traceana.model.graph import Graph
from traceana.model.pieces import Pieces, in_order
from traceana.model.trace import Trace

__all__ = ["PARTS", "ForwardParts"]

PARTS = ("serial", "structural", "workload")


class ForwardParts:
    """Cuts stretches of `upstream_compute` in another stage's forward into serial, structural and workload, exactly.

    A stage's baseline is the median duration of its forwards of the capture's commonest mode. Structural is how far the
    baseline lies above the fastest stage's; workload how far this forward lies above its stage's baseline; serial the
    rest: it has to pass through. They are laid out in the order serial, structural, workload from the forward's start,
    so a gap that opens within the forward loses serial time first.
    """

    def __init__(self, trace: Trace, graph: Graph) -> None:
        ns = (pl.col("end_ns") - pl.col("ts_ns")).alias("ns")
        forwards = trace.forwards.sort("rank", "visit").with_columns(ns)
        mode = forwards.get_column("mode").mode().sort()
        common = forwards.filter(pl.col("mode").eq_missing(pl.lit(mode[0] if mode.len() else None, dtype=pl.String)))
        base = {int(r): int(v) for r, v in common.group_by("rank").agg(pl.col("ns").quantile(0.5, "lower")).iter_rows()}
        fastest = min(base.values(), default=0)
        self._first, self._took = graph.forward_start, forwards.get_column("ns").to_numpy()
        baseline = np.array([base.get(int(r), fastest) for r in forwards.get_column("rank")], dtype=np.int64)
        self._workload = np.maximum(self._took - baseline, 0)
        self._structural = np.minimum(baseline - fastest, self._took - self._workload)

    def split(self, p: Pieces) -> Pieces:
        """The pieces of one rank, in order, with those stretches cut."""
        chosen = (p.cause == CODE["upstream_compute"]) & (p.element == FORWARD)
        rows = np.flatnonzero(chosen)
        if rows.size == 0:
            return p
        f = p.ref[rows]
        first, took, workload = self._first[f], self._took[f], self._workload[f]
        cuts = [first, first + (took - workload - self._structural[f]), first + (took - workload), first + took]
        cuts[0] = np.minimum(cuts[0], p.lo[rows])
        cuts[3] = np.maximum(cuts[3], p.hi[rows])
        out = [p.take(np.flatnonzero(~chosen))]
        for part in range(3):
            lo, hi = np.maximum(p.lo[rows], cuts[part]), np.minimum(p.hi[rows], cuts[part + 1])
            some = hi > lo
            out.append(p.take(rows[some], lo=lo[some], hi=hi[some], phase=np.full(int(some.sum()), part)))
        return in_order(out)

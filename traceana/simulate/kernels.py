"""The GPU side of a visit: how long its forward takes, what of it belongs to a kernel, a class, or the layers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from traceana.intervals import IntArray
from traceana.model.forwards import forward_of_activities
from traceana.model.model import Model

__all__ = ["Kernels", "measure_kernels"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Forwards of one stage, one row per visit asked for (0 where it has none), in ns.

    `gpu`: busy time with the gaps inside CUDA graphs filled; `busy`: without them; `nodes`: kernels in graphs; `count`:
    activities; `before` and `after`: those ahead of the first and behind the last kernel of a layer. `table` has a row per (row, name): row, name, class, ns, count. `layers`: how often the forward repeats
    its layer, None where it repeats nothing.
    """

    gpu: IntArray
    busy: IntArray
    nodes: IntArray
    count: IntArray
    before: IntArray
    after: IntArray
    table: pl.DataFrame
    layers: int | None

    def of(self, chosen: pl.Expr) -> IntArray:
        """Time per row of the kernels that `chosen` picks from `table`, never more than the forward."""
        out = np.zeros(self.gpu.size, dtype=np.int64)
        part = self.table.filter(chosen).group_by("row").agg(pl.col("ns").sum())
        out[part.get_column("row").to_numpy()] = part.get_column("ns").to_numpy()
        return np.minimum(out, self.gpu)

    def replaced(self, batch: IntArray, usual: np.ndarray) -> Kernels:
        """With the median of the usual rows of the same batch in the rows that are not usual."""
        out = {n: getattr(self, n).copy() for n in ("gpu", "busy", "nodes", "count", "before", "after")}
        for size in np.unique(batch[~usual]):
            same = (batch == size) & usual
            if same.any():
                for values in out.values():
                    values[(batch == size) & ~usual] = int(np.median(values[same]))
        return replace(self, **out)

    def matching(self, pattern: re.Pattern[str]) -> pl.Expr:
        """The kernels whose name the pattern finds."""
        names = self.table.get_column("name").unique().to_list()
        return pl.col("name").is_in([n for n in names if pattern.search(n)])

    def layered(self) -> IntArray:
        """Time per row in the repeated layers, gaps between their kernels included; zero without `layers`."""
        if not self.layers:
            return np.zeros(self.gpu.size, dtype=np.int64)
        whole = (pl.col("count") // self.layers) * self.layers
        part = self.table.select("row", (pl.col("ns") * whole // pl.col("count")).alias("ns"))
        share = part.group_by("row").agg(pl.col("ns").sum())
        inside = np.zeros(self.gpu.size, dtype=np.int64)
        inside[share.get_column("row").to_numpy()] = share.get_column("ns").to_numpy()
        total = self.of(pl.lit(True))
        return np.where(total > 0, self.gpu * np.minimum(inside, total) // np.maximum(total, 1), 0)


def measure_kernels(model: Model, rank: int, visits: IntArray) -> Kernels:
    """The forwards of `visits` on `rank`."""
    trace = model.trace
    position = trace.ranks.index(rank)
    table = trace.capture.ranks[position]
    launch = trace.launches[rank]
    member = forward_of_activities(table, trace.visits.filter(pl.col("rank") == rank), launch)
    order = np.argsort(visits)
    at = np.searchsorted(visits[order], member)
    at = np.minimum(at, max(visits.size - 1, 0))
    row = np.where(visits[order][at] == member, order[at], -1) if visits.size else np.full(member.size, -1)
    frame = (
        table.device.select("ts_ns", "end_ns", "name", "correlation")
        .with_columns(launch.get_column("call_name"), pl.Series("row", row))
        .filter(pl.col("row") >= 0)
        .with_columns(pl.col("call_name").cast(pl.String).str.contains("GraphLaunch").fill_null(False).alias("graph"))
    )
    by_name = (
        frame.group_by("row", "name")
        .agg((pl.col("end_ns") - pl.col("ts_ns")).sum().alias("ns"), pl.len().alias("count"))
        .with_columns(pl.col("name").cast(pl.String))
        .with_columns(pl.col("name").replace_strict(dict(trace.kernel_class), default="other").alias("class"))
        .sort("row", "name")
    )
    graphs = frame.filter("graph").group_by("row", "correlation").agg(pl.col("ts_ns").min(), pl.col("end_ns").max())
    spans = pl.concat(
        [graphs.select("row", "ts_ns", "end_ns"), frame.filter(~pl.col("graph")).select("row", "ts_ns", "end_ns")]
    )
    size = visits.size
    counts = frame.group_by("row").agg(pl.len().alias("count"), pl.col("graph").sum().alias("nodes"))
    nodes, count = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    nodes[counts.get_column("row").to_numpy()] = counts.get_column("nodes").to_numpy()
    count[counts.get_column("row").to_numpy()] = counts.get_column("count").to_numpy()
    layers = _layers(by_name)
    before, after = _around(frame, by_name, layers, count)
    return Kernels(_covered(spans, size), _covered(frame, size), nodes, count, before, after, by_name, layers)


def _covered(spans: pl.DataFrame, size: int) -> IntArray:
    """Length of the union of the spans of each row."""
    frame = spans.select("row", "ts_ns", "end_ns").sort("row", "ts_ns", "end_ns")
    reach = pl.col("end_ns").cum_max().shift(1).over("row").fill_null(0)
    gain = (pl.col("end_ns") - pl.max_horizontal("ts_ns", reach)).clip(lower_bound=0)
    total = frame.select("row", gain.alias("ns")).group_by("row").agg(pl.col("ns").sum())
    out = np.zeros(size, dtype=np.int64)
    out[total.get_column("row").to_numpy()] = total.get_column("ns").to_numpy()
    return out


def _around(
    frame: pl.DataFrame, by_name: pl.DataFrame, layers: int | None, count: IntArray
) -> tuple[IntArray, IntArray]:
    """Activities of each row ahead of the first and behind the last one whose kernel occurs in every layer."""
    before, after = np.zeros_like(count), np.zeros_like(count)
    if layers is None:
        return before, after
    usual = by_name.filter(pl.col("count") >= layers).get_column("name").unique()
    at = pl.int_range(pl.len()).over("row").alias("at")
    order = frame.select("row", "ts_ns", pl.col("name").cast(pl.String)).sort("row", "ts_ns").with_columns(at)
    ends = order.filter(pl.col("name").is_in(usual.implode())).group_by("row").agg(
        pl.col("at").min().alias("first"), pl.col("at").max().alias("last")
    )  # fmt: skip
    rows = ends.get_column("row").to_numpy()
    before[rows] = ends.get_column("first").to_numpy()
    after[rows] = count[rows] - 1 - ends.get_column("last").to_numpy()
    return before, after


def _layers(table: pl.DataFrame) -> int | None:
    """How often the forward repeats its layer: the commonest count, above one, of a kernel in a forward. None where
    fewer than three kernels share it, or where its multiples explain less than half of the time."""
    if table.height == 0:
        return None
    usual = table.group_by("name").agg(pl.col("count").mode().min(), pl.col("ns").sum())
    names = Counter(int(c) for c in usual.get_column("count") if c > 1)
    if not names:
        return None
    base, shared = max(names.items(), key=lambda item: (item[1], item[0]))
    explained = usual.filter(pl.col("count") % base == 0).get_column("ns").sum()
    return base if shared >= 3 and 2 * explained > usual.get_column("ns").sum() else None

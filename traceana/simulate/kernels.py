"""The GPU side of a visit: how long its forward takes, what of it belongs to a kernel, a class, or the layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from traceana.intervals import IntArray
from traceana.matching.visits import main_thread, visit_of
from traceana.model.forwards import forward_of_activities
from traceana.model.model import Model

__all__ = ["Kernels", "measure_kernels"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Forwards of one stage, one row per visit asked for (0 where it has none), in ns.

    `gpu`: busy time with the gaps inside CUDA graphs filled; `busy`: without them; `nodes`: kernels in graphs; `count`:
    activities; `before` and `after`: those ahead of the first and behind the last kernel of a layer. `table` has a row
    per (row, name) of the forward: row, name, class, ns, count; `side` the same, with the column `early`, for what the
    scheduler's thread launched outside of it: ahead of the forward (true) or behind it. `layers`: how often the forward
    repeats its layer, None where it repeats nothing.
    """

    gpu: IntArray
    busy: IntArray
    nodes: IntArray
    count: IntArray
    before: IntArray
    after: IntArray
    table: pl.DataFrame
    side: pl.DataFrame
    layers: int | None

    def of(self, chosen: pl.Expr) -> IntArray:
        """Time per row of the kernels that `chosen` picks from `table`, never more than the forward."""
        out = np.zeros(self.gpu.size, dtype=np.int64)
        part = self.table.filter(chosen).group_by("row").agg(pl.col("ns").sum())
        out[part.get_column("row").to_numpy()] = part.get_column("ns").to_numpy()
        return np.minimum(out, self.gpu)

    def beside(self, chosen: pl.Expr, *, early: bool) -> IntArray:
        """Time per row of the scheduler's own kernels and copies that `chosen` picks, ahead of the forward or behind it."""
        out = np.zeros(self.gpu.size, dtype=np.int64)
        part = self.side.filter(chosen & (pl.col("early") == early)).group_by("row").agg(pl.col("ns").sum())
        out[part.get_column("row").to_numpy()] = part.get_column("ns").to_numpy()
        return out

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
        names = pl.concat([self.table.get_column("name"), self.side.get_column("name")]).unique().to_list()
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
    every = trace.visits.filter(pl.col("rank") == rank)
    member = forward_of_activities(table, every, launch)
    own = table.device.select("ts_ns", "end_ns", "name", "correlation", "collective").with_columns(
        launch.select("call_name", "call_ts_ns", "call_tid")
    )
    frame = (
        own.with_columns(pl.Series("row", _row_of(visits, member)))
        .filter(pl.col("row") >= 0)
        .with_columns(pl.col("call_name").cast(pl.String).str.contains("GraphLaunch").fill_null(False).alias("graph"))
    )
    by_name = _by_name(frame, ["row", "name"], trace.kernel_class)
    issued = visit_of(every, launch.get_column("call_ts_ns").fill_null(-1).to_numpy())
    message = pl.col("collective").cast(pl.String).is_in(["send", "recv"]).fill_null(False)
    starts = every.select(pl.col("visit").alias("at"), "run_ts_ns")
    side = (
        own.with_columns(
            pl.Series("row", _row_of(visits, issued)), pl.Series("at", issued), pl.Series("member", member)
        )
        .filter((pl.col("row") >= 0) & (pl.col("member") < 0) & ~message & (pl.col("call_tid") == main_thread(table)))
        .join(starts, on="at", how="left", maintain_order="left")
        .with_columns((pl.col("call_ts_ns") < pl.col("run_ts_ns")).fill_null(True).alias("early"))
    )
    by_side = _by_name(side, ["row", "name", "early"], trace.kernel_class)
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
    gpu, busy = _covered(spans, size), _covered(frame, size)
    return Kernels(gpu, busy, nodes, count, before, after, by_name, by_side, layers)


def _row_of(visits: IntArray, asked: IntArray) -> IntArray:
    """The row of each visit asked for, -1 where `visits` has it not."""
    if not visits.size:
        return np.full(asked.size, -1, dtype=np.int64)
    order = np.argsort(visits)
    at = np.minimum(np.searchsorted(visits[order], asked), visits.size - 1)
    return np.where(visits[order][at] == asked, order[at], -1)


def _by_name(frame: pl.DataFrame, keys: list[str], classes: Mapping[str, str]) -> pl.DataFrame:
    return (
        frame.group_by(keys)
        .agg((pl.col("end_ns") - pl.col("ts_ns")).sum().alias("ns"), pl.len().alias("count"))
        .with_columns(pl.col("name").cast(pl.String))
        .with_columns(
            pl.col("name").replace_strict(dict(classes), default="other", return_dtype=pl.String).alias("class")
        )
        .sort(keys)
    )


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

"""The GPU side of a visit: how long its forward takes, what of it belongs to a kernel, a class, or the layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from traceana.categories import in_numbers, matching
from traceana.intervals import IntArray
from traceana.matching.spans import main_thread
from traceana.matching.visits import visit_of
from traceana.model.forwards import forward_of_activities
from traceana.model.model import Model

__all__ = ["APART", "BODY", "EARLY", "HEAD", "LATE", "Kernels", "Starts", "measure_kernels"]

# Where a kernel stands: on the scheduler's own streams ahead of the forward, in the forward ahead of its graph, in the
# graph or behind it (all of a forward without one), on the scheduler's streams behind the forward.
EARLY, HEAD, BODY, LATE = "early", "head", "body", "late"
APART = (EARLY, HEAD, LATE)
_PPM = 1_000_000


@dataclass(frozen=True, slots=True)
class Starts:
    """When a graphed forward ends, beyond its times on the GPU. `lag`: ns after its launch, or after what its stream
    waited for, medians where each came last. `head_at`: when the kernels ahead of the graph are launched, as a share
    (ppm) of the host time from the start of run_batch to the graph's launch. `eager_ns`: host time from one launch to
    the next among those kernels, its Python included; 0 where there are none."""

    lag: tuple[int, int] = (0, 0)
    head_at: int = 0
    eager_ns: int = 0


@dataclass(frozen=True, slots=True)
class Kernels:
    """Forwards of one stage, one row per visit asked for (0 where it has none), in ns.

    `gpu`: busy time of the body with the gaps inside CUDA graphs filled; `busy`: without them; `nodes`: kernels in
    graphs; `count`: activities; `before` and `after`: those ahead of the first and behind the last kernel of a layer.
    `table` has a row per (row, name, place): row, name, place, class, ns, count. `layers`: how often the forward
    repeats its layer, None where it repeats nothing.
    """

    gpu: IntArray
    busy: IntArray
    nodes: IntArray
    count: IntArray
    before: IntArray
    after: IntArray
    table: pl.DataFrame
    layers: int | None
    starts: Starts = Starts()

    def of(self, chosen: pl.Expr, place: str = BODY) -> IntArray:
        """Time per row of the kernels that `chosen` picks at one place; of the body never more than the body."""
        out = np.zeros(self.gpu.size, dtype=np.int64)
        part = self.table.filter(chosen & (pl.col("place") == place)).group_by("row").agg(pl.col("ns").sum())
        out[part.get_column("row").to_numpy()] = part.get_column("ns").to_numpy()
        return np.minimum(out, self.gpu) if place == BODY else out

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
        return pl.col("name").is_in([n for n in self.table.get_column("name").unique() if pattern.search(n)])

    def layered(self) -> IntArray:
        """Time per row in the repeated layers, gaps between their kernels included; zero without `layers`."""
        if not self.layers:
            return np.zeros(self.gpu.size, dtype=np.int64)
        whole = (pl.col("count") // self.layers) * self.layers
        body = self.table.filter(pl.col("place") == BODY)
        part = body.select("row", (pl.col("ns") * whole // pl.col("count")).alias("ns"))
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
    issued = visit_of(every, launch.get_column("call_ts_ns").fill_null(-1).to_numpy())
    message = pl.col("collective").cast(pl.String).is_in(["send", "recv"]).fill_null(False)
    own = (
        table.device.select("ts_ns", "end_ns", "name", "correlation", "collective")
        .with_columns(
            *launch.select("call_ts_ns", "call_end_ns", "call_tid").get_columns(),
            matching(launch.get_column("call_name"), "GraphLaunch").fill_null(False).alias("graph"),
            pl.Series("row", _row_of(visits, issued)),
            pl.Series("at", issued),
            pl.Series("inside", member >= 0),
        )
        .filter((pl.col("row") >= 0) & ~message & pl.col("call_tid").eq_missing(main_thread(table)))
        .join(every.select(pl.col("visit").alias("at"), "run_ts_ns"), on="at", how="left", maintain_order="left")
        .with_columns(
            pl.col("call_ts_ns").filter(pl.col("graph") & pl.col("inside")).min().over("row").alias("graph_ts")
        )
    )
    ahead = (pl.col("call_ts_ns") < pl.col("run_ts_ns")).fill_null(True)
    head = (pl.col("call_ts_ns") < pl.col("graph_ts")).fill_null(False)
    place = (
        pl.when(pl.col("inside"))
        .then(pl.when(head).then(pl.lit(HEAD)).otherwise(pl.lit(BODY)))
        .otherwise(pl.when(ahead).then(pl.lit(EARLY)).otherwise(pl.lit(LATE)))
    )
    own = own.with_columns(place.alias("place"))
    by_name = _by_name(own, ["row", "name", "place"], trace.kernel_class)
    forward, body = own.filter("inside"), own.filter(pl.col("place") == BODY)
    graphs = body.filter("graph").group_by("row", "correlation").agg(pl.col("ts_ns").min(), pl.col("end_ns").max())
    spans = pl.concat(
        [graphs.select("row", "ts_ns", "end_ns"), body.filter(~pl.col("graph")).select("row", "ts_ns", "end_ns")]
    )
    size = visits.size
    counts = forward.group_by("row").agg(pl.len().alias("count"), pl.col("graph").sum().alias("nodes"))
    nodes, count = _spread(counts, "nodes", size), _spread(counts, "count", size)
    in_forward = by_name.filter(pl.col("place").is_in([HEAD, BODY]))
    layers = _layers(in_forward)
    before, after = _around(forward, in_forward, layers, count)
    gpu, busy = _covered(spans, size), _covered(body, size)
    names = in_numbers(by_name)
    return Kernels(gpu, busy, nodes, count, before, after, names, layers, _starts(model, rank, own, visits, gpu))


def _starts(model: Model, rank: int, own: pl.DataFrame, visits: IntArray, gpu: IntArray) -> Starts:
    head = pl.col("place") == HEAD
    length = pl.col("end_ns") - pl.col("ts_ns")
    # The longest kernel ahead of the graph says when those kernels are launched.
    longest = pl.col("call_end_ns").filter(head).sort_by(length.filter(head)).last()
    rows = (
        own.group_by("row")
        .agg(
            pl.col("end_ns").filter("inside").max().alias("done"),
            pl.col("call_end_ns").filter(pl.col("graph") & pl.col("inside")).max().alias("launched"),
            pl.col("end_ns").filter(pl.col("place") == EARLY).max().alias("early"),
            pl.col("graph_ts").first(),
            pl.col("run_ts_ns").first(),
            length.filter(head).sum().alias("head"),
            longest.alias("head_ts"),
            pl.col("call_ts_ns").filter(head).min().alias("first_ts"),
            pl.col("call_ts_ns").filter(head).n_unique().alias("calls"),
        )
        .drop_nulls("launched")
        .with_columns(pl.col("row").replace_strict(dict(enumerate(visits.tolist()))).alias("visit"))
    )
    forwards = model.trace.forwards.filter(pl.col("rank") == rank).sort("ts_ns")
    received = model.trace.messages.filter((pl.col("dst") == rank) & (pl.col("kind") == "proxy"))
    rows = (
        rows.join(forwards.select("visit", pl.col("end_ns").shift(1).alias("previous")), on="visit", how="left")
        .join(received.group_by("visit").agg(pl.col("recv_end_ns").max().alias("received")), on="visit", how="left")
        .with_columns(pl.Series("gpu", gpu).gather(rows.get_column("row")))
        .with_columns((pl.max_horizontal("previous", "received", "early", "head_ts") + pl.col("head")).alias("free"))
        .with_columns((pl.col("launched") >= pl.col("free").fill_null(0)).alias("by_launch"))
        .with_columns((pl.col("done") - pl.max_horizontal("launched", "free") - pl.col("gpu")).alias("lag"))
    )
    lags = {
        side: rows.filter(pl.col("by_launch") == side).get_column("lag").quantile(0.5, "lower")
        for side in (True, False)
    }
    launch, stream = lags[True], lags[False]
    first = 0 if launch is None else int(launch)
    whole = pl.col("graph_ts") - pl.col("run_ts_ns")
    share = rows.select(((pl.col("head_ts") - pl.col("run_ts_ns")) * _PPM // whole).quantile(0.5, "lower")).item()
    each = (pl.col("graph_ts") - pl.col("first_ts")) // pl.col("calls")
    eager = rows.filter(pl.col("calls") > 1).select(each.quantile(0.5, "lower")).item()
    return Starts(
        (first, max(0, first) if stream is None else int(stream)), min(max(int(share or 0), 0), _PPM), int(eager or 0)
    )


def _spread(frame: pl.DataFrame, column: str, size: int) -> IntArray:
    """A column of `frame` by row; 0 in rows that it lacks."""
    out = np.zeros(size, dtype=np.int64)
    out[frame.get_column("row").to_numpy()] = frame.get_column(column).to_numpy()
    return out


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
    return _spread(total, "ns", size)


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
    """How often the forward repeats its layer: the commonest count, above two, of a kernel in a forward. None where
    fewer than three kernels share it, or where its multiples explain less than half of the time."""
    if table.height == 0:
        return None
    usual = table.group_by("name").agg(pl.col("count").mode().min(), pl.col("ns").sum())
    names = Counter(int(c) for c in usual.get_column("count") if c > 2)  # two may be one layer's
    if not names:
        return None
    base, shared = max(names.items(), key=lambda item: (item[1], item[0]))
    explained = usual.filter(pl.col("count") % base == 0).get_column("ns").sum()
    return base if shared >= 3 and 2 * explained > usual.get_column("ns").sum() else None

"""gloo messages between stages (requests, metadata, objects), paired by visit and order like the NCCL ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from traceana import schema
from traceana.intervals import Intervals, within
from traceana.matching.p2p import _receive_visit
from traceana.matching.spans import main_thread, span_set
from traceana.matching.topology import Topology
from traceana.matching.visits import visit_of
from traceana.tables import RankTables

__all__ = ["control_endpoints", "pair_controls"]

_SEND_SPANS = {
    "send_reqs_to_next_stage": "requests",
    "send_proxy_dict_to_next_stage": "proxy",
    "send_res_dict_to_next_stage": "output",
}
_RECV_SPANS = {"recv_requests": "requests", "recv_res_dict_from_prev_stage": "output"}


def _kind(times: np.ndarray, annotations: pl.DataFrame, spans: Mapping[str, str], default: str) -> list[str]:
    kind = np.full(times.size, default, dtype=object)
    for name, value in spans.items():
        kind[within(times, span_set(annotations, name)) >= 0] = value
    return [str(k) for k in kind]


def control_endpoints(rank: RankTables, visits: pl.DataFrame, topology: Topology) -> pl.DataFrame:
    """gloo sends and receives of the scheduler's thread of one rank, in call order: rank, side, src, dst, kind, visit,
    index (order within its visit and kind), ts_ns, end_ns. Empty without visits: then nothing tells them apart.

    The span's start is the call; the span of a send outlives the call and ends where the call that commits it returns.
    A receive that the profiler's stop cut has no known end and is left out.
    """
    empty = pl.DataFrame(
        schema={
            "rank": pl.Int32, "side": pl.String, "src": pl.Int32, "dst": pl.Int32, "kind": pl.String, "visit": pl.Int64,
            "index": pl.Int64, "ts_ns": pl.Int64, "end_ns": pl.Int64, "finished": pl.Boolean,
        }
    )  # fmt: skip
    me = rank.info.rank
    if visits.height == 0 or me not in topology.stage or not topology.is_pipeline:
        return empty
    own = rank.annotations.filter(pl.col("tid").eq_missing(main_thread(rank)))
    parts = [empty]
    sides = (("send", "gloo:send", _SEND_SPANS, "other", topology.next_rank.get(me)),
             ("recv", "gloo:recv", _RECV_SPANS, "proxy", topology.previous_rank.get(me)))  # fmt: skip
    for side, name, spans, default, peer in sides:
        if peer is None:
            continue
        rows = own.filter(pl.col("name") == name).sort("ts_ns", maintain_order=True)
        if rows.height == 0:
            continue
        times = rows.get_column("ts_ns").to_numpy()
        src, dst = (me, peer) if side == "send" else (peer, me)
        frame = rows.select(
            pl.lit(me).cast(pl.Int32).alias("rank"),
            pl.lit(side).alias("side"),
            pl.lit(src).cast(pl.Int32).alias("src"),
            pl.lit(dst).cast(pl.Int32).alias("dst"),
            pl.Series("kind", _kind(times, own, spans, default)),
            pl.Series("visit", visit_of(visits, times)).cast(pl.Int64),
            "ts_ns",
            "end_ns",
            "finished",
        ).filter(pl.col("visit") >= 0)
        index = (pl.col("ts_ns").cum_count().over("kind", "visit") - 1).cast(pl.Int64).alias("index")
        # A send that the stop cut was called all the same; a receive that it cut has no end to speak of.
        known = pl.col("finished") | (pl.col("side") == "send")
        parts.append(frame.with_columns(index).filter(known).select(empty.columns))
    return pl.concat(parts)


def pair_controls(endpoints: Mapping[int, pl.DataFrame], topology: Topology) -> tuple[pl.DataFrame, pl.DataFrame]:
    """CONTROLS over all ranks, and losses. Where a visit has another number of messages of a kind on the two sides,
    none of them is paired (and it is said): the order would be a guess."""
    every = pl.concat(list(endpoints.values())) if endpoints else pl.DataFrame()
    if every.height == 0:
        return schema.CONTROLS.empty(), schema.LOSSES.empty()
    sends = every.filter(pl.col("side") == "send").with_columns(_receive_visit(topology).alias("recv_visit"))
    receives = every.filter(pl.col("side") == "recv").with_columns(pl.col("visit").alias("recv_visit"))
    keys = ["src", "dst", "kind", "recv_visit"]
    counts = sends.group_by(keys).len("n_send").join(receives.group_by(keys).len("n_recv"), on=keys, how="inner")
    odd = counts.filter(pl.col("n_send") != pl.col("n_recv"))
    equal = counts.filter(pl.col("n_send") == pl.col("n_recv")).select(keys)
    pairs = (
        sends.join(equal, on=keys, how="semi", maintain_order="left")
        .rename({"ts_ns": "send_ts_ns", "end_ns": "send_end_ns", "finished": "committed"})
        .join(
            receives.select(*keys, "index", pl.col("ts_ns").alias("recv_ts_ns"), pl.col("end_ns").alias("recv_end_ns")),
            on=[*keys, "index"],
            how="inner",
            maintain_order="left",
        )
        .sort("src", "dst", "kind", "send_ts_ns")
        .with_columns((pl.col("send_ts_ns").cum_count().over("src", "dst", "kind") - 1).alias("ordinal"))
    )
    losses = schema.LOSSES.empty()
    if odd.height:
        where = ", ".join(f"{k} {s}->{d} visit {v}" for s, d, k, v in odd.select(keys).sort(keys).head(3).iter_rows())
        losses = schema.LOSSES.frame(
            [{
                "name": "control_mismatch", "severity": "info", "rank": None, "count": odd.height,
                "detail": f"gloo messages of a visit differ in number between sender and receiver: {where}",
            }]
        )  # fmt: skip
    return schema.CONTROLS.frame(pairs) if pairs.height else schema.CONTROLS.empty(), losses


def as_intervals(frame: pl.DataFrame) -> Intervals:
    """Start and end columns as arrays."""
    return Intervals(frame.get_column("ts_ns").to_numpy(), frame.get_column("end_ns").to_numpy())

"""NCCL send and receive kernels of the pipeline, paired. P2P carries no sequence number, so order is all there is.

With scheduler spans the visit that issued a kernel fixes the pairing (docs/concepts/matching.md): activations sent in
visit v are received in visit v; token ids sent by the last stage in visit v are received by the first in visit
v + pp_size - 1, and those passed on along the pipe in visit v - 1. Without spans the two streams of a (src, dst, kind)
are aligned by one integer shift, the largest that causality (receive end after send start) allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceana import schema
from traceana.intervals import within
from traceana.matching.spans import span_set
from traceana.matching.topology import Topology
from traceana.matching.visits import visit_of
from traceana.tables import RankTables

__all__ = ["Endpoints", "P2PMatch", "bytes_of", "p2p_endpoints", "pair_p2p"]

_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Short": 2, "Half": 2, "BFloat16": 2,
    "Int": 4, "Float": 4, "Long": 8, "Double": 8,
}  # fmt: skip
_INTEGERS = ("Byte", "Char", "Bool", "Short", "Int", "Long")
# A shift is searched this far to either side: the profilers of two ranks start within a few visits of each other.
_MAX_SHIFT = 256

Endpoints = pl.DataFrame
"""One row per send or receive kernel: rank, row, side, src, dst, kind, visit, index, ts_ns, end_ns, bytes, dtype."""


@dataclass(frozen=True, slots=True)
class P2PMatch:
    """`messages` (MESSAGES), the endpoints left without a partner, and losses."""

    messages: pl.DataFrame
    unmatched: pl.DataFrame
    losses: pl.DataFrame


def bytes_of(elements: pl.Expr, dtype: pl.Expr) -> pl.Expr:
    """Size in bytes of `elements` of a torch dtype name; null for an unknown one."""
    return elements * dtype.cast(pl.String).replace_strict(_BYTES, default=None, return_dtype=pl.Int64)


def p2p_endpoints(rank: RankTables, visits: pl.DataFrame, calls: pl.DataFrame) -> Endpoints:
    """The pipeline's send and receive kernels of one rank in launch order; `calls` are its `launches`. All-to-all `SendRecv` kernels, which carry
    neither a source nor a destination, are collectives and not among them."""
    me = rank.info.rank
    joined = pl.concat([rank.device.with_row_index("row"), calls], how="horizontal")
    rows = (
        joined.filter(pl.col("collective").is_in(["send", "recv"]))
        .filter(pl.col("src_rank").is_not_null() | pl.col("dst_rank").is_not_null())
        .with_columns(
            pl.lit(me).cast(pl.Int32).alias("rank"),
            pl.col("row").cast(pl.Int64),
            pl.col("collective").cast(pl.String).alias("side"),
            pl.col("dtype").cast(pl.String),
        )
        .with_columns(
            pl.when(pl.col("side") == "send")
            .then(pl.lit(me))
            .otherwise(pl.col("src_rank"))
            .cast(pl.Int32)
            .alias("src"),
            pl.when(pl.col("side") == "recv")
            .then(pl.lit(me))
            .otherwise(pl.col("dst_rank"))
            .cast(pl.Int32)
            .alias("dst"),
            bytes_of(
                pl.when(pl.col("side") == "send").then(pl.col("in_elements")).otherwise(pl.col("out_elements")),
                pl.col("dtype"),
            ).alias("bytes"),
            pl.coalesce("call_ts_ns", "ts_ns").alias("issued_ns"),
        )
        .filter(pl.col("src").is_not_null() & pl.col("dst").is_not_null() & (pl.col("src") != pl.col("dst")))
        .sort("issued_ns", "ts_ns", maintain_order=True)
    )
    issued = rows.get_column("issued_ns").to_numpy()
    by_dtype = (
        pl.when(pl.col("dtype").is_in(_INTEGERS)).then(pl.lit("output"))
        .when(pl.col("dtype").is_not_null()).then(pl.lit("proxy"))
        .otherwise(pl.lit("other"))
    )  # fmt: skip
    if visits.height == 0:
        rows = rows.with_columns(by_dtype.alias("kind"), pl.lit(None).cast(pl.Int64).alias("visit"))
    else:
        held = {
            name: within(issued, span_set(rank.annotations, name)) >= 0
            for name in (
                "send_proxy_dict_to_next_stage",
                "send_res_dict_to_next_stage",
                "recv_res_dict_from_prev_stage",
            )
        }
        output = held["send_res_dict_to_next_stage"] | held["recv_res_dict_from_prev_stage"]
        rows = rows.with_columns(
            pl.Series("in_output", output), pl.Series("in_proxy", held["send_proxy_dict_to_next_stage"])
        ).with_columns(
            pl.when(pl.col("in_output")).then(pl.lit("output"))
            .when(pl.col("in_proxy")).then(pl.lit("proxy"))
            # nsys knows no type; what a pipeline loop receives outside of a span are activations.
            .when(pl.col("dtype").is_null() & (pl.col("side") == "recv") & pl.lit(bool(output.any()))).then(pl.lit("proxy"))
            .otherwise(by_dtype).alias("kind"),
            pl.Series("visit", visit_of(visits, issued)).replace({-1: None}),
        )  # fmt: skip
    order = ["rank", "src", "dst", "side", "kind", "visit"]
    return rows.with_columns((pl.col("row").cum_count().over(order) - 1).cast(pl.Int64).alias("index")).select(
        "rank", "row", "side", "src", "dst", "kind", "visit", "index", "ts_ns", "end_ns", "bytes", "dtype"
    )


def _paired(sends: pl.DataFrame, receives: pl.DataFrame, on: Sequence[str]) -> pl.DataFrame:
    left = sends.rename({"ts_ns": "send_ts_ns", "end_ns": "send_end_ns", "row": "send_row"})
    right = receives.select(
        *on,
        pl.col("ts_ns").alias("recv_ts_ns"),
        pl.col("end_ns").alias("recv_end_ns"),
        pl.col("row").alias("recv_row"),
        pl.col("bytes").alias("recv_bytes"),
        pl.col("dtype").alias("recv_dtype"),
    )
    return left.join(right, on=list(on), how="inner", maintain_order="left")


def _receive_visit(topology: Topology) -> pl.Expr:
    """Visit in which the partner of a send is received, as an expression over src, dst, kind, visit."""
    stage = {r: s for r, s in topology.stage.items()}
    src = pl.col("src").replace_strict(stage, default=None, return_dtype=pl.Int64)
    dst = pl.col("dst").replace_strict(stage, default=None, return_dtype=pl.Int64)
    last_to_first = (dst == 0) & (src == topology.pp_size - 1)
    return (
        pl.when(pl.col("kind") != "output").then(pl.col("visit"))
        .when(last_to_first).then(pl.col("visit") + topology.pp_size - 1)
        .otherwise(pl.col("visit") - 1)
    )  # fmt: skip


def _by_shift(sends: pl.DataFrame, receives: pl.DataFrame, slack_ns: int | None) -> tuple[int | None, str]:
    """Shift s so that send i pairs with receive i + s, or None with the reason."""
    n, m = sends.height, receives.height
    # A size that is unknown on both sides (nsys without spans) agrees.
    size_s, size_r = (f.get_column("bytes").fill_null(-1).to_numpy() for f in (sends, receives))
    start, end = sends.get_column("ts_ns").to_numpy(), receives.get_column("end_ns").to_numpy()
    # From the largest lag of the receiver's ordinals backwards: the smallest s that is still causal pairs each receive
    # with the latest send that can have fed it.
    best: list[tuple[int, int]] = []
    for s in range(max(-n + 1, -_MAX_SHIFT), min(m, _MAX_SHIFT + 1)):
        lo, hi = max(0, -s), min(n, m - s)
        if hi <= lo or not np.array_equal(size_s[lo:hi], size_r[lo + s : hi + s]):
            continue
        # A shift that leaves most of the shorter stream without a partner explains nothing.
        if 2 * (hi - lo) < min(n, m):
            continue
        best.append((s, int((end[lo + s : hi + s] - start[lo:hi]).min())))
    if not best:
        return None, "no shift makes the sizes of the two sides agree"
    if slack_ns is None:
        if len(best) == 1 or n == m:
            return (0 if n == m and any(s == 0 for s, _ in best) else best[0][0]), ""
        return None, "several shifts fit and no clock relates the two ranks"
    causal = [(s, gap) for s, gap in best if gap >= -slack_ns]
    if not causal:
        return None, "every shift has a receive that ends before its send starts"
    causal.sort()
    if len(causal) > 1 and abs(causal[1][1] - causal[0][1]) < 2 * slack_ns:
        return None, "two shifts have minimum latencies closer than the clocks' uncertainty"
    if causal[0][1] < slack_ns and len(best) > len(causal):
        refused = max(gap for _, gap in best if gap < -slack_ns)
        if causal[0][1] - refused < slack_ns:
            return None, "two shifts cannot be told apart within the clocks' uncertainty"
    return causal[0][0], ""


def _loss(name: str, severity: str, rank: int | None, count: int, detail: str) -> dict[str, object]:
    return {"name": name, "severity": severity, "rank": rank, "count": count, "detail": detail}


def pair_p2p(
    endpoints: Mapping[int, Endpoints],
    topology: Topology,
    *,
    slack_ns: int | None,
    visit_range: tuple[int, int] | None = None,
) -> P2PMatch:
    """Pair sends with receives over all ranks.

    `slack_ns` is how far two ranks' raw clocks may differ (None: unknown); only streams without visits need it.
    `visit_range` is the first and last visit complete on every rank: what is unmatched outside it is lost at the edge
    of the traces (info), inside it something is wrong (warning). A pair whose sizes or types differ is not made.
    """
    every = pl.concat(list(endpoints.values())) if endpoints else pl.DataFrame()
    losses: list[dict[str, object]] = []
    if every.height == 0:
        return P2PMatch(schema.MESSAGES.empty(), every, schema.LOSSES.empty())
    captured = set(endpoints)
    sends, receives = every.filter(pl.col("side") == "send"), every.filter(pl.col("side") == "recv")
    parts: list[pl.DataFrame] = []
    spanned_s, spanned_r = sends.filter(pl.col("visit").is_not_null()), receives.filter(pl.col("visit").is_not_null())
    keys = ["src", "dst", "kind", "recv_visit", "index"]
    if spanned_s.height:
        left = spanned_s.with_columns(_receive_visit(topology).alias("recv_visit"))
        parts.append(_paired(left, spanned_r.with_columns(pl.col("visit").alias("recv_visit")), keys))
    loose_s, loose_r = sends.filter(pl.col("visit").is_null()), receives.filter(pl.col("visit").is_null())
    for src, dst, kind in loose_s.select("src", "dst", "kind").unique().sort("src", "dst", "kind").iter_rows():
        pick = (pl.col("src") == src) & (pl.col("dst") == dst) & (pl.col("kind") == kind)
        s, r = loose_s.filter(pick), loose_r.filter(pick)
        if not r.height:
            continue
        shift, why = _by_shift(s, r, slack_ns)
        if shift is None:
            losses.append(_loss("p2p_alignment_unknown", "warning", dst, s.height, f"{kind} {src}->{dst}: {why}"))
            continue
        r = r.with_columns((pl.int_range(pl.len()) - shift).alias("index"))
        parts.append(_paired(s.with_columns(pl.int_range(pl.len()).alias("index")), r, ["src", "dst", "kind", "index"]))
    pairs = pl.concat(parts, how="diagonal") if parts else pl.DataFrame()
    if pairs.height:
        agree = pl.col("bytes").eq_missing(pl.col("recv_bytes")) & pl.col("dtype").eq_missing(pl.col("recv_dtype"))
        wrong = pairs.filter(~agree)
        for (src, dst, kind), group in wrong.group_by("src", "dst", "kind", maintain_order=True):
            detail = f"{kind} {src}->{dst}: size or type differs between the two sides; not paired"
            losses.append(_loss("p2p_mismatch", "warning", int(str(dst)), group.height, detail))
        pairs = pairs.filter(agree)
    messages = schema.MESSAGES.empty()
    if pairs.height:
        pairs = pairs.sort("src", "dst", "kind", "send_ts_ns")
        ordinal = (pl.col("send_row").cum_count().over("src", "dst", "kind") - 1).alias("ordinal")
        messages = schema.MESSAGES.frame(pairs.with_columns(ordinal))
    used_s = messages.select(pl.col("src").alias("rank"), pl.col("send_row").alias("row"))
    used_r = messages.select(pl.col("dst").alias("rank"), pl.col("recv_row").alias("row"))
    unmatched = every.join(pl.concat([used_s, used_r]), on=["rank", "row"], how="anti", maintain_order="left")
    for (rank, src, dst, kind, side), group in unmatched.group_by(
        "rank", "src", "dst", "kind", "side", maintain_order=True
    ):
        peer = int(str(dst if side == "send" else src))
        if peer not in captured:
            losses.append(_loss("p2p_peer_not_captured", "info", int(str(rank)), group.height, f"{kind} {src}->{dst}"))
            continue
        inside = 0
        if visit_range is not None:
            # Tokens cross pp_size - 1 visits: where the partner's visit is in no trace, so is the partner.
            there = _receive_visit(topology)
            partner = pl.when(pl.col("side") == "send").then(there).otherwise(2 * pl.col("visit") - there)
            lo, hi = visit_range[0] + 1, visit_range[1] - 1
            inside = group.filter(pl.col("visit").is_between(lo, hi), partner.is_between(lo, hi)).height
        if inside:
            detail = f"{kind} {src}->{dst}: {side} without partner inside the common window"
            losses.append(_loss("p2p_unmatched", "warning", int(str(rank)), inside, detail))
        if group.height - inside:
            detail = f"{kind} {src}->{dst}: {side} without partner at the edge of the traces"
            losses.append(_loss("p2p_unmatched_edge", "info", int(str(rank)), group.height - inside, detail))
    return P2PMatch(messages, unmatched, schema.LOSSES.frame(losses) if losses else schema.LOSSES.empty())

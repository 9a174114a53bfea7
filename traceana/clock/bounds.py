"""Every fact of a capture that bounds the difference of two clocks, as rows: theta_b - theta_a <= upper_ns.

theta is what a clock shows minus true time. An effect cannot precede its cause, so cause at reading A on clock a and
effect at reading B on clock b give theta_b - theta_a <= B - A at the instant of the cause. docs/concepts/clock.md says
which pairs of events are used, why they hold, and what the real captures show about each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from traceana import schema
from traceana.categories import matching
from traceana.clock.prior import CPU_GPU_NS, SAME_HOST_NS, Prior, Probe
from traceana.intervals import IntArray
from traceana.matching.collectives import EVERYBODY_WAITS
from traceana.matching.launches import launches
from traceana.tables import RankTables

__all__ = ["SEND_TAIL_NS", "collect_bounds", "cpu", "describe", "gather", "gpu", "host", "prune"]

# A send kernel posts its last bytes and ends; the receiver cannot end before they are posted. On two H200 (4 KiB to
# 256 MiB, and every message of ten SGLang captures) receives end 0.25 to 14 us after their send, never before it.
SEND_TAIL_NS = 2_000
# NCCL buffers a sender may fill before its peer takes anything: 64 to 128 MiB were measured on 18 NVLinks; other
# links and hosts apart have less, so more bytes than this are proof everywhere known.
CREDIT_BYTES = 128 << 20
# ... and only a send that took visibly longer than its size needs is taken for a blocked one.
BLOCKED_FACTOR, BLOCKED_NS = 2, 20_000
# From the entry of the last rank of a collective until another one can leave, at the least: on H200 and V100 it was
# never below 3.9 us.
REACH_NS = 1_000
# Groups larger than this relate their ranks through their lowest one instead of pair by pair.
ALL_PAIRS_GROUP = 64
ONE_TRACE = ": one trace, one clock"
# Against broken GPU stamps only: even where CPU and GPU of a trace disagree, it is not by this much.
LOOSE, LOOSE_NS = ": CPU and GPU stamps within 1 ms", 1_000_000
# Clocks of different ranks run at rates that differ by at most 2 x 30 ppm; as a fraction for integer arithmetic.
RATE = (60, 1_000_000)

_SOURCES = ["p2p", "p2p_blocked", "collective", "gloo", "launch", "sync", "same_host", "probe", "prior"]
_FACT = {
    "a": pl.Int32(), "b": pl.Int32(), "upper_ns": pl.Int64(), "at_ns": pl.Int64(), "source": pl.Enum(_SOURCES),
    "kind": pl.String(), "ordinal": pl.Int64(),
}  # fmt: skip
"""A fact: `at_ns` is read on clock a; `kind` and `ordinal` name the message within its (source, a, b)."""

Facts = pl.DataFrame


def cpu(rank: int) -> int:
    """The clock of a rank's CPU stamps."""
    return 2 * rank


def gpu(rank: int) -> int:
    """The clock of a rank's GPU stamps."""
    return 2 * rank + 1


def host(index: int) -> int:
    """The wall clock of a host (`Prior.host_of`)."""
    return -1 - index


def _facts(frame: pl.DataFrame, source: str, **columns: pl.Expr) -> Facts:
    values = dict(columns, source=pl.lit(source))
    return frame.select(values[name].cast(dtype).alias(name) for name, dtype in _FACT.items())


def _p2p(messages: pl.DataFrame) -> list[Facts]:
    """A receive ends after its send has started, and (but for the send's tail) after its send has ended."""
    tail = pl.min_horizontal(pl.lit(0), SEND_TAIL_NS - (pl.col("send_end_ns") - pl.col("send_ts_ns")))
    name = {"kind": pl.col("kind"), "ordinal": pl.col("ordinal")}
    data = _facts(
        messages, "p2p", a=2 * pl.col("src") + 1, b=2 * pl.col("dst") + 1,
        upper_ns=pl.col("recv_end_ns") - pl.col("send_ts_ns") + tail, at_ns=pl.col("send_ts_ns"), **name,
    )  # fmt: skip
    return [data, *_blocked(messages)]


def _blocked(messages: pl.DataFrame) -> list[Facts]:
    """A send past the channel's credit cannot end before the receive of the oldest message in the way has started."""
    stream = ["src", "dst", "kind"]
    sized = messages.filter(pl.col("bytes") > 0)
    heavy = sized.group_by(stream).agg(pl.col("bytes").sum()).filter(pl.col("bytes") > CREDIT_BYTES).drop("bytes")
    if heavy.height == 0:
        return []
    took = pl.col("send_end_ns") - pl.col("send_ts_ns")
    floor = took.quantile(0.1, "lower").over([*stream, "bytes"]).cast(pl.Int64)
    rows = sized.join(heavy, on=stream, how="semi").sort([*stream, "ordinal"])
    rows = rows.with_columns((took > BLOCKED_FACTOR * floor + BLOCKED_NS).alias("slow"))
    out: list[Facts] = []
    for _, part in rows.group_by(stream, maintain_order=True):
        upto = np.cumsum(part.get_column("bytes").to_numpy())
        # Message j is the youngest whose bytes and all later ones up to k exceed the credit.
        j = np.searchsorted(upto, upto - CREDIT_BYTES, side="left")
        picked = part.with_columns(part.get_column("recv_ts_ns").gather(j).alias("taken_ns"))
        picked = picked.filter(pl.col("slow") & pl.Series(upto > CREDIT_BYTES))
        blocked = _facts(
            picked, "p2p_blocked", a=2 * pl.col("dst") + 1, b=2 * pl.col("src") + 1,
            upper_ns=pl.col("send_end_ns") - pl.col("taken_ns"), at_ns=pl.col("taken_ns"),
            kind=pl.col("kind"), ordinal=pl.col("ordinal"),
        )  # fmt: skip
        out.append(blocked)
    return out


def _gloo(controls: pl.DataFrame) -> list[Facts]:
    """A gloo receive returns after its send was called; a gloo send completes after its receive was called."""
    name = {"ordinal": pl.col("ordinal")}
    # The end of a send that the profiler's stop cut is not when it was committed.
    committed = controls.filter(pl.col("committed").fill_null(True)) if "committed" in controls.columns else controls
    return [
        _facts(
            controls, "gloo", a=2 * pl.col("src"), b=2 * pl.col("dst"),
            upper_ns=pl.col("recv_end_ns") - pl.col("send_ts_ns"), at_ns=pl.col("send_ts_ns"),
            kind=pl.col("kind"), **name,
        ),
        _facts(
            committed, "gloo", a=2 * pl.col("dst"), b=2 * pl.col("src"),
            upper_ns=pl.col("send_end_ns") - pl.col("recv_ts_ns"), at_ns=pl.col("recv_ts_ns"),
            kind=pl.col("kind") + " rendezvous", **name,
        ),
    ]  # fmt: skip


def _collective(collectives: pl.DataFrame) -> list[Facts]:
    """Nobody leaves before the last one's data has reached it, and whoever is in when the last one enters needs the
    transfer's time at most: that of the instance's shortest kernel, the last one's own, which waits for nobody."""
    reach = pl.min_horizontal(pl.lit(REACH_NS), pl.col("transfer") // 2)
    rows = collectives.filter(pl.col("collective").is_in(EVERYBODY_WAITS)).with_columns(
        (pl.col("end_ns") - pl.col("ts_ns")).min().over("group", "instance").alias("transfer"),
        pl.len().over("group", "instance").alias("size"),
        pl.col("rank").min().over("group", "instance").alias("hub"),
    )
    if rows.height == 0:
        return []
    left = rows.select("group", "instance", "rank", "end_ns", "ts_ns", "transfer", "size", "hub", "collective")
    right = rows.select("group", "instance", pl.col("rank").alias("other"), pl.col("end_ns").alias("other_end_ns"))
    pairs = left.join(right, on=["group", "instance"], how="inner").filter(
        (pl.col("rank") != pl.col("other"))
        & ((pl.col("size") <= ALL_PAIRS_GROUP) | (pl.col("rank") == pl.col("hub")) | (pl.col("other") == pl.col("hub")))
    )
    return [
        _facts(
            pairs, "collective", a=2 * pl.col("rank") + 1, b=2 * pl.col("other") + 1,
            upper_ns=pl.col("other_end_ns") - pl.col("end_ns") + pl.col("transfer") - reach, at_ns=pl.col("end_ns"),
            kind=pl.col("collective") + " of group " + pl.col("group"), ordinal=pl.col("instance"),
        )
    ]  # fmt: skip


def _within(rank: RankTables) -> list[Facts]:
    """CPU against GPU of one rank: work starts after its launch was called; a device-wide sync returns after all that
    was launched before it, and a copy to pageable memory returns after it is done (CUDA promises both)."""
    me = rank.info.rank
    if rank.device.height == 0 or rank.calls.height == 0:
        return []
    issued = launches(rank)
    work = pl.concat([rank.device.select("ts_ns", "end_ns", "name"), issued], how="horizontal")
    work = work.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("row"))
    work = work.filter(pl.col("call_ts_ns").is_not_null()).sort("call_ts_ns")
    here, there, no_kind = pl.lit(cpu(me)), pl.lit(gpu(me)), pl.lit("")
    out = [
        _facts(work, "launch", a=here, b=there, upper_ns=pl.col("ts_ns") - pl.col("call_ts_ns"),
               at_ns=pl.col("call_ts_ns"), kind=no_kind, ordinal=pl.col("row"))
    ]  # fmt: skip
    pageable = work.filter(matching(work.get_column("name"), "Device -> Pageable"))
    syncs = [pageable.select("row", "end_ns", pl.col("call_end_ns").alias("return_ns"))]
    devices = rank.device.get_column("device").n_unique()
    calls = rank.calls.filter(pl.col("name").is_in(["cudaDeviceSynchronize", "hipDeviceSynchronize"]))
    if calls.height and devices == 1 and work.height:
        last = np.maximum.accumulate(work.get_column("end_ns").to_numpy())
        before = np.searchsorted(work.get_column("call_ts_ns").to_numpy(), calls.get_column("ts_ns").to_numpy()) - 1
        waited = calls.select(
            pl.lit(-1, dtype=pl.Int64).alias("row"),
            pl.Series("end_ns", last[before]),
            pl.col("end_ns").alias("return_ns"),
        )
        syncs.append(waited.filter(pl.Series(before >= 0)))
    both = pl.concat(syncs)
    out.append(
        _facts(both, "sync", a=there, b=here, upper_ns=pl.col("return_ns") - pl.col("end_ns"), at_ns=pl.col("end_ns"),
               kind=no_kind, ordinal=pl.col("row"))
    )  # fmt: skip
    return out


def _probed(probes: Sequence[Probe]) -> Facts:
    rows = [(host(p.a), host(p.b), p.upper_ns, p.at_ns, "probe", "round trip", n) for n, p in enumerate(probes)]
    return pl.DataFrame(rows, schema=_FACT, orient="row")


def _beliefs(ranks: Sequence[int], tied: Sequence[int], prior: Prior, probes: Sequence[Probe]) -> Facts:
    """What holds at any time: the two clocks of a trace agree (closely only where launches and syncs bound them from
    both sides), ranks follow their host's clock, hosts agree."""
    rows: list[tuple[int, int, int, str, str]] = []

    def either(a: int, b: int, within_ns: int, source: str, kind: str) -> None:
        rows.extend(((a, b, within_ns, source, kind), (b, a, within_ns, source, kind)))

    probed = {end for p in probes for end in (p.a, p.b)}
    for rank in ranks:
        if rank in tied:
            either(cpu(rank), gpu(rank), CPU_GPU_NS, "prior", f"rank {rank}{ONE_TRACE}")
        either(cpu(rank), gpu(rank), LOOSE_NS, "prior", f"rank {rank}{LOOSE}")
        index = prior.host_of.get(rank)
        if index is not None and (prior.kind != "none" or index in probed):
            for clock in (cpu(rank), gpu(rank)):
                either(clock, host(index), SAME_HOST_NS // 2, "same_host", f"rank {rank}")
    if prior.between_ns is not None:
        indices = sorted(set(prior.host_of.values()))
        for n, index in enumerate(indices):
            for other in indices[n + 1 :]:
                either(host(index), host(other), prior.between_ns, "prior", f"clocks of hosts {index} and {other}")
    frame = pl.DataFrame(rows, schema=["a", "b", "upper_ns", "source", "kind"], orient="row")
    at, ordinal = pl.lit(None, dtype=pl.Int64).alias("at_ns"), pl.int_range(pl.len(), dtype=pl.Int64).alias("ordinal")
    return frame.with_columns(at, ordinal).select(pl.col(name).cast(dtype) for name, dtype in _FACT.items())


def gather(
    ranks: Sequence[RankTables],
    messages: pl.DataFrame,
    controls: pl.DataFrame,
    collectives: pl.DataFrame,
    *,
    prior: Prior,
    probes: Sequence[Probe] = (),
) -> tuple[Facts, Facts]:
    """All facts, and apart from them the beliefs, which hold at any time (`at_ns` is null). Messages of ranks not among
    `ranks` are left out."""
    here = [t.info.rank for t in ranks]
    parts: list[Facts] = []
    for frame, make in ((messages, _p2p), (controls, _gloo)):
        ends = {*frame.get_column("src").unique().to_list(), *frame.get_column("dst").unique().to_list()}
        mine = frame if ends <= set(here) else frame.filter(pl.col("src").is_in(here) & pl.col("dst").is_in(here))
        if mine.height:
            parts += make(mine)
    parts += _collective(collectives.filter(pl.col("rank").is_in(here)))
    tied: list[int] = []
    for table in ranks:
        own = [f for f in _within(table) if f.height]
        parts += own
        if len(own) == 2:
            tied.append(table.info.rank)
    parts.append(_probed(probes))
    told = pl.concat(parts, rechunk=False)
    coarse = [t.info.rank for t in ranks if _whole_microseconds(t)]
    if coarse:
        # ts and dur are each rounded down: an end is early by up to 2 us, the transfer time of a collective by 1 us.
        loose = pl.when(pl.col("source") == "collective").then(3_000).otherwise(2_000)
        upper = pl.col("upper_ns") + pl.when((pl.col("b") // 2).is_in(coarse)).then(loose).otherwise(0)
        told = told.with_columns(upper.cast(pl.Int64).alias("upper_ns"))
    return told, _beliefs(here, tied, prior, probes)


def _whole_microseconds(rank: RankTables) -> bool:
    """True where the trace holds whole microseconds only, as old Kineto wrote them."""
    start, took = pl.col("ts_ns") - pl.col("ts_ns").first(), pl.col("end_ns") - pl.col("ts_ns")
    whole = ((start % 1000 == 0) & (took % 1000 == 0)).all()
    return rank.device.height >= 8 and bool(rank.device.select(whole).item())


def prune(facts: Facts) -> Facts:
    """The facts that can be the tightest of their pair of clocks at some instant, whatever the clocks' drift.

    One fact makes another useless if it is tighter by more than the clocks can drift apart between the two.
    Exact: no shortest path changes.
    """
    # Messages come in streams ordered in time, so most goes in one pass over runs, without sorting or copying them.
    parts: list[Facts] = []
    offset = 0
    for length in facts.get_column("a").chunk_lengths():
        parts.append(_undominated(facts.slice(offset, length)))
        offset += length
    return _undominated(pl.concat(parts).sort("a", "b", "at_ns")) if parts else facts


def _undominated(facts: Facts) -> Facts:
    if facts.height < 2:
        return facts
    a, b, at, upper = (facts.get_column(c).to_numpy() for c in ("a", "b", "at_ns", "upper_ns"))
    cut = np.flatnonzero((a[1:] != a[:-1]) | (b[1:] != b[:-1]) | (at[1:] < at[:-1])) + 1
    keep = np.ones(at.size, dtype=bool)
    edges = np.concatenate(([0], cut, [at.size]))
    for lo, hi in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if hi - lo > 1:
            keep[lo:hi] = _undominated_run(upper[lo:hi], at[lo:hi] - at[lo])
    return facts.filter(pl.Series(keep))


def _undominated_run(upper: IntArray, since: IntArray) -> NDArray[np.bool_]:
    drift = since * RATE[0] // RATE[1]
    # Two nanoseconds for the rounding of the two drifts, so that a tie is never lost.
    early = np.minimum.accumulate(upper - drift)
    late = np.minimum.accumulate((upper + drift)[::-1])[::-1]
    keep = np.ones(upper.size, dtype=bool)
    keep[1:] &= early[:-1] > (upper - drift)[1:] - 2
    keep[:-1] &= late[1:] > (upper + drift)[:-1] - 2
    return keep


def _clock_name(node: pl.Expr) -> pl.Expr:
    side = pl.when(node % 2 == 0).then(pl.lit("CPU")).otherwise(pl.lit("GPU"))
    return pl.when(node < 0).then(pl.format("host {}", -1 - node)).otherwise(pl.format("rank {} {}", node // 2, side))


def describe(facts: Facts) -> pl.DataFrame:
    """Facts as CLOCK_BOUNDS, each with the words a person needs to find the message again."""
    a, b, kind, n, source = (pl.col(c) for c in ("a", "b", "kind", "ordinal", "source"))
    src, dst = a // 2, b // 2
    words = (
        pl.when(source == "p2p").then(pl.format("{} message {} from rank {} to rank {}", kind, n, src, dst))
        .when(source == "p2p_blocked")
        .then(pl.format("{} message {} from rank {} to rank {}, blocked", kind, n, dst, src))
        .when((source == "gloo") & kind.str.ends_with(" rendezvous"))
        .then(pl.format("gloo {} message {} from rank {} to rank {}, rendezvous", kind.str.head(-11), n, dst, src))
        .when(source == "gloo").then(pl.format("gloo {} message {} from rank {} to rank {}", kind, n, src, dst))
        .when(source == "collective").then(pl.format("{} {} between ranks {} and {}", kind, n, src, dst))
        .when(source == "launch").then(pl.format("launch of device row {} on rank {}", n, src))
        .when((source == "sync") & (n >= 0))
        .then(pl.format("copy to pageable memory, device row {} on rank {}", n, src))
        .when(source == "sync").then(pl.format("device synchronisation on rank {}", src))
        .when(source == "same_host").then(pl.format("same host: {}", kind))
        .when(source == "probe").then(pl.format("clock probe from {} to {}", _clock_name(a), _clock_name(b)))
        .otherwise(kind)
    )  # fmt: skip
    return schema.CLOCK_BOUNDS.frame(
        facts.with_columns(words.alias("message"), pl.col("at_ns").fill_null(0), source.cast(pl.String))
    )


def collect_bounds(
    ranks: Sequence[RankTables],
    messages: pl.DataFrame,
    controls: pl.DataFrame,
    collectives: pl.DataFrame,
    *,
    prior: Prior,
    probes: Sequence[Probe] = (),
) -> pl.DataFrame:
    """CLOCK_BOUNDS: the bounds that can matter (see `prune`), in words. `at_ns` is 0 for those that hold always."""
    told, beliefs = gather(ranks, messages, controls, collectives, prior=prior, probes=probes)
    return describe(pl.concat([prune(told), beliefs]))

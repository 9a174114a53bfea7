"""Collectives (all-reduce, all-gather, all-to-all, ...) matched over the ranks of their process group.

Kineto gives a kernel that PyTorch launched its group, collective and, in some versions, the group's counter (`seq`).
Kernels of a CUDA graph and those of old traces carry nothing but their names. So: by counter where there is one, else
by order, and the order is checked without any clock: a collective ends on all its ranks at about the same instant,
hence the gaps between successive ends are the same on every rank. Where that cannot tell two pairings apart, or where
kernels without arguments do not behave as collectives do, nothing is matched and a loss says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from traceana import schema
from traceana.categories import matching
from traceana.intervals import IntArray
from traceana.matching.p2p import bytes_of
from traceana.tables import RankTables

__all__ = ["EVERYBODY_WAITS", "match_collectives"]

# No rank can leave before the last one has entered. Not so for broadcast, reduce, gather and scatter, where only the
# root waits or is waited for, nor for all_to_allv, where a pair may exchange nothing.
EVERYBODY_WAITS = (
    "allreduce", "allreduce_coalesced", "_allgather_base", "allgather", "all_gather", "allgather_into_tensor_coalesced",
    "_reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor_coalesced", "all_to_all", "barrier",
)  # fmt: skip
_KERNEL = r"(?i)nccl|rccl|msccl|cross_device_reduce|(one|two)_?shot_all_?reduce"
_BY_NAME = (
    (r"(?i)all_?reduce|cross_device_reduce", "allreduce"),
    (r"(?i)all_?gather", "_allgather_base"),
    (r"(?i)reduce_?scatter", "_reduce_scatter_base"),
    (r"(?i)send_?recv|all_?to_?all", "all_to_all"),
    (r"(?i)broadcast", "broadcast"),
    (r"(?i)reduce", "reduce"),
)
# Two traces of a group begin and end within this many collectives of each other, or the order is not searched.
_MAX_SHIFT = 64
# A pairing must fit the gaps between ends this many times better than the next one (plus a microsecond of noise).
_DECISIVE = 4
_NOISE_NS = 1_000
# Two clocks part by at most 30 ppm each.
_DRIFT = (60, 1_000_000)


def _kernels(rank: RankTables) -> pl.DataFrame:
    """Collective kernels of one rank in order: rank, row, ts_ns, end_ns, collective, group (null: no arguments), kernel
    (its name), seq, bytes. Sends and receives of point-to-point messages are not among them."""
    name = pl.col("name").cast(pl.String)
    said = pl.col("collective").cast(pl.String)
    guess = pl.lit(None, dtype=pl.String)
    for pattern, collective in reversed(_BY_NAME):
        guess = pl.when(name.str.contains(pattern)).then(pl.lit(collective)).otherwise(guess)
    known = pl.col("collective").is_not_null() | matching(rank.device.get_column("name"), _KERNEL)
    return (
        rank.device.with_row_index("row")
        .filter((pl.col("kind") == "kernel") & known)
        .filter(said.is_null() | ~said.is_in(["send", "recv", "coalesced"]))
        .filter(pl.col("src_rank").is_null() & pl.col("dst_rank").is_null())
        .select(
            pl.lit(rank.info.rank).cast(pl.Int32).alias("rank"),
            pl.col("row").cast(pl.Int64),
            "ts_ns",
            "end_ns",
            pl.coalesce(said, guess, pl.lit("other")).alias("collective"),
            pl.col("group").cast(pl.String),
            name.alias("kernel"),
            "seq",
            bytes_of(pl.col("in_elements"), pl.col("dtype")).alias("bytes"),
        )
        .sort("ts_ns", "row")
    )


def _members(ranks: Sequence[RankTables]) -> dict[int, tuple[int, ...]]:
    """For each rank the group that kernels without arguments are taken for: the only NCCL group of more than one rank
    that lies inside the rank's stage, or everybody where the traces list no groups. Left out where there is no one
    such group."""
    stage = {t.info.rank: t.info.pp_rank for t in ranks}
    captured = tuple(sorted(stage))
    out: dict[int, tuple[int, ...]] = {}
    for table in ranks:
        me, groups = table.info.rank, table.info.groups
        if not groups:
            found = {tuple(r for r in captured if stage[r] == stage[me])}
        else:
            several = {tuple(sorted(g.ranks)) for g in groups if "nccl" in g.backend.lower() and len(g.ranks) > 1}
            found = {s for s in several if me in s and all(stage.get(r, stage[me]) == stage[me] for r in s)}
        if len(found) == 1 and len(next(iter(found))) > 1:
            out[me] = next(iter(found))
    return out


def _shift(anchor: pl.DataFrame, other: pl.DataFrame, slack_ns: int | None) -> tuple[int | None, str]:
    """s so that the anchor's kernel i belongs to kernel i + s of the other rank, or None with the reason. `slack_ns` is
    how far their clocks may differ (None: unknown)."""
    n, m = anchor.height, other.height
    what_a, what_b = anchor.get_column("code").to_numpy(), other.get_column("code").to_numpy()
    end_a, end_b = anchor.get_column("end_ns").to_numpy(), other.get_column("end_ns").to_numpy()
    tried = set(range(-_MAX_SHIFT, _MAX_SHIFT + 1))
    if slack_ns is not None:  # recording may have begun whole steps later on one rank
        near = int(np.searchsorted(end_b, end_a[n // 2])) - n // 2
        tried.update(range(near - 1, near + 2))
    fits: list[tuple[int, int, int]] = []
    for s in sorted(tried & set(range(1 - n, m))):
        lo, hi = max(0, -s), min(n, m - s)
        if 2 * (hi - lo) < min(n, m) or not np.array_equal(what_a[lo:hi], what_b[lo + s : hi + s]):
            continue
        apart = end_b[lo + s : hi + s] - end_a[lo:hi]
        gaps = np.abs(np.diff(apart))
        fits.append((int(np.median(gaps)) if gaps.size else 0, s, int(np.abs(np.median(apart)))))
    if not fits:
        return None, "the ranks ran different collectives"
    best, s, _ = min(fits, key=lambda f: (f[0], abs(f[1])))
    alike = [f for f in fits if f[0] <= _DECISIVE * best + _NOISE_NS]
    if len(alike) == 1:
        return s, ""
    if slack_ns is not None:
        timely = [s for _, s, apart in alike if apart <= slack_ns]
        if len(timely) == 1:
            return timely[0], ""
    if n == m and any(s == 0 for _, s, _ in fits):
        return 0, ""
    return None, "several alignments fit"


def _contradicts(start_a: IntArray, end_a: IntArray, start_b: IntArray, end_b: IntArray) -> bool:
    """True if the kernels of two ranks cannot be collectives: no offset of the clocks lets everybody wait for all."""
    low, high = start_b - end_a, end_b - start_a
    span = int(max(end_a.max() - start_a.min(), end_b.max() - start_b.min()))
    slack = span * _DRIFT[0] // _DRIFT[1]
    mid = low.size // 2
    odd = (low > np.sort(high)[mid] + slack) | (high < np.sort(low)[mid] - slack)
    return bool(10 * int(odd.sum()) > low.size)


def _by_order(
    lanes: dict[int, pl.DataFrame], slack: Mapping[int, int | None], where: str, losses: list[dict[str, object]]
) -> list[pl.DataFrame]:
    """Kernels of one kind per rank (in order) -> frames with a column `k`, the same on all ranks of an instance."""
    ranks = sorted(lanes)
    anchor = lanes[ranks[0]]
    shifts = {ranks[0]: 0}
    for rank in ranks[1:]:
        shift, why = _shift(anchor, lanes[rank], slack[rank])
        if shift is None:
            count = sum(lane.height for lane in lanes.values())
            losses.append(_loss("collective_alignment_unknown", "warning", rank, count, f"{where}: {why}"))
            return []
        shifts[rank] = shift
    lo = max(-min(shifts.values()), 0)
    hi = min(lanes[r].height - shifts[r] for r in ranks)
    if hi <= lo:
        return []
    kept = {r: lanes[r].slice(lo + shifts[r], hi - lo) for r in ranks}
    if anchor.get_column("collective")[0] in EVERYBODY_WAITS:
        first = kept[ranks[0]].get_column("ts_ns").to_numpy(), kept[ranks[0]].get_column("end_ns").to_numpy()
        for rank in ranks[1:]:
            here = kept[rank].get_column("ts_ns").to_numpy(), kept[rank].get_column("end_ns").to_numpy()
            if _contradicts(*first, *here):
                detail = f"{where}: the kernels of ranks {ranks[0]} and {rank} do not wait for each other"
                losses.append(_loss("collective_refused", "info", rank, sum(k.height for k in lanes.values()), detail))
                return []
    cut = sum(lane.height - (hi - lo) for lane in lanes.values())
    if cut:
        detail = f"{where}: collective without partners at the edge of the traces"
        losses.append(_loss("collective_unmatched_edge", "info", None, cut, detail))
    return [frame.with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("k")) for frame in kept.values()]


def _by_seq(lanes: dict[int, pl.DataFrame], where: str, losses: list[dict[str, object]]) -> list[pl.DataFrame]:
    """As `_by_order`, by the group's counter; kernels that share a counter are taken in order."""
    rows = pl.concat(list(lanes.values())).with_columns(
        (pl.col("row").cum_count().over("rank", "seq") - 1).alias("nth")
    )
    key = ["seq", "nth", "code"]
    whole = rows.group_by(key).agg(pl.col("rank").n_unique().alias("n")).filter(pl.col("n") == len(lanes))
    kept = rows.join(whole, on=key, how="semi", maintain_order="left")
    if kept.height < rows.height:
        detail = f"{where}: collective missing on some of the ranks {sorted(lanes)}"
        losses.append(_loss("collective_unmatched_edge", "info", None, rows.height - kept.height, detail))
    return [kept.with_columns((pl.struct("seq", "nth").rank("dense") - 1).cast(pl.Int64).alias("k")).drop("nth")]


def _loss(name: str, severity: str, rank: int | None, count: int, detail: str) -> dict[str, object]:
    return {"name": name, "severity": severity, "rank": rank, "count": count, "detail": detail}


def match_collectives(ranks: Sequence[RankTables], *, slack_ns: int | None = None) -> tuple[pl.DataFrame, pl.DataFrame]:
    """COLLECTIVES over all ranks, and losses. Times stay on each rank's own clock. `slack_ns` is how far the clocks of
    two ranks of one host may differ (None: nothing is known).

    A group of which only one rank is in the capture gives nothing. Instances missing on a captured rank are left out
    and counted.
    """
    losses: list[dict[str, object]] = []
    members = _members(ranks)
    hosts = {t.info.rank: t.info.host for t in ranks}
    frames: list[pl.DataFrame] = []
    for table in ranks:
        me, rows = table.info.rank, _kernels(table)
        mine = members.get(me)
        label = None if mine is None else "ranks " + ",".join(map(str, mine))
        stray = rows.filter(pl.col("group").is_null()).height
        if label is None and stray and len(ranks) > 1:
            detail = "communication kernels without arguments, and no single process group of its stage to put them in"
            losses.append(_loss("collective_group_unknown", "info", me, stray, detail))
        bare = pl.col("group").is_null()
        frames.append(
            rows.with_columns(
                pl.coalesce("group", pl.lit(label, dtype=pl.String)).alias("group"),
                # Kernels without arguments are matched name by name: streams may differ, their order too.
                pl.when(bare).then("kernel").otherwise(pl.lit("")).alias("lane"),
            ).filter(pl.col("group").is_not_null())
        )
    rows = pl.concat(frames) if frames else pl.DataFrame()
    if rows.height == 0:
        return schema.COLLECTIVES.empty(), schema.LOSSES.frame(losses) if losses else schema.LOSSES.empty()
    rows = rows.with_columns(pl.struct("collective", "bytes").rank("dense").alias("code"))
    parts: list[pl.DataFrame] = []
    for (group, lane), part in rows.group_by("group", "lane", maintain_order=True):
        lanes = {int(str(r)): f for (r,), f in part.group_by("rank", maintain_order=True)}
        if len(lanes) < 2:
            continue
        where = f"group {group}" + (f", kernel {str(lane).split('(')[0]}" if lane else "")
        counted = part.get_column("seq").null_count() == 0
        host = hosts[min(lanes)]
        slack = {r: slack_ns if host is not None and hosts[r] == host else None for r in lanes}
        parts += _by_seq(lanes, where, losses) if counted else _by_order(lanes, slack, where, losses)
    matched = schema.COLLECTIVES.empty()
    if parts:
        every = pl.concat(parts)
        # One ordinal per group: instances in the order in which the group's lowest rank ran them.
        first = every.sort("rank").group_by("group", "lane", "k", maintain_order=True).agg(pl.col("ts_ns").first())
        first = first.sort("group", "ts_ns", "lane", "k").with_columns(
            (pl.col("k").cum_count().over("group") - 1).cast(pl.Int64).alias("instance")
        )
        joined = every.join(first.drop("ts_ns"), on=["group", "lane", "k"], how="inner")
        matched = schema.COLLECTIVES.frame(joined.sort("group", "instance", "rank"))
    return matched, schema.LOSSES.frame(losses) if losses else schema.LOSSES.empty()

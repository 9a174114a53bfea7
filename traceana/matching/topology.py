"""Which rank is which stage, and who its neighbours on the pipeline's ring are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from traceana.tables import RankInfo

__all__ = ["Topology", "find_topology"]


@dataclass(frozen=True, slots=True)
class Topology:
    """`stage[rank]` is the pipeline stage, `next_rank`/`previous_rank` the neighbours on the ring that are in the
    capture, `source` says what told it. `pp_size` is 1 where there is no pipeline."""

    pp_size: int
    stage: dict[int, int]
    next_rank: dict[int, int]
    previous_rank: dict[int, int]
    source: str

    @property
    def is_pipeline(self) -> bool:
        """More than one stage."""
        return self.pp_size > 1

    def stage_ranks(self, rank: int) -> list[int]:
        """Ranks of the capture on the same stage (tensor or expert parallel peers), itself included."""
        return sorted(r for r, s in self.stage.items() if s == self.stage[rank])


def _ring(stage: dict[int, int], lane: Mapping[int, tuple[int, ...]], pp_size: int, source: str) -> Topology:
    at = {(lane[r], s): r for r, s in stage.items()}
    following: dict[int, int] = {}
    before: dict[int, int] = {}
    if pp_size > 1:
        for rank, s in stage.items():
            peer = at.get((lane[rank], (s + 1) % pp_size))
            if peer is not None:
                following[rank] = peer
                before[peer] = rank
    return Topology(pp_size, stage, following, before, source)


def find_topology(
    infos: Sequence[RankInfo], edges: pl.DataFrame, *, pp_size: int | None = None, tp_size: int | None = None
) -> Topology:
    """The topology of `infos`, from their pipeline ranks, else from `edges` (columns src, dst, kind, count), else from
    the server's sizes where all its ranks are there.

    Without pipeline ranks the proxy messages tell the order: they flow from a stage to the next one only.
    """
    ranks = [i.rank for i in infos]
    known = [i for i in infos if i.pp_rank is not None]
    if len(known) == len(infos) and infos:
        stage = {i.rank: i.pp_rank for i in infos if i.pp_rank is not None}
        known_lane = {i.rank: (i.tp_rank or 0, i.dp_rank or 0, i.ep_rank or 0) for i in infos}
        size = max(pp_size or 0, max(stage.values()) + 1)
        return _ring(stage, known_lane, size, "the rank's own name or server facts")
    proxies = edges.filter(pl.col("kind") == "proxy") if edges.height else edges
    forward = {int(s): int(d) for s, d in proxies.select("src", "dst").unique().sort("src", "dst").iter_rows()}
    heads = [r for r in ranks if r in forward and r not in forward.values()]
    stage = {}
    lane: dict[int, tuple[int]] = {}
    for lane_no, head in enumerate(sorted(heads)):
        at, s = head, 0
        while at in ranks and at not in stage:
            stage[at], lane[at] = s, (lane_no,)
            at, s = forward.get(at, -1), s + 1
    if stage and len(stage) == len(ranks):
        return _ring(stage, lane, max(stage.values()) + 1, "the direction of activation messages")
    tp = tp_size or 1
    if pp_size is not None and pp_size > 1 and sorted(ranks) == list(range(pp_size * tp)):
        # SGLang counts ranks through the stages: rank = pp_rank * tp_size + tp_rank.
        return _ring({r: r // tp for r in ranks}, {r: (r % tp,) for r in ranks}, pp_size, "the server's pp_size")
    return Topology(1, dict.fromkeys(ranks, 0), {}, {}, "no pipeline traffic and no pipeline ranks in the names")

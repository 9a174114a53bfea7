"""Attribution: the blame matrix, and the chains of the worst gaps."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceana.categories import spelled_out
from traceana.model.evidence import Words, describe_chain, describe_events, describe_links
from traceana.model.model import Model
from traceana.result import Result, Tables
from traceana.tables.by_rank import ByRank

__all__ = ["NAME", "run"]

NAME = "attribution"
_WORST = 10
_DESCRIBED = 200
_LENGTH = (pl.col("end_ns") - pl.col("ts_ns")).alias("ns")


def run(model: Model) -> Result:
    """Facts `blame` (rows of the matrix: who waits, root rank, cause, detail, whether the token return was crossed,
    nanoseconds) and `worst_gaps` (the longest idle stretches with the chain of each). Tables `attribution`, `blame`, and
    `links`: the events of the longest gaps in words."""
    every = ByRank(model.blame.compact)
    matrix = pl.concat(_matrix(every[rank]) for rank in model.trace.ranks)
    longest = pl.concat(_longest(every[rank]) for rank in model.trace.ranks)
    worst = longest.sort(["ns", "rank", "gap"], descending=[True, False, False]).head(_DESCRIBED)
    gaps = [
        row | {"chain": describe_chain(model, int(row["rank"]), int(row["gap"]))}
        for row in worst.head(_WORST).to_dicts()
    ]
    chains = worst.sort("rank", "gap").select("rank", "gap")
    later = {"attribution": lambda: _with_events(model), "links": lambda: _described(model, chains)}
    return Result(NAME, Tables({"blame": matrix}, later), {"blame": matrix.to_dicts(), "worst_gaps": gaps})


def _matrix(attribution: pl.DataFrame) -> pl.DataFrame:
    """The rows of the blame matrix in which one rank waits."""
    return (
        attribution.select("rank", "root_rank", "cause", "detail", "crossed_token_return", _LENGTH)
        .group_by("rank", "root_rank", "cause", "detail", "crossed_token_return")
        .agg(pl.col("ns").sum())
        .pipe(spelled_out)
        .sort(
            ["ns", "cause", "root_rank", "detail", "crossed_token_return"],
            descending=[True, False, False, False, False],
            nulls_last=True,
        )
    )


def _longest(attribution: pl.DataFrame) -> pl.DataFrame:
    """The longest gaps of one rank."""
    return (
        attribution.select("rank", "gap", "ts_ns", "end_ns", "visit", _LENGTH)
        .filter(pl.col("gap") >= 0)
        .group_by("rank", "gap")
        .agg(pl.col("ns").sum(), pl.col("ts_ns").min(), pl.col("end_ns").max(), pl.col("visit").first())
        .sort(["ns", "gap"], descending=[True, False])
        .head(_DESCRIBED)
    )


def _described(model: Model, gaps: pl.DataFrame) -> pl.DataFrame:
    """The links of `gaps` (rank, gap) in words."""
    first = dict(zip(model.trace.ranks, model.blame.first_gap, strict=True))
    numbers = [first[rank] + gap for rank, gap in gaps.iter_rows()]
    return describe_links(model, np.array(numbers, dtype=np.int64))


def _with_events(model: Model) -> pl.DataFrame:
    """ATTRIBUTION of all ranks with `describe_events`."""
    words, every = Words(model), ByRank(model.blame.compact)
    return pl.concat(spelled_out(describe_events(words, every[rank])) for rank in model.trace.ranks)

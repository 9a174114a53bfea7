"""Attribution: the blame matrix, and the chains of the worst gaps."""

from __future__ import annotations

from functools import cache

import polars as pl

from traceana.model.evidence import describe_chain, describe_edges, describe_links
from traceana.model.model import Model
from traceana.result import Result, Tables

__all__ = ["NAME", "run"]

NAME = "attribution"
_WORST = 10
_DESCRIBED = 200


def run(model: Model) -> Result:
    """Facts `blame` (rows of the matrix: who waits, root rank, cause, detail, whether the token return was crossed,
    nanoseconds) and `worst_gaps` (the longest idle stretches with the chain of each). Tables `attribution`, `blame`, and
    `links`: the events of the longest gaps in words."""
    attribution = model.blame.attribution
    length = (pl.col("end_ns") - pl.col("ts_ns")).alias("ns")
    words = pl.col("cause", "detail")  # few different ones: as numbers they are grouped faster
    matrix = (
        attribution.select("rank", "root_rank", words.cast(pl.Categorical), "crossed_token_return", length)
        .group_by("rank", "root_rank", "cause", "detail", "crossed_token_return")
        .agg(pl.col("ns").sum())
        .with_columns(words.cast(pl.String))
        .sort(
            ["rank", "ns", "cause", "root_rank", "detail"],
            descending=[False, True, False, False, False],
            nulls_last=True,
        )
    )
    worst = (
        attribution.filter(pl.col("gap") >= 0)
        .with_columns(length)
        .group_by("rank", "gap")
        .agg(pl.col("ns").sum(), pl.col("ts_ns").min(), pl.col("end_ns").max(), pl.col("visit").first())
        .sort(["ns", "rank", "gap"], descending=[True, False, False])
        .head(_DESCRIBED)
    )
    gaps = [
        row | {"chain": describe_chain(model, int(row["rank"]), int(row["gap"]))}
        for row in worst.head(_WORST).to_dicts()
    ]
    links = cache(lambda: describe_links(model))
    later = {"attribution": lambda: _with_events(model, links()), "links": lambda: _longest(links(), worst)}
    return Result(NAME, Tables({"blame": matrix}, later), {"blame": matrix.to_dicts(), "worst_gaps": gaps})


def _longest(links: pl.DataFrame, worst: pl.DataFrame) -> pl.DataFrame:
    return links.join(worst.select("rank", "gap"), on=["rank", "gap"], how="semi", maintain_order="left")


def _with_events(model: Model, links: pl.DataFrame) -> pl.DataFrame:
    """ATTRIBUTION with the events that bound each stretch: the link before it in the chain ends it, the link after it
    starts it; at the ends of a gap, the work on the stage that ended or starts there; where a link is cut (at a span of
    the host, at an edge of the window), that link itself."""
    attribution = model.blame.attribution
    keys = ["rank", "gap", "chain"]
    after = links.select("rank", "gap", pl.col("chain") - 1, pl.col("what").alias("first"))
    before = links.select("rank", "gap", pl.col("chain") + 1, pl.col("what").alias("last"))
    return (
        attribution.join(after, on=keys, how="left", maintain_order="left")
        .join(before, on=keys, how="left", maintain_order="left")
        .join(links, on=keys, how="left", maintain_order="left")
        .with_columns(describe_edges(model, attribution).get_columns())
        .with_columns(
            pl.coalesce("first", "ended", "what").alias("first_event"),
            pl.coalesce("last", "started", "what").alias("last_event"),
        )
        .drop("first", "last", "ended", "started", "what")
    )

"""The marks of the capture's hook: the server itself says which slot a visit served, and its how manyeth step it was.

Ordinals counted from a profiler's start are the same on every stage only where the start travelled down the pipeline in
slot order. Under nsys all ranks are recorded from the moment the first of them starts; then the steps' own numbers, the
same on every stage, say which visits belong together.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from traceana.categories import matching
from traceana.matching.spans import main_thread
from traceana.tables import RankTables

__all__ = ["slot_marks", "visit_offsets"]

_MARK = (
    r"^traceana\.slot\[mb=(?P<slot>[0-9]+) stage=[0-9]+ (?P<mode>[A-Z_]+) bs=(?P<batch_size>[0-9]+)"
    r"(?: toks=(?P<tokens>[0-9]+))? n=(?P<number>[0-9]+)\]$"
)


def slot_marks(rank: RankTables) -> pl.DataFrame:
    """The marks of a rank's scheduler in order: ts_ns, slot, mode (lower case), batch_size, tokens, and `number`, which
    counts the steps of the loop that ran a batch and is the same on every stage. A mark that is no mark is left out."""
    marks = rank.annotations.filter(matching(rank.annotations.get_column("name"), _MARK))
    own = marks.filter(pl.col("tid").eq_missing(main_thread(rank))) if marks.height else marks
    groups = pl.col("name").cast(pl.String).str.extract_groups(_MARK).struct
    return (
        own.select(
            "ts_ns",
            groups.field("slot").cast(pl.Int32, strict=False),
            groups.field("mode").str.to_lowercase(),
            groups.field("batch_size").cast(pl.Int32, strict=False),
            groups.field("tokens").cast(pl.Int64, strict=False),
            groups.field("number").cast(pl.Int64, strict=False),
        )
        .drop_nulls(["slot", "number"])
        .sort("ts_ns")
    )


def visit_offsets(marked: Mapping[int, pl.DataFrame]) -> tuple[dict[int, int], list[int]]:
    """What to add to every rank's ordinals so that equal steps have equal ones, from `marked` (visit and number of each
    rank's marks), and the ranks whose marks name no such number: they share no step with the first, or contradict
    themselves. The smallest is 0."""
    offsets: dict[int, int] = {}
    odd: list[int] = []
    first: pl.DataFrame | None = None
    for rank, marks in marked.items():
        if marks.height == 0:
            continue
        if first is None:
            first, offsets[rank] = marks, 0
            continue
        both = marks.join(first, on="number", suffix="_first")
        away = np.unique((both.get_column("visit_first") - both.get_column("visit")).to_numpy())
        if away.size == 1:
            offsets[rank] = int(away[0])
        else:
            odd.append(rank)
    least = min(offsets.values(), default=0)
    return {rank: by - least for rank, by in offsets.items()}, odd

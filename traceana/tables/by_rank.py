"""The rows of each rank of a frame, at hand without a search through all of them."""

from __future__ import annotations

import polars as pl

__all__ = ["ByRank"]


class ByRank(dict[int, pl.DataFrame]):
    """The rows of `frame` by the value of `key`, in the order they have there; none for other ranks. They are parts of
    `frame` itself where `key` is sorted."""

    def __init__(self, frame: pl.DataFrame, key: str = "rank") -> None:
        self._none = frame.clear()
        column = frame.get_column(key)
        if column.is_sorted():
            runs = column.rle().struct.unnest()
            first = runs.get_column("len").cum_sum() - runs.get_column("len")
            rows = zip(runs["value"].to_list(), first.to_list(), runs["len"].to_list(), strict=True)
            super().__init__({rank: frame.slice(at, count) for rank, at, count in rows})
        else:
            parts = frame.partition_by(key, as_dict=True, maintain_order=True)
            super().__init__({rank: part for (rank,), part in parts.items()})

    def __missing__(self, rank: int) -> pl.DataFrame:
        return self._none

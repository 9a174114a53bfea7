"""Columns of few different words. What concerns the word is asked once of each, not of every row."""

from __future__ import annotations

import polars as pl

__all__ = ["matching"]


def matching(words: pl.Series, pattern: str) -> pl.Series:
    """Which of the categorical `words` match the regular expression `pattern`; null where they are null."""
    different = words.unique().cast(pl.String)
    return words.is_in(different.filter(different.str.contains(pattern)).to_list())

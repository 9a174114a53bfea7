"""Columns of few different words. What concerns the word is asked once of each, not of every row."""

from __future__ import annotations

import polars as pl

__all__ = ["few_words", "in_numbers", "matching", "spelled_out"]


def in_numbers(frame: pl.DataFrame) -> pl.DataFrame:
    """`frame` with numbers for the few different words of its text columns, to be kept: a quarter of the memory."""
    return frame.cast({pl.String: pl.Categorical})


def spelled_out(frame: pl.DataFrame) -> pl.DataFrame:
    """`frame` with its words as text, as schemas and files have them."""
    return frame.cast({pl.Categorical: pl.String})


def matching(words: pl.Series, pattern: str) -> pl.Series:
    """Which of the categorical `words` match the regular expression `pattern`; null where they are null."""
    different = words.unique().cast(pl.String)
    return words.is_in(different.filter(different.str.contains(pattern)).to_list())


def few_words(texts: pl.Series) -> pl.Series:
    """`texts` as a Categorical whose words go with it: those that all such columns share stay as long as the process."""
    if hasattr(pl, "Categories"):  # polars before 1.32 shares none
        return texts.cast(pl.Categorical(pl.Categories.random()))
    return texts.cast(pl.Categorical())

"""`Result`: what an analysis returns and the only thing an output sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import polars as pl

from traceana import schema

__all__ = ["Result"]


@dataclass(frozen=True, slots=True)
class Result:
    """Named tables, plain facts (what JSON can hold; integers stay integers), and what was lost on the way.

    `skipped` says why an analysis could not run; its tables and facts are then empty.
    """

    name: str
    tables: Mapping[str, pl.DataFrame] = field(default_factory=dict[str, pl.DataFrame])
    facts: Mapping[str, object] = field(default_factory=dict[str, object])
    losses: pl.DataFrame = field(default_factory=schema.LOSSES.empty)
    skipped: str | None = None

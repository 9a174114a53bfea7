"""`Result`: what an analysis returns and the only thing an output sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import polars as pl

from traceana import schema

__all__ = ["Result", "Tables"]


class Tables(Mapping[str, pl.DataFrame]):
    """Named tables. Those in `later` are made when they are first asked for: some are large, and few outputs want them."""

    def __init__(self, made: Mapping[str, pl.DataFrame], later: Mapping[str, Callable[[], pl.DataFrame]]) -> None:
        self._made = dict(made)
        self._later = dict(later)
        self._names = tuple({**made, **later})

    def __getitem__(self, name: str) -> pl.DataFrame:
        if name in self._later:
            self._made[name] = self._later[name]()
            del self._later[name]
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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

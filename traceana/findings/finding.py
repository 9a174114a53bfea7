"""`Finding`: one thing to change, with its evidence, what it costs and what changing it would give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["FLOOR", "Draft", "Finding"]

# A finding below this share of the window is noise to the reader: identical runs differ by more.
FLOOR = 0.03


@dataclass(frozen=True, slots=True)
class Draft:
    """A finding before its prediction. `changes` are words of `traceana whatif` (`pp_max_micro_batch_size=4`,
    `host 0=-2.5ms`, ...) that stand for the action; empty where no prediction is possible. `ceiling` is the share of
    the window that fixing it can give at most when there is no prediction. Where no action is predicted to gain,
    `fallback` takes its place; without one the finding is dropped: advice that loses is none. `probes` are predicted for
    the evidence only: (what would be, words)."""

    id: str
    title: str
    rank: int | None
    lost_ns: int
    evidence: tuple[str, ...]
    action: str
    changes: tuple[str, ...] = ()
    ceiling: float = 0.0
    alternatives: tuple[tuple[str, tuple[str, ...]], ...] = field(default=())
    fallback: str | None = None
    probes: tuple[tuple[str, tuple[str, ...]], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding as the report shows it. `lost_ns` are blamed nanoseconds over all stages; `recoverable_fraction` is the
    share of the time of a token that the action is predicted to save (blamed is not recoverable)."""

    id: str
    title: str
    rank: int | None
    lost_ns: int
    recoverable_fraction: float
    evidence: tuple[str, ...]
    action: str
    predicted: Mapping[str, object] | None

    def as_json(self) -> dict[str, object]:
        """The object of `findings` in the JSON document."""
        return {
            "id": self.id,
            "title": self.title,
            "rank": self.rank,
            "lost_ns": self.lost_ns,
            "recoverable_fraction": self.recoverable_fraction,
            "evidence": list(self.evidence),
            "action": self.action,
            "predicted": None if self.predicted is None else dict(self.predicted),
        }

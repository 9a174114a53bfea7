"""What a capture is once read: tables per rank, and what the server, the GPUs and the clients say beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl

from traceana import schema

__all__ = ["FRAMES", "CaptureTables", "ProcessGroup", "RankInfo", "RankTables", "ServerFacts"]

FRAMES = ("device", "calls", "annotations", "gpu_annotations", "ops", "overheads")
"""The tables of events of a rank, by the names of their fields."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """A torch process group as `distributedInfo` lists it; `ranks` are global ranks."""

    name: str
    desc: str
    backend: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Who wrote a trace. `None` means the trace and its name do not say; `rank` is the global rank."""

    rank: int
    file: Path
    world_size: int | None = None
    pp_rank: int | None = None
    tp_rank: int | None = None
    dp_rank: int | None = None
    ep_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    device: int | None = None
    process_name: str | None = None
    base_time_ns: int = 0
    rank_source: str = "content"  # content, name or order
    groups: tuple[ProcessGroup, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class RankTables:
    """The tables of one rank, as `traceana.schema` defines them, sorted by ts_ns (longer first on ties)."""

    info: RankInfo
    device: pl.DataFrame = field(default_factory=schema.DEVICE.empty)
    calls: pl.DataFrame = field(default_factory=schema.CALLS.empty)
    annotations: pl.DataFrame = field(default_factory=schema.ANNOTATIONS.empty)
    gpu_annotations: pl.DataFrame = field(default_factory=schema.GPU_ANNOTATIONS.empty)
    ops: pl.DataFrame = field(default_factory=schema.OPS.empty)
    overheads: pl.DataFrame = field(default_factory=schema.OVERHEADS.empty)
    losses: pl.DataFrame = field(default_factory=schema.LOSSES.empty)

    @property
    def in_memory(self) -> bool:
        """Whether the frames are held here, and not read anew when they are asked for."""
        return True

    def of(self, info: RankInfo, losses: pl.DataFrame) -> RankTables:
        """The same tables as those of another rank."""
        return replace(self, info=info, losses=losses)

    def mapped(self, change: Callable[[str, pl.DataFrame], pl.DataFrame]) -> RankTables:
        """The same with every frame but `losses` passed, with its name, through `change`."""
        frames: dict[str, Any] = {name: change(name, getattr(self, name)) for name in FRAMES}
        return replace(self, **frames)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What server.log, server_info.json, /metrics dumps, loads and the client say. Missing facts are None.

    `facts` holds the keys of the report's `server` object (docs/reference/report.md); `decode_log` and `prefill_log`
    are the scheduler's own lines as frames, `requests` the client's, `metrics` one row per (when, name, labels).
    """

    facts: Mapping[str, object]
    decode_log: pl.DataFrame
    prefill_log: pl.DataFrame
    requests: pl.DataFrame
    metrics: pl.DataFrame


@dataclass(frozen=True, slots=True)
class CaptureTables:
    """A capture: its ranks in rank order, and what was found beside them. `losses` concern the capture as a whole."""

    folder: Path
    ranks: tuple[RankTables, ...]
    server: ServerFacts | None = None
    gpu_samples: pl.DataFrame = field(default_factory=schema.GPU_SAMPLES.empty)
    manifest: Mapping[str, object] | None = None
    losses: pl.DataFrame = field(default_factory=schema.LOSSES.empty)

    @property
    def in_memory(self) -> bool:
        """Whether the tables of all ranks are."""
        return all(rank.in_memory for rank in self.ranks)

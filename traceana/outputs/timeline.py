"""The merged timeline: every rank of a capture on one clock, as one Perfetto trace.

`write_timeline` writes Perfetto's native format (`.pftrace`, or gzip of it where the name ends in `.gz`) for
ui.perfetto.dev and `trace_processor`. First come views across ranks, then one group a rank. As many ranks are encoded at
a time as there are cores, and memory holds no more of them; the file is the same for any number.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl
from isal import igzip_threaded

from traceana import schema
from traceana.outputs.files import new_file
from traceana.outputs.perfetto_packets import PacketSequence
from traceana.outputs.timeline_cluster import ClusterFrames, write_cluster
from traceana.outputs.timeline_links import link_chains, link_forwards, link_messages
from traceana.outputs.timeline_rank import Args, RankFrames, RankLabels, write_rank
from traceana.outputs.timeline_slices import attribution_slices
from traceana.tables.capture import CaptureTables, RankInfo, RankTables

__all__ = ["Args", "TimelineStats", "write_timeline"]

Write = Callable[[bytes], object]
Made = tuple[PacketSequence, list[bytes]]
"""The packets of a rank, as blocks of bytes."""


@dataclass(frozen=True, slots=True)
class TimelineStats:
    """What was written. `slices_in_lanes` of the `slices` overlap others and stand on a track of their own; `losses`
    (LOSSES) counts rows that could not be drawn. `bytes_written` is before compression."""

    slices: int
    slices_in_lanes: int
    counter_samples: int
    bytes_written: int
    losses: pl.DataFrame


def write_timeline(
    out: Path | BinaryIO,
    capture: CaptureTables,
    *,
    clock: pl.DataFrame,
    visits: pl.DataFrame,
    forwards: pl.DataFrame,
    messages: pl.DataFrame,
    states: pl.DataFrame,
    attribution: pl.DataFrame,
    kernel_class: Mapping[str, str] | None = None,
    window: tuple[int, int] | None = None,
    chains: pl.DataFrame | None = None,
    in_flight: pl.DataFrame | None = None,
    stages_busy: pl.DataFrame | None = None,
    stages: Mapping[int, int] | None = None,
    args: Args = "key",
) -> TimelineStats:
    """Writes the merged timeline of `capture` to a file or an open binary stream.

    All frames follow `traceana.schema`, are on trace time, and may be empty. `kernel_class` gives the class of a kernel
    name. `window` (ns, trace time) is the stretch that the figures are about. `chains` are rows of ATTRIBUTION whose
    cause is to be shown by an arrow. `in_flight` and `stages_busy` are steps (ts_ns, count), drawn as counters.
    `stages` is the pipeline stage of each rank where its identity does not tell. `args` says what kernels, calls and
    ops carry: nothing, what is needed to follow them, or all that the tables hold.

    A file appears whole or not at all. Raises OutputError where it cannot be written.
    """
    infos = [r.info for r in capture.ranks]
    stage = {i.rank: s for i in infos if (s := (stages or {}).get(i.rank, i.pp_rank)) is not None}
    name = _names(infos, stage)
    span = _span(capture, window)
    slices = attribution_slices(states, attribution, name)
    if chains is not None:
        slices = link_chains(chains, slices)
    linked = link_forwards(forwards, visits, infos, stage)
    paired = link_messages(messages)
    classes = states.filter((pl.col("state") == "busy") & pl.col("kernel_class").is_not_null())
    visits_of, forwards_of, slices_of, classes_of = map(_by_rank, (visits, linked, slices, classes))
    sent_by, taken_by = _by_rank(paired, "src"), _by_rank(paired, "dst")
    highest = max((i.rank for i in infos), default=0)

    def sequences(write: Write) -> Iterator[PacketSequence]:
        top = PacketSequence(write, 1)
        cluster = ClusterFrames(forwards_of, slices_of, capture.gpu_samples, in_flight, stages_busy, span, window)
        write_cluster(top, cluster, infos, name)
        yield top

        def made(tables: RankTables) -> Made:
            rank = tables.info.rank
            frames = RankFrames(
                visits=visits_of.get(rank, visits.clear()),
                forwards=forwards_of.get(rank, linked.clear()),
                sent=sent_by.get(rank, paired.clear()),
                received=taken_by.get(rank, paired.clear()),
                attribution=slices_of.get(rank, slices.clear()),
                classes=classes_of.get(rank, classes.clear()),
            )
            blocks: list[bytes] = []
            packets = PacketSequence(blocks.append, rank + 2)
            labels = _labels(tables.info, name, stage, clock.filter(pl.col("rank") == rank), highest)
            write_rank(packets, tables, frames, labels, kernel_class or {}, args)
            return packets, blocks

        for packets, blocks in _side_by_side(made, capture.ranks):
            for block in blocks:
                write(block)
            yield packets

    if not isinstance(out, Path):
        return _collect(sequences, out.write)
    with new_file(out) as temporary, closing(_opened(temporary, compressed=out.suffix == ".gz")) as stream:
        return _collect(sequences, stream.write)


def _side_by_side(made: Callable[[RankTables], Made], ranks: Iterable[RankTables]) -> Iterator[Made]:
    """`made` of every rank, in order: as many at once as there are cores, and no more of them kept."""
    count = min(os.cpu_count() or 1, 16)
    with ThreadPoolExecutor(count, thread_name_prefix="rank") as pool:
        waiting: deque[Future[Made]] = deque()
        for tables in ranks:
            if len(waiting) >= count:
                yield waiting.popleft().result()
            waiting.append(pool.submit(made, tables))
        while waiting:
            yield waiting.popleft().result()


def _by_rank(frame: pl.DataFrame, key: str = "rank") -> dict[int, pl.DataFrame]:
    parts = frame.partition_by(key, as_dict=True, maintain_order=True)
    return {int(rank): part for (rank,), part in parts.items()}


def _opened(path: Path, *, compressed: bool) -> Any:
    # Level 1: a merged trace shrinks fourfold, and a better level saves little more.
    return igzip_threaded.open(str(path), "wb", compresslevel=1, threads=1) if compressed else path.open("wb")


def _collect(sequences: Callable[[Write], Iterable[PacketSequence]], write: Write) -> TimelineStats:
    total = 0

    def counted(data: bytes) -> None:
        nonlocal total
        total += len(data)
        write(data)

    done = [(s.slices_written, s.slices_in_lanes, s.samples_written, s.slices_refused) for s in sequences(counted)]
    slices, in_lanes, samples, refused = (sum(x) for x in zip(*done, strict=True))
    losses = schema.LOSSES.empty()
    if refused:
        detail = "rows that end before they start or start before 1970 are not in the merged timeline"
        row = {"name": "timeline_bad_interval", "severity": "warning", "rank": None, "count": refused, "detail": detail}
        losses = schema.LOSSES.frame([row])
    return TimelineStats(slices, in_lanes, samples, total, losses)


def _span(capture: CaptureTables, window: tuple[int, int] | None) -> tuple[int, int]:
    """First start and last end of everything (ns); the window, or nothing at all, where the ranks hold no events."""
    tables = [t for r in capture.ranks for t in (r.device, r.calls, r.annotations, r.ops) if t.height]
    if not tables:
        return window or (0, 0)
    ends = pl.concat([t.select(pl.col("ts_ns").min(), pl.col("end_ns").max()) for t in tables])
    low, high = ends.select(pl.col("ts_ns").min(), pl.col("end_ns").max()).row(0)
    return low, high


def _names(infos: list[RankInfo], stage: Mapping[int, int]) -> dict[int, str]:
    """How a rank is called where another one refers to it: its stage, unless several ranks share that."""
    alone = len(set(stage.values())) == len(infos) > 1
    digits = len(str(max((i.rank for i in infos), default=0)))
    wide = len(str(max(stage.values(), default=0)))
    return {i.rank: f"stage {stage[i.rank]:0{wide}}" if alone else f"rank {i.rank:0{digits}}" for i in infos}


def _labels(
    info: RankInfo, name: Mapping[int, str], stage: Mapping[int, int], clock: pl.DataFrame, highest: int
) -> RankLabels:
    title = f"rank {info.rank:0{len(str(highest))}}"
    if info.rank in stage:
        title += f" · stage {stage[info.rank]:0{len(str(max(stage.values())))}}"
    facts = {
        "host": info.host, "gpu": info.device, "pp": info.pp_rank, "tp": info.tp_rank, "dp": info.dp_rank,
        "ep": info.ep_rank, "pid": info.pid,
    }  # fmt: skip
    labels = tuple(f"{key} {value}" for key, value in facts.items() if value is not None)
    return RankLabels(title, name, labels, _clock_in_words(info.rank, clock))


def _clock_in_words(rank: int, clock: pl.DataFrame) -> str:
    if clock.height == 0:
        return f"rank {rank}: its clock was not related to the others'"
    row = clock.row(0, named=True)
    offset = "unknown" if row["offset_ns"] is None else f"{row['offset_ns']:+d} ns"
    width = "unbounded" if row["uncertainty_ns"] is None else f"±{row['uncertainty_ns']} ns"
    return f"rank {rank}: clock offset {offset} (uncertainty {width}; {row['method']})"

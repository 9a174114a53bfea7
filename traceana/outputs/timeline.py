"""The merged timeline: every rank of a capture on one clock, as one Perfetto trace.

`write_timeline` writes Perfetto's native format (`.pftrace`, or gzip of it where the name ends in `.gz`) for
ui.perfetto.dev and `trace_processor`. First come views across ranks, then one group a rank. As many ranks are made at a
time as there are cores, and memory holds little more than what those are made of; the file is the same for any number.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl
from isal import igzip_threaded

from traceana import schema
from traceana.outputs.files import new_file
from traceana.outputs.in_turn import InTurn
from traceana.outputs.perfetto_packets import PacketSequence
from traceana.outputs.timeline_cluster import ClusterFrames, write_cluster
from traceana.outputs.timeline_links import link_chains, link_forwards, link_messages, with_arrows
from traceana.outputs.timeline_rank import Args, RankFrames, RankLabels, write_rank
from traceana.outputs.timeline_slices import bubbles, device_runs, slice_spans
from traceana.tables.by_rank import ByRank
from traceana.tables.capture import CaptureTables, RankInfo, RankTables

__all__ = ["Args", "TimelineStats", "write_timeline"]

Write = Callable[[bytes | memoryview], object]
Make = Callable[[PacketSequence], None]


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
    events: Callable[[pl.DataFrame], pl.DataFrame] | None = None,
    args: Args = "key",
) -> TimelineStats:
    """Writes the merged timeline of `capture` to a file or an open binary stream.

    All frames follow `traceana.schema`, texts as String or Categorical, are on trace time, and may be empty.
    `kernel_class` gives the class of a kernel name. `window` (ns, trace time) is the stretch that the figures are
    about. `chains` are rows of ATTRIBUTION whose cause is to be shown by an arrow. `in_flight` and `stages_busy` are
    steps (ts_ns, count), drawn as counters. `stages` is the pipeline stage of each rank where its identity does not
    tell. `events` gives the `attribution` of a rank with its events in words, where it has none yet; it is called by
    several threads. `args` says what kernels, calls and ops carry: nothing, what is needed to follow them, or all that
    the tables hold.

    A file appears whole or not at all. Raises OutputError where it cannot be written.
    """
    infos = [r.info for r in capture.ranks]
    stage = {i.rank: s for i in infos if (s := (stages or {}).get(i.rank, i.pp_rank)) is not None}
    name = _names(infos, stage)
    linked = link_forwards(forwards, visits, infos, stage)
    paired = link_messages(messages)
    visits_of, forwards_of, states_of, stretches_of = map(ByRank, (visits, linked, states, attribution))
    sent_by, taken_by = ByRank(paired, "src"), ByRank(paired, "dst")
    highest = max((i.rank for i in infos), default=0)

    arrows = {} if chains is None else link_chains(chains, lambda r: slice_spans(states_of[r], stretches_of[r]))

    def cluster(packets: PacketSequence) -> None:
        span = window or _span(capture)
        shown = ClusterFrames(
            forwards_of, states_of, stretches_of, capture.gpu_samples, in_flight, stages_busy, span, window
        )
        write_cluster(packets, shown, infos, name)

    def of_rank(packets: PacketSequence, *, tables: RankTables) -> None:
        rank = tables.info.rank
        mine, why = states_of[rank], stretches_of[rank]
        runs = device_runs(mine).filter(pl.col("state") != "bubble")
        idle = bubbles(mine, why if events is None else events(why))
        if rank in arrows:
            runs, idle = with_arrows(arrows[rank], runs, idle)
        frames = RankFrames(
            visits=visits_of[rank],
            forwards=forwards_of[rank],
            sent=sent_by[rank],
            received=taken_by[rank],
            runs=runs,
            bubbles=idle,
            classes=mine.filter((pl.col("state") == "busy") & pl.col("kernel_class").is_not_null()),
        )
        labels = _labels(tables.info, name, stage, clock.filter(pl.col("rank") == rank), highest)
        write_rank(packets, tables, frames, labels, kernel_class or {}, args)

    made: list[tuple[int, Make]] = [(1, cluster)]
    made += [(tables.info.rank + 2, partial(of_rank, tables=tables)) for tables in capture.ranks]
    if not isinstance(out, Path):
        return _written(made, out.write)
    with new_file(out) as temporary, closing(_opened(temporary, compressed=out.suffix == ".gz")) as stream:
        return _written(made, stream.write)


def _written(made: Sequence[tuple[int, Make]], write: Write) -> TimelineStats:
    """Writes sequences, each given by its number and what makes it, in order; as many at once as there are cores."""
    total = 0

    def counted(data: bytes | memoryview) -> None:
        nonlocal total
        total += len(data)
        write(data)

    turns = InTurn(counted)

    def run(place: int, number: int, make: Make) -> PacketSequence:
        packets = PacketSequence(turns.writer(place), number)
        try:
            make(packets)
            turns.done(place)
        except BaseException as error:
            turns.stop(error)
            raise
        return packets

    count = min(os.cpu_count() or 1, 16)
    with ThreadPoolExecutor(count, thread_name_prefix="rank") as pool:
        running: deque[Future[PacketSequence]] = deque()
        done: list[PacketSequence] = []
        for place, (number, make) in enumerate(made):
            if len(running) >= count:
                done.append(running.popleft().result())
            running.append(pool.submit(run, place, number, make))
        done += [future.result() for future in running]
    losses = schema.LOSSES.empty()
    if refused := sum(s.slices_refused for s in done):
        detail = "rows that end before they start or start before 1970 are not in the merged timeline"
        row = {"name": "timeline_bad_interval", "severity": "warning", "rank": None, "count": refused, "detail": detail}
        losses = schema.LOSSES.frame([row])
    return TimelineStats(
        slices=sum(s.slices_written for s in done),
        slices_in_lanes=sum(s.slices_in_lanes for s in done),
        counter_samples=sum(s.samples_written for s in done),
        bytes_written=total,
        losses=losses,
    )


def _opened(path: Path, *, compressed: bool) -> Any:
    # Level 1: a merged trace shrinks fourfold, and a better level saves little more.
    return igzip_threaded.open(str(path), "wb", compresslevel=1, threads=1) if compressed else path.open("wb")


def _span(capture: CaptureTables) -> tuple[int, int]:
    """First start and last end of everything (ns); 0 where the ranks hold no events."""
    tables = [t for r in capture.ranks for t in (r.device, r.calls, r.annotations, r.ops) if t.height]
    if not tables:
        return 0, 0
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

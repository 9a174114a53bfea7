"""A folder of traces -> CaptureTables: the one way in for every command.

Ranks are read side by side, each by `read_rank` in an Executor; a broken one becomes a loss and never takes the others
down.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import polars as pl

from traceana import schema
from traceana.errors import SourceError, TraceanaError
from traceana.sources.folder import Listing, list_files, list_folder
from traceana.sources.kineto import MergedTrace, read_kineto
from traceana.sources.limits import Limits
from traceana.sources.losses import Loss, loss, losses_frame
from traceana.tables import store
from traceana.tables.build import build_rank
from traceana.tables.capture import CaptureTables, RankInfo, RankTables, ServerFacts
from traceana.tables.identity import Claim, claim, identify

__all__ = ["Progress", "RankRead", "read_capture", "read_rank"]

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is; from one thread at a time."""

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class RankRead:
    """One file after reading: its tables and what it says of itself, or why there are none. Can be pickled."""

    path: Path
    tables: RankTables | None = None
    said: Claim | None = None
    error: TraceanaError | None = None
    cached: bool = True  # whether the cache took it (or was not asked to)


def read_capture(
    folder: Path | Sequence[Path],
    *,
    ranks: Sequence[int] | None = None,
    cache: bool = True,
    limits: Limits | None = None,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> CaptureTables:
    """All ranks of a capture folder, of one trace, or of the traces given, in rank order, and what lies beside them.

    `ranks` keeps only those; `cache` uses and fills the user's cache of parsed traces; `executor` runs `read_rank` on
    each file (default: a thread a core). Raises SourceError where no rank can be read, two files claim one rank, or
    name and content contradict.
    """
    limits = limits or Limits()
    listing = list_folder(folder, limits) if isinstance(folder, Path) else list_files(list(folder), limits)
    losses = list(listing.losses)
    if not listing.traces:
        return _exports(listing, ranks, losses)
    if listing.exports:
        losses.append(loss("nsys_left_out", "info", len(listing.exports), "nsys exports beside traces are not read"))
    manifest = _manifest(listing, losses)
    reads = _read_all(listing.traces, cache, limits, progress, executor)
    sound = [read for read in reads if read.tables is not None and read.said is not None]
    losses += [_unread(read, alone=not sound) for read in reads if read.error is not None]
    if not sound:
        raise _nothing(listing, reads)
    uncached = [read for read in sound if not read.cached]
    if uncached:
        detail = f"parsed traces could not be stored in {store.cache_folder()}; the next run parses them again"
        losses.append(loss("cache_not_written", "info", len(uncached), detail))
    infos, doubts = identify([(read.path, cast(Claim, read.said)) for read in sound], manifest)
    tables = [_of_rank(cast(RankTables, read.tables), info) for read, info in zip(sound, infos, strict=True)]
    tables.sort(key=lambda t: t.info.rank)
    server, samples, more = _beside(listing)
    all_losses = pl.concat([losses_frame([*losses, *doubts]), more])
    return CaptureTables(listing.root, _asked(tables, ranks, listing), server, samples, manifest, all_losses)


def _read_all(
    paths: Sequence[Path], cache: bool, limits: Limits, progress: Progress | None, executor: Executor | None
) -> list[RankRead]:
    if executor is not None:
        return _collect([executor.submit(read_rank, path, cache=cache, limits=limits) for path in paths], progress)
    count = min(os.cpu_count() or 1, 16)
    with ThreadPoolExecutor(max_workers=count, thread_name_prefix="rank") as pool:
        if len(paths) < count:  # too few files for all cores: their chunks are spread instead
            with ThreadPoolExecutor(max_workers=count, thread_name_prefix="chunk") as chunks:
                return _collect([pool.submit(read_rank, path, cache, limits, chunks) for path in paths], progress)
        return _collect([pool.submit(read_rank, path, cache, limits) for path in paths], progress)


def _collect(futures: Sequence[Future[RankRead]], progress: Progress | None) -> list[RankRead]:
    reads: list[RankRead] = []
    for done, future in enumerate(futures):
        if progress is not None:
            progress("read", done, len(futures))
        reads.append(future.result())
    if progress is not None:
        progress("read", len(futures), len(futures))
    return reads


def read_rank(path: Path, cache: bool, limits: Limits, chunks: Executor | None = None) -> RankRead:
    """Reads the one file `path`: from the cache where it is there, else parsed (its chunks in `chunks`, where given)
    and put there. What is wrong with the file is in the result; nothing is raised for it."""
    try:
        key = store.trace_key(path) if cache else None
        if key is not None and (found := store.load(key)) is not None:
            return RankRead(path, *found)
        trace = read_kineto(path, limits=limits, pool=chunks)
        said = claim(trace)
        tables = build_rank(trace, said.info(path))
        return RankRead(path, tables, said, cached=key is None or store.save(key, tables, said))
    except TraceanaError as error:
        return RankRead(path, error=error)
    except OSError as error:
        what = f"cannot read the trace ({error.strerror or error})"
        return RankRead(path, error=SourceError(what, where=str(path), hint="check the path and its permissions"))


def _of_rank(tables: RankTables, info: RankInfo) -> RankTables:
    return replace(tables, info=info, losses=tables.losses.with_columns(rank=pl.lit(info.rank, dtype=pl.Int32())))


def _unread(read: RankRead, *, alone: bool) -> Loss:
    error = cast(TraceanaError, read.error)
    if isinstance(error, MergedTrace):
        detail = (
            f"{read.path.name} is a merge of {', '.join(error.labels)} and was left out; ranks have their own files"
        )
        return loss("merged_trace_left_out", "info", 1, detail)
    return loss("rank_not_read", "error", 1, f"{read.path.name}: {error.what}")


def _nothing(listing: Listing, reads: Sequence[RankRead]) -> SourceError:
    errors = [read.error for read in reads if read.error is not None]
    if len(errors) == 1 and isinstance(errors[0], SourceError):
        return errors[0]
    names = "; ".join(f"{read.path.name}: {read.error.what}" for read in reads[:4] if read.error is not None)
    return SourceError(
        f"none of {len(reads)} traces can be used ({names})", where=str(listing.root), hint="record again"
    )


def _asked(tables: Sequence[RankTables], ranks: Sequence[int] | None, listing: Listing) -> tuple[RankTables, ...]:
    if ranks is None:
        return tuple(tables)
    have = [t.info.rank for t in tables]
    absent = [rank for rank in ranks if rank not in have]
    if absent:
        raise SourceError(
            f"no trace of rank {', '.join(map(str, absent))}",
            where=str(listing.root),
            hint=f"there are ranks {', '.join(map(str, have))}",
        )
    return tuple(t for t in tables if t.info.rank in set(ranks))


def _manifest(listing: Listing, losses: list[Loss]) -> Mapping[str, object] | None:
    path = next((p for p in listing.beside if p.name == MANIFEST and p.parent == listing.root), None)
    if path is None:
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        losses.append(loss("manifest_broken", "warning", 1, f"{path.name} is not valid JSON ({error!s:.80})"))
        return None
    return cast("Mapping[str, object]", found) if isinstance(found, dict) else None


def _exports(listing: Listing, ranks: Sequence[int] | None, losses: list[Loss]) -> CaptureTables:
    from traceana.tables.nsys import read_nsys

    if not listing.exports:
        left = f"; {len(listing.losses)} links lead out of the folder" if listing.losses else ""
        raise SourceError(
            f"no trace found{left}",
            where=str(listing.root),
            hint="give a folder with torch.profiler traces (*.json, *.json.gz) or an nsys export (*.sqlite)",
        )
    export, *others = listing.exports
    if others:
        names = ", ".join(path.name for path in listing.exports[:8])
        raise SourceError(f"several nsys exports: {names}", where=str(listing.root), hint="give one of them")
    tables = sorted(read_nsys(export), key=lambda t: t.info.rank)
    server, samples, more = _beside(listing)
    all_losses = pl.concat([losses_frame(losses), more])
    return CaptureTables(listing.root, _asked(tables, ranks, listing), server, samples, None, all_losses)


def _beside(listing: Listing) -> tuple[ServerFacts | None, pl.DataFrame, pl.DataFrame]:
    from traceana.tables.server import read_server

    if not listing.beside:
        return None, schema.GPU_SAMPLES.empty(), schema.LOSSES.empty()
    return read_server(listing.beside)

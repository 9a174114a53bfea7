"""A folder of traces -> CaptureTables: the one way in for every command.

Ranks are read side by side, each by `read_rank` in an Executor; a broken one becomes a loss and never takes the others
down.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast
from uuid import uuid4

import polars as pl

from traceana import schema
from traceana.errors import EngineError, SourceError, TraceanaError
from traceana.sources.cache_room import make_room
from traceana.sources.folder import Listing, list_files, list_folder
from traceana.sources.kineto import MergedTrace, read_kineto
from traceana.sources.limits import Limits
from traceana.sources.losses import Loss, loss, losses_frame
from traceana.sources.remote import stage
from traceana.sources.storage import Remote
from traceana.tables.build import build_rank
from traceana.tables.capture import CaptureTables, RankInfo, RankTables, ServerFacts
from traceana.tables.identity import Claim, claim, identify
from traceana.tables.listed import read_listed
from traceana.tables.memory import Memory, text_bytes
from traceana.tables.store import Store, cache_folder, table_bytes, trace_key
from traceana.tables.stored import Kept

__all__ = ["Progress", "RankRead", "hand_back", "read_capture", "read_rank"]

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is; from one thread at a time."""

_M_MMAP_THRESHOLD = -3  # of mallopt
_COLUMN_BYTES = 1 << 20
_MOST_THREADS = 16
_UNPACKED = 10  # times as long as its gz is a trace, about


@dataclass(frozen=True, slots=True)
class RankRead:
    """One file after reading: its tables, or the key under which they lie in the store, and what it says of itself; or
    why there is nothing. Can be pickled."""

    path: Path
    tables: RankTables | None = None
    said: Claim | None = None
    error: TraceanaError | None = None
    key: str | None = None
    cached: bool = True  # whether the cache took it (or was not asked to)


def read_capture(
    folder: Path | str | Sequence[Path],
    *,
    ranks: Sequence[int] | None = None,
    cache: bool = True,
    limits: Limits | None = None,
    progress: Progress | None = None,
    executor: Executor | None = None,
    memory: Memory | None = None,
) -> CaptureTables:
    """All ranks of a capture folder, of one trace, or of the traces given, in rank order, and what lies beside them.

    A folder may be the URL of one on a storage. `ranks` keeps only those; `cache` uses and fills the user's cache of
    parsed traces; `executor` runs `read_rank` on each file (default: a thread a core), and where its workers are other
    processes they leave the tables in that cache. Raises SourceError where no rank can be read, two files claim one
    rank, or name and content contradict.
    """
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="traceana-") as staging:
        if isinstance(folder, str):
            listing, urls = stage(folder, Path(staging), limits)
        else:
            listing = list_folder(folder, limits) if isinstance(folder, Path) else list_files(list(folder), limits)
            urls = {}
        losses = list(listing.losses)
        if not listing.traces:
            return _exports(listing, ranks, losses)
        if listing.exports:
            what = f"nsys exports beside traces are not read; {listing.exports[0].name} can be reported by itself"
            losses.append(loss("nsys_left_out", "info", len(listing.exports), what))
        manifest, doubtful = read_listed(listing)
        losses += doubtful
        place = cache_folder()
        run = f"run-{uuid4().hex}"
        store = Store(place if cache else place / run if isinstance(place, Path) else f"{place.rstrip('/')}/{run}")
        kept = Kept()
        if not cache:
            weakref.finalize(kept, store.remove)  # when nobody holds a table that lies there
        memory = memory or Memory()
        here = executor is None or isinstance(executor, ThreadPoolExecutor)
        reading = partial(read_rank, store=store, limits=limits, cache=cache, memory=memory if here else None)
        reads = _read_all([(path, urls.get(path)) for path in listing.traces], reading, progress, executor, memory)
        hand_back()
        if any(read.tables is None and read.key is not None for read in reads):
            _return_at_once()
        sound = [_opened(read, store, kept) for read in reads if read.said is not None]
        losses += [_unread(read, alone=not sound) for read in reads if read.error is not None]
        if not sound:
            raise _nothing(listing, reads)
        if cache and isinstance(place, Path):
            make_room(place)
        uncached = [read for read in sound if not read.cached]
        if uncached:
            detail = f"parsed traces could not be stored in {place}; the next run parses them again"
            losses.append(loss("cache_not_written", "info", len(uncached), detail))
        infos, doubts = identify([(read.path, cast(Claim, read.said)) for read in sound], manifest)
        tables = [_of_rank(cast(RankTables, read.tables), info) for read, info in zip(sound, infos, strict=True)]
        tables.sort(key=lambda t: t.info.rank)
        server, samples, more = _beside(listing)
    all_losses = pl.concat([losses_frame([*losses, *doubts]), more])
    return CaptureTables(listing.root, _asked(tables, ranks, listing), server, samples, manifest, all_losses)


def _opened(read: RankRead, store: Store, kept: Kept) -> RankRead:
    if read.tables is not None or read.key is None:
        return read
    found = store.open(read.key, kept)
    if found is None:
        raise EngineError(
            f"the tables of {read.path.name} that a worker stored are not to be found here",
            where=str(store.root),
            hint="set TRACEANA_CACHE_DIR to storage that this machine and all workers share: a folder, or s3://...",
        )
    return replace(read, tables=found[0])


def hand_back() -> None:
    """Gives memory that was freed back to the system. glibc keeps it, for threads that are gone as well; other platforms
    have no such call, and need none."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _return_at_once() -> None:
    """From now on, gives freed columns of large captures back to the system at once: glibc would keep more and more of
    them, the larger they are, to save time."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _COLUMN_BYTES)


def _read_all(
    sources: Sequence[tuple[Path, str | None]],
    reading: Callable[..., RankRead],
    progress: Progress | None,
    executor: Executor | None,
    memory: Memory,
) -> list[RankRead]:
    count = min(os.cpu_count() or 1, _MOST_THREADS)
    if executor is not None:
        from concurrent.futures import ProcessPoolExecutor

        try:
            if not isinstance(executor, ProcessPoolExecutor):
                return _collect([executor.submit(reading, path, url) for path, url in sources], progress)
            # Its workers do not know of each other, and share the memory of this machine.
            with ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="rank") as pool:
                in_turn = partial(_in_turn, memory, executor, reading)
                return _collect([pool.submit(in_turn, path, url) for path, url in sources], progress)
        except TraceanaError:
            raise
        except Exception as error:  # the engine's own: read_rank raises nothing
            raise EngineError(
                f"the engine lost the work on a rank ({type(error).__name__}: {error!s:.120})",
                hint="see the logs of its workers; run again, or without --engine",
            ) from error
    few = len(sources) < count  # too few files for all cores: their chunks are spread instead
    with (
        ThreadPoolExecutor(max_workers=count, thread_name_prefix="chunk") as chunks,
        ThreadPoolExecutor(max_workers=count, thread_name_prefix="rank") as pool,
    ):
        return _collect([pool.submit(reading, path, url, chunks=chunks, spread=few) for path, url in sources], progress)


def _in_turn(
    memory: Memory, executor: Executor, reading: Callable[..., RankRead], path: Path, url: str | None
) -> RankRead:
    """Has `executor` read a trace once `memory` has room for its text."""
    try:
        if url is None:
            size = text_bytes(path)
        else:
            parent, _, name = url.rpartition("/")
            size = Remote.at(parent).size(name) * (_UNPACKED if name.endswith(".gz") else 1)
    except (OSError, TraceanaError):
        size = 0  # reading it says what is wrong
    with memory.reading(size):
        return executor.submit(reading, path, url).result()


def _collect(futures: Sequence[Future[RankRead]], progress: Progress | None) -> list[RankRead]:
    try:
        if progress is not None:
            progress("read", 0, len(futures))
        for done, _ in enumerate(as_completed(futures), 1):
            if progress is not None:
                progress("read", done, len(futures))
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def read_rank(
    path: Path,
    url: str | None,
    *,
    store: Store,
    limits: Limits,
    cache: bool,
    chunks: Executor | None = None,
    spread: bool = False,
    memory: Memory | None = None,
) -> RankRead:
    """Reads the one trace `path`, or `url` under that name: from `store` where `cache` holds and it is there, else
    parsed and with `cache` put there. Its chunks are parsed in `chunks` where that is asked for by `spread`, or where
    `memory` leaves no room for many such traces at once.

    The tables are in the result as far as `memory` goes; beyond, or without any, they are left in `store`. What is
    wrong with the file is in the result too; nothing is raised for it.
    """

    def read(here: Path) -> RankRead:
        if memory is None:
            return _read(here, path, store, limits, cache, chunks if spread else None, None)
        with memory.reading(text_bytes(here)) as alone:
            return _read(here, path, store, limits, cache, chunks if spread or alone else None, memory)

    try:
        if url is None:
            return read(path)
        with tempfile.TemporaryDirectory(prefix="traceana-") as folder:
            parent, _, name = url.rpartition("/")
            here = Remote.at(parent).fetch(name, Path(folder) / path.name)
            return read(here)
    except TraceanaError as error:
        traceback.clear_frames(error.__traceback__)  # it is kept, and its frames hold what was read
        if url is not None and error.where is not None and isinstance(error, SourceError):
            error = type(error)(error.what, where=url, hint=error.hint) if not isinstance(error, MergedTrace) else error
        return RankRead(path, error=error)
    except OSError as error:
        what = f"cannot read the trace ({error.strerror or error})"
        return RankRead(
            path, error=SourceError(what, where=url or str(path), hint="check the path and its permissions")
        )


def _read(
    here: Path, path: Path, store: Store, limits: Limits, cache: bool, chunks: Executor | None, memory: Memory | None
) -> RankRead:
    before = _signature(here)
    key = trace_key(here) if cache else uuid4().hex
    found = store.load(key) if cache else None
    if found is None:
        trace = read_kineto(here, limits=limits, pool=chunks)
        said = claim(trace)
        tables = build_rank(trace, said.info(path))
        if _signature(here) != before:
            # The key may be that of other bytes: what is stored under it would be wrong for ever.
            detail = f"{path.name} was written to while it was read; run again once the profiler is done"
            lost = losses_frame([loss("file_changed_while_read", "warning", 1, detail, tables.info.rank)])
            return RankRead(path, tables.of(tables.info, pl.concat([tables.losses, lost])), said)
        stored = cache and store.save(key, tables, said)
    else:
        (tables, said), stored = found, True
    if memory is not None and memory.take(table_bytes(tables)):
        return RankRead(path, tables, said, cached=stored or not cache)
    if stored or store.save(key, tables, said):
        return RankRead(path, None, said, key=key)
    return RankRead(path, tables, said, cached=not cache)


def _signature(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _of_rank(tables: RankTables, info: RankInfo) -> RankTables:
    return tables.of(info, tables.losses.with_columns(rank=pl.lit(info.rank, dtype=pl.Int32())))


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
    return read_server(listing.beside, listing.root)

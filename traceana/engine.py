"""Where the work on ranks runs: reading in any `concurrent.futures.Executor`, by default in threads of this process; what
follows always in those.

Dask rather than Ray: `distributed.Client.get_executor` is an Executor as it stands (Ray has none), its scheduler runs
the tasks of a lost worker again, it is pure Python, and it reaches object storage through fsspec as this package does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from traceana.errors import EngineError

if TYPE_CHECKING:  # slow to load, and most commands need no more than the names of the engines
    from concurrent.futures import Executor

__all__ = ["ENGINES", "beside", "open_engine", "side_by_side"]

T = TypeVar("T")
R = TypeVar("R")

ENGINES = "threads, processes or dask://HOST:PORT"
_MOST_WORKERS = 16
_MOST_THREADS = 4  # more only wait for the interpreter
_DASK = re.compile(r"^dask://(?P<address>\[?[\w.:%-]+\]?:\d+)$")
_CONNECT_S = 10


@contextmanager
def open_engine(name: str | None = None) -> Generator[Executor | None, None, None]:
    """The executor of the engine `name` (see `ENGINES`), closed at the end; None for the threads of this process, which
    whoever reads makes for itself. Raises EngineError where it cannot be had."""
    if name is None or name == "threads":
        yield None
    elif name == "processes":
        from concurrent.futures import ProcessPoolExecutor
        from multiprocessing import get_context

        count = min(os.cpu_count() or 1, _MOST_WORKERS)
        # Not forked: the threads of polars do not survive it.
        with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    elif found := _DASK.match(name):
        with _dask(found["address"]) as executor:
            yield executor
    else:
        raise EngineError("no such engine", where=name, hint=f"give {ENGINES}")


def side_by_side(work: Callable[[T], R], items: Sequence[T], *, alone: bool = False) -> Iterator[R]:
    """`work` of each of `items`, in order, in a few threads of this process: numpy and polars let go of the interpreter
    while they work. `alone`: one after the other, each when it is asked for, where they take much memory."""
    count = min(os.cpu_count() or 1, _MOST_THREADS, len(items))
    if alone or count < 2:
        yield from map(work, items)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(count, thread_name_prefix="side") as pool:
        try:
            yield from pool.map(work, items)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def beside(work: Callable[[], R], *, alone: bool = False) -> Generator[Callable[[], R], None, None]:
    """`work` in a thread of its own while the block runs; what is given returns its result, or raises what it raised.
    `alone`: only when the result is asked for."""
    if alone:
        yield work
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1, thread_name_prefix="beside") as pool:
        yield pool.submit(work).result


@contextmanager
def _dask(address: str) -> Generator[Executor, None, None]:
    try:
        distributed: Any = import_module("distributed")
    except ImportError as error:
        raise EngineError(
            "dask.distributed is not installed", where=str(error), hint="pip install 'traceana[dask]'"
        ) from error
    try:
        client = distributed.Client(f"tcp://{address}", timeout=_CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise EngineError(
            f"no Dask scheduler answers ({error!s:.120})",
            where=f"dask://{address}",
            hint="start one with: dask scheduler --port 8786, and on each machine: dask worker tcp://HOST:8786",
        ) from error
    try:
        if not client.nthreads():
            raise EngineError(
                "the Dask scheduler has no workers",
                where=f"dask://{address}",
                hint="start one on each machine: dask worker tcp://HOST:8786",
            )
        yield client.get_executor(pure=False)
    finally:
        client.close()

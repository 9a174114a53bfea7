"""A folder of traces -> CaptureTables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from traceana.errors import SourceError
from traceana.sources.kineto import read_kineto
from traceana.tables.build import build_rank
from traceana.tables.capture import CaptureTables, RankTables
from traceana.tables.identity import identify

__all__ = ["read_capture"]


def read_capture(
    folder: Path | Sequence[Path],
    *,
    ranks: Sequence[int] | None = None,
    cache: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> CaptureTables:
    """All traces of `folder` (or the files given) in rank order. Raises SourceError where there is none."""
    if isinstance(folder, Path):
        root = folder
        places = [folder, folder / "trace", folder / "ranks"]
        files = sorted(p for place in places if place.is_dir() for p in place.iterdir() if ".trace.json" in p.name)
        files = files or sorted(p for p in folder.iterdir() if "rank" in p.name)
    else:
        files = list(folder)
        root = files[0].parent
    files = [f for f in files if not f.name.startswith("merged-")]
    if not files:
        raise SourceError("no trace found", where=str(root), hint="give a folder with *.trace.json.gz files")

    def one(item: tuple[int, Path]) -> RankTables:
        trace = read_kineto(item[1])
        return build_rank(trace, identify(trace, item[0]))

    with ThreadPoolExecutor(2) as pool:
        tables = list(pool.map(one, enumerate(files)))
    wanted = [t for t in tables if ranks is None or t.info.rank in ranks]
    return CaptureTables(root, tuple(sorted(wanted, key=lambda t: t.info.rank)))

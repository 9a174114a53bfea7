"""The cache of parsed traces: one folder of Parquet files per trace, keyed by the bytes of the trace.

Nothing depends on it: it may be deleted at any time, and what cannot be read or written is done without. An entry is
written beside its place and renamed into it, so it is whole or absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl

from traceana import __version__, schema
from traceana.errors import SchemaError
from traceana.tables.capture import ProcessGroup, RankTables
from traceana.tables.identity import Claim

__all__ = ["cache_folder", "load", "save", "trace_key"]

_FORMAT = 1
_TABLES: Mapping[str, schema.Table] = {
    "device": schema.DEVICE,
    "calls": schema.CALLS,
    "annotations": schema.ANNOTATIONS,
    "gpu_annotations": schema.GPU_ANNOTATIONS,
    "ops": schema.OPS,
    "overheads": schema.OVERHEADS,
    "losses": schema.LOSSES,
}
_BLOCK = 1 << 20


def cache_folder() -> Path:
    """Where this user's cache lies: TRACEANA_CACHE_DIR, or the platform's place for caches."""
    if own := os.environ.get("TRACEANA_CACHE_DIR"):
        return Path(own)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "traceana" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "traceana"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "traceana"


def trace_key(path: Path) -> str:
    """The key of the trace at `path`: its bytes, the shape of the tables, and who made them. Raises OSError."""
    digest = hashlib.blake2b(digest_size=20)
    digest.update(f"{_FORMAT} {__version__} {_shape()}".encode())
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def load(key: str) -> tuple[RankTables, Claim] | None:
    """The tables stored under `key` and what their trace says of itself, or None where there is no sound entry."""
    place = _place(key)
    try:
        facts = json.loads((place / "claim.json").read_text("utf-8"))
        said = _claim(facts["claim"])
        tables: dict[str, pl.DataFrame] = {}
        for name, table in _TABLES.items():
            tables[name] = table.frame(pl.read_parquet(place / f"{name}.parquet", glob=False, hive_partitioning=False))
            if tables[name].height != facts["rows"][name]:
                return None
    except (OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError, SchemaError):
        return None
    with contextlib.suppress(OSError):
        os.utime(place)  # so that what is used can be told from what is not
    return RankTables(said.info(Path(str(facts["file"]))), **tables), said


def save(key: str, tables: RankTables, said: Claim) -> bool:
    """Stores `tables` under `key`; false where that cannot be done (a full disk, a folder that cannot be written)."""
    place = _place(key)
    made: str | None = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = tempfile.mkdtemp(prefix=".new-", dir=place.parent)
        frames = {name: getattr(tables, name) for name in _TABLES}
        for name, frame in frames.items():
            frame.write_parquet(Path(made) / f"{name}.parquet", compression="lz4", statistics=False)
        facts = {"file": str(tables.info.file), "claim": asdict(said), "rows": {n: f.height for n, f in frames.items()}}
        (Path(made) / "claim.json").write_text(json.dumps(facts), "utf-8")
        if place.exists():  # damaged, or written by another run in the meantime
            shutil.rmtree(place, ignore_errors=True)
        Path(made).rename(place)
    except (OSError, pl.exceptions.PolarsError):
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        return place.exists()
    return True


def _place(key: str) -> Path:
    return cache_folder() / key[:2] / key[2:]


def _shape() -> str:
    return " ".join(f"{t.name}:{c.name}:{c.dtype}:{c.nullable}" for t in _TABLES.values() for c in t.columns)


def _claim(facts: Mapping[str, Any]) -> Claim:
    groups = tuple(
        ProcessGroup(str(g["name"]), str(g["desc"]), str(g["backend"]), tuple(int(r) for r in g["ranks"]))
        for g in facts["groups"]
    )
    return Claim(
        rank=facts["rank"],
        world_size=facts["world_size"],
        pid=facts["pid"],
        device=facts["device"],
        process_name=facts["process_name"],
        base_time_ns=int(facts["base_time_ns"]),
        groups=groups,
        versions={str(k): str(v) for k, v in facts["versions"].items()},
    )

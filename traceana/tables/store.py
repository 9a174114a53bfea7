"""The cache of parsed traces: one folder of Parquet files per trace, keyed by the bytes of the trace.

Nothing depends on it between runs: it may be deleted, and what cannot be read or written is done without. An entry is
whole or absent. Where a capture is larger than memory, or its ranks are read elsewhere, a run reads its tables from
here too.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl

from traceana import __version__, schema
from traceana.errors import SchemaError, SourceError, TraceanaError
from traceana.sources.places import cache_folder, code_stamp
from traceana.sources.storage import Remote
from traceana.tables.capture import ProcessGroup, RankTables
from traceana.tables.identity import Claim
from traceana.tables.stored import Kept, StoredTables

__all__ = ["Store", "cache_folder", "table_bytes", "trace_key"]

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
_ABANDONED_S = 3600  # an entry that nobody has added a file to for this long has no writer any more
_UNSOUND = (OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError, SchemaError)


def trace_key(path: Path) -> str:
    """The key of the trace at `path`: its bytes, the shape of the tables, and who made them. Raises OSError."""
    digest = hashlib.blake2b(digest_size=20)
    digest.update(f"{_FORMAT} {__version__} {_code()} {_shape()}".encode())
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


class Store:
    """The entries under `root`: a folder, or the URL of one on a storage. Can be pickled."""

    def __init__(self, root: Path | str) -> None:
        self.root = root

    def load(self, key: str) -> tuple[RankTables, Claim] | None:
        """The tables stored under `key` and what their trace says of itself, or None where there is no sound entry."""
        found = self._facts(key)
        if found is None:
            return None
        facts, said = found
        try:
            tables = {name: self._read(key, name, facts["rows"][name]) for name in _TABLES}
        except _UNSOUND:
            return None
        return RankTables(said.info(Path(str(facts["file"]))), **tables), said

    def open(self, key: str, kept: Kept | None = None) -> tuple[StoredTables, Claim] | None:
        """The same, its frames read from here when they are asked for: reading one raises SourceError where the entry
        has gone or is damaged."""
        found = self._facts(key)
        if found is None:
            return None
        facts, said = found
        try:
            losses = self._read(key, "losses", facts["rows"]["losses"])
        except _UNSOUND:
            return None

        def read(name: str) -> pl.DataFrame:
            try:
                return self._read(key, name, facts["rows"][name])
            except _UNSOUND as error:
                raise SourceError(
                    f"a parsed trace cannot be read back ({error!s:.80})",
                    where=str(self.root),
                    hint="was the cache cleared meanwhile? run again, or with --no-cache",
                ) from error

        return StoredTables(said.info(Path(str(facts["file"]))), losses, read, kept), said

    def save(self, key: str, tables: RankTables, said: Claim) -> bool:
        """Stores `tables` under `key`; false where that cannot be done (a full disk, a folder that is read-only)."""
        frames = {name: getattr(tables, name) for name in _TABLES}
        facts = {
            "file": str(tables.info.file),
            "claim": asdict(said),
            "rows": {n: f.height for n, f in frames.items()},
        }
        try:
            if isinstance(self.root, str):
                remote = Remote.at(self.root)
                for name, frame in frames.items():
                    buffer = io.BytesIO()
                    _write(frame, buffer)
                    remote.write(f"{_entry(key)}/{name}.parquet", buffer.getvalue())
                remote.write(f"{_entry(key)}/claim.json", json.dumps(facts).encode())  # the last: now it is an entry
            else:
                self._write_entry(self.root / _entry(key), key, frames, facts)
        except (OSError, TraceanaError, pl.exceptions.PolarsError):
            return not isinstance(self.root, str) and (self.root / _entry(key)).exists()
        return True

    def _write_entry(
        self, place: Path, key: str, frames: Mapping[str, pl.DataFrame], facts: Mapping[str, object]
    ) -> None:
        """Beside its place and renamed into it. A sound entry stays as it is: another run may be reading it."""
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in place.parent.glob(".new-*"):  # by a run that was killed
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(left, ignore_errors=True)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=place.parent))
        try:
            for name, frame in frames.items():
                _write(frame, made / f"{name}.parquet")
            (made / "claim.json").write_text(json.dumps(facts), "utf-8")
            if place.exists():
                if self.load(key) is not None:
                    return
                shutil.rmtree(place, ignore_errors=True)
            made.rename(place)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def remove(self) -> None:
        """Removes every entry, and the folder."""
        with contextlib.suppress(OSError, TraceanaError):
            if isinstance(self.root, str):
                Remote.at(self.root).remove("")
            else:
                shutil.rmtree(self.root)

    def _facts(self, key: str) -> tuple[dict[str, Any], Claim] | None:
        name = f"{_entry(key)}/claim.json"
        try:
            if isinstance(self.root, str):
                text = Remote.at(self.root).read(name).decode()
            else:
                text = (self.root / name).read_text("utf-8")
                with contextlib.suppress(OSError):
                    os.utime(self.root / _entry(key))  # so that what is used can be told from what is not
            facts = json.loads(text)
            return facts, _claim(facts["claim"])
        except (*_UNSOUND, TraceanaError):
            return None

    def _read(self, key: str, name: str, rows: int) -> pl.DataFrame:
        file = f"{_entry(key)}/{name}.parquet"
        source = io.BytesIO(Remote.at(self.root).read(file)) if isinstance(self.root, str) else self.root / file
        frame = _TABLES[name].frame(pl.read_parquet(source, glob=False, hive_partitioning=False))
        if frame.height != rows:
            raise ValueError(f"{frame.height} rows of {name} instead of {rows}")
        return frame


def table_bytes(tables: RankTables) -> int:
    """Bytes that the frames of `tables` take in memory."""
    return sum(int(getattr(tables, name).estimated_size()) for name in _TABLES)


def _write(frame: pl.DataFrame, to: Path | io.BytesIO) -> None:
    frame.write_parquet(to, compression="uncompressed", statistics=False)


def _entry(key: str) -> str:
    return f"{key[:2]}/{key[2:]}"


def _code() -> str:
    """What makes the tables of a trace."""
    return code_stamp("sources", "tables", "schema.py", "arrays.py")


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

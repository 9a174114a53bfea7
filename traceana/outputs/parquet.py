"""Tables as Parquet files, one a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from traceana.outputs.files import new_file

__all__ = ["write_tables"]


def write_tables(out_dir: Path, tables: Mapping[str, pl.DataFrame]) -> list[Path]:
    """Writes `out_dir/NAME.parquet` for every table and returns the paths. Each file is complete or absent.

    Raises OutputError where a file cannot be written.
    """
    paths: list[Path] = []
    for name, table in tables.items():
        path = out_dir / f"{name}.parquet"
        with new_file(path) as temporary:
            table.write_parquet(temporary)
        paths.append(path)
    return paths

"""What a figure is compared with, each in a process of its own: `python references.py json|arrow|hta FILE...`

json: json.load of every file. arrow (extra `bench`): the needed columns through pyarrow, exact timestamps and gunzip
included, and no analysis; two threads. hta: HolisticTraceAnalysis' loading, temporal, idle, overlap and kernel breakdowns.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

_BETWEEN = re.compile(rb'\},\s*\{\s*"')
_CHUNK = 8 << 20


def with_json(files: list[Path]) -> int:
    """Events found by json.load, a file at a time."""
    count = 0
    for path in files:
        with gzip.open(path) as file:
            count += len(json.load(file)["traceEvents"])
    return count


def with_arrow(files: list[Path]) -> int:
    """Rows of the columns that an analysis needs, parsed by pyarrow in stretches of whole events."""
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(_arrow_rows, files))


def _arrow_rows(path: Path) -> int:
    import pyarrow as pa
    import pyarrow.json as pj

    exact = pa.decimal128(22, 3)
    arguments = pa.struct([(key, pa.int64()) for key in ("External id", "correlation", "stream", "device")])
    texts = [(key, pa.string()) for key in ("ph", "cat", "name")]
    schema = pa.schema([*texts, ("ts", exact), ("dur", exact), ("args", arguments)])
    parse = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    rows = 0
    for stretch in _stretches(path):
        lines = _BETWEEN.sub(b'}\n{"', stretch.replace(b"\n", b" ")).strip()
        read = pj.ReadOptions(use_threads=False, block_size=len(lines) + 16)
        rows += pj.read_json(io.BytesIO(lines), read_options=read, parse_options=parse).num_rows
    return rows


def _stretches(path: Path) -> Iterator[bytes]:
    from isal import igzip

    with igzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        carry = _after_head(cast("BinaryIO", file))
        while block := file.read(_CHUNK):
            carry += block
            cuts = [m.start() for m in _BETWEEN.finditer(carry, max(0, len(carry) - (1 << 16)))]
            if cuts:
                yield carry[: cuts[-1] + 1]
                carry = carry[cuts[-1] + 2 :]
    end = carry.rindex(b"}", 0, carry.rindex(b"]"))
    yield carry[: end + 1]


def _after_head(file: BinaryIO) -> bytes:
    text = b""
    while (at := text.find(b'"traceEvents"')) < 0 or text.find(b"[", at) < 0:
        text += file.read(1 << 16)
    return text[text.index(b"[", at) + 1 :]


def with_hta(files: list[Path]) -> int:
    """HolisticTraceAnalysis' own breakdowns; the ranks of the traces."""
    warnings.simplefilter("ignore")
    from hta.trace_analysis import TraceAnalysis

    logging.disable(logging.CRITICAL)
    ranks = {int(found[0]) if (found := re.findall(r"rank-(\d+)", f.name)) else n: str(f) for n, f in enumerate(files)}
    analysis: Any = TraceAnalysis(trace_files=ranks, trace_dir=str(files[0].parent))
    analysis.get_temporal_breakdown(visualize=False)
    analysis.get_idle_time_breakdown(ranks=list(ranks), show_idle_interval_stats=True, visualize=False)
    analysis.get_comm_comp_overlap(visualize=False)
    analysis.get_gpu_kernel_breakdown(visualize=False)
    return len(ranks)


if __name__ == "__main__":
    run = {"json": with_json, "arrow": with_arrow, "hta": with_hta}[sys.argv[1]]
    print(run([Path(name) for name in sys.argv[2:]]))

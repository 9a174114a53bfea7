"""Raw Kineto events -> the tables of one rank, in epoch nanoseconds on that rank's own clock."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from traceana import schema
from traceana.sources.kineto import RawTrace
from traceana.tables.capture import RankInfo, RankTables

__all__ = ["build_rank"]

_EPOCH_MICROSECONDS = 10**15  # 2001-09-09: no offset from a base time is that large, every epoch time is larger
_KIND = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}


def build_rank(trace: RawTrace, info: RankInfo) -> RankTables:
    """The tables of `trace`: every frame as its schema says, sorted by start, longer first on ties."""
    events = _columns(trace.events, info.base_time_ns)
    cat = pl.col("cat")
    device = events.filter(cat.is_in(list(_KIND))).with_columns(kind=cat.replace_strict(_KIND, default=None))
    return RankTables(
        info=info,
        device=schema.DEVICE.frame(device),
        calls=schema.CALLS.frame(events.filter(cat.is_in(["cuda_runtime", "cuda_driver"]))),
        annotations=schema.ANNOTATIONS.frame(events.filter(cat == "user_annotation")),
        gpu_annotations=schema.GPU_ANNOTATIONS.frame(events.filter(cat == "gpu_user_annotation")),
        ops=schema.OPS.frame(events.filter(cat == "cpu_op")),
        overheads=schema.OVERHEADS.frame(events.filter(cat == "overhead")),
    )


def _columns(events: pa.Table, base_ns: int) -> pl.DataFrame:
    """One flat frame of all events with the schema's names and integer nanoseconds, sorted."""
    thousand = pa.scalar(1000, pa.decimal128(4, 0))

    def ns(name: str) -> pa.ChunkedArray:
        return pc.cast(pc.round(pc.multiply(events[name], thousand)), pa.int64())

    args = pl.from_arrow(pa.table({"args": events["args"]}))
    assert isinstance(args, pl.DataFrame)
    flat = pl.from_arrow(
        pa.table(
            {name: events[name] for name in ("ph", "cat", "name", "pid", "tid")} | {"ts": ns("ts"), "dur": ns("dur")}
        )
    )
    assert isinstance(flat, pl.DataFrame)
    frame = flat.hstack(args.unnest("args"))
    first = frame.get_column("ts").max()
    base = 0 if isinstance(first, int) and first >= _EPOCH_MICROSECONDS * 1000 else base_ns
    return (
        frame.filter(pl.col("ph") == "X", pl.col("ts").is_not_null(), pl.col("dur") >= 0)
        .with_columns(ts_ns=pl.col("ts") + base)
        .with_columns(
            end_ns=pl.col("ts_ns") + pl.col("dur"),
            # GPU annotations have no args but their id: the stream is the thread, the device the process.
            stream=pl.coalesce("stream", "tid"),
            device=pl.coalesce("device", "pid"),
            finished=pl.col("finished").fill_null(True),
        )
        .rename(
            {
                "External id": "external_id",
                "Collective name": "collective",
                "Src Rank": "src_rank",
                "Dst Rank": "dst_rank",
                "In msg nelems": "in_elements",
                "Out msg nelems": "out_elements",
                "Process Group Name": "group",
                "Process Group Description": "group_desc",
                "Group size": "group_size",
                "Seq": "seq",
            }
        )
        .sort(["ts_ns", "end_ns"], descending=[False, True], maintain_order=True)
    )

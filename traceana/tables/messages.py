"""What an NCCL kernel sends, receives or reduces: from its own args, else from the profiler's span around it on the
stream (`nccl:send 0->1`), else from the op that launched it (`record_param_comms`), else unknown."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from traceana.categories import matching
from traceana.sources.kineto_events import COMMUNICATION, Events, possible_talks
from traceana.tables.capture import RankInfo

__all__ = ["message_columns"]

Ints = npt.NDArray[np.int64]

_NCCL = "(?i)^nccl(?:Dev)?Kernel"
_SPAN = r"^nccl:(\w+)(?: ([0-9]+)(->|<-)([0-9]+))?"
_COLUMNS = [name for name, _ in COMMUNICATION.values()]


def message_columns(
    events: Events, rows: Ints, device: pl.DataFrame, spans: pl.DataFrame, info: RankInfo
) -> pl.DataFrame:
    """The message columns of the device activities `rows` of `events`, one row each; `device` are those activities,
    `spans` the annotations on the streams, both with the schema's names and times."""
    said = possible_talks(events.talks)
    by_row = np.full(events.size, -1, dtype=np.int64)
    by_row[said.get_column("row").to_numpy()] = np.arange(said.height)
    found = _gather(said.drop("row"), by_row[rows])
    if not device.height:
        return found
    nccl = matching(device.get_column("name"), _NCCL)
    silent = np.flatnonzero((nccl & found.get_column("collective").is_null()).to_numpy())
    if not silent.size or not (said.height or spans.height):
        return found
    kernels = device[silent].select("ts_ns", "device", "stream", "external_id").with_columns(at=pl.Series(silent))
    from_ops = _from_ops(events, said, kernels)
    from_spans = _from_spans(kernels, spans, info)
    filler = (
        pl.DataFrame({"at": silent})
        .join(from_ops, on="at", how="left")
        .join(from_spans, on="at", how="left", suffix="_span")
    )
    place = np.full(device.height, -1, dtype=np.int64)
    place[silent] = np.arange(silent.size)
    aligned = _gather(filler.drop("at"), place)
    extra = {name: pl.coalesce(name, f"{name}_span") for name in ("collective", "src_rank", "dst_rank")}
    best = aligned.with_columns(**extra).select(_COLUMNS)
    return found.with_columns(
        pl.when(found.get_column(name).is_null())
        .then(best.get_column(name))
        .otherwise(found.get_column(name))
        .alias(name)
        for name in _COLUMNS
    )


def _gather(frame: pl.DataFrame, at: Ints) -> pl.DataFrame:
    """Row `at[i]` of `frame` for every i, nulls where that is -1."""
    index = pl.Series(at)
    if (at < 0).any():
        index = index.set(pl.Series(at < 0), None)
    if not frame.height:
        return frame.clear(at.size)
    return frame.select(pl.all().gather(index))


def _from_ops(events: Events, said: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Per kernel (`at`) the message of the op that shares its external id, where exactly one says so."""
    ids = events.columns["external_id"][said.get_column("row").to_numpy()]
    ops = said.drop("row").with_columns(external_id=pl.Series(ids, dtype=pl.Int64()))
    ops = ops.unique("external_id", keep="none")
    return kernels.select("at", "external_id").join(ops, on="external_id").drop("external_id")


def _from_spans(kernels: pl.DataFrame, spans: pl.DataFrame, info: RankInfo) -> pl.DataFrame:
    """Per kernel (`at`) what the `nccl:` span that holds its start on its stream says."""
    named = spans.with_columns(pl.col("name").cast(pl.String()).str.extract_groups(_SPAN).alias("parts"))
    named = named.filter(pl.col("parts").struct.field("1").is_not_null())
    parts = named.select(
        "device",
        "stream",
        "ts_ns",
        pl.col("end_ns").alias("span_end"),
        pl.col("parts").struct.rename_fields(["what", "me", "arrow", "peer"]),
    ).unnest("parts")
    held = (
        kernels.sort("ts_ns")
        .join_asof(
            parts.sort("ts_ns"), on="ts_ns", by=["device", "stream"], strategy="backward", check_sortedness=False
        )
        .filter(pl.col("ts_ns") < pl.col("span_end"))
    )
    ranks = _global_ranks(info)
    peer = pl.col("peer").cast(pl.Int64(), strict=False).replace_strict(ranks, default=None, return_dtype=pl.Int64())
    return held.select(
        "at",
        collective=pl.col("what"),
        src_rank=pl.when(pl.col("arrow") == "<-").then(peer),
        dst_rank=pl.when(pl.col("arrow") == "->").then(peer),
    )


def _global_ranks(info: RankInfo) -> dict[int, int]:
    """Rank within the group -> global rank, where all NCCL groups of this rank that hold more than itself agree."""
    groups = {g.ranks for g in info.groups if "nccl" in g.backend and len(g.ranks) > 1 and info.rank in g.ranks}
    if len(groups) == 1:
        return dict(enumerate(groups.pop()))
    if not groups and info.world_size:
        return {rank: rank for rank in range(info.world_size)} if info.world_size == 2 else {}
    return {}

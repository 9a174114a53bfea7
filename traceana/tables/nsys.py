"""An nsys export -> one RankTables per process and GPU, in the same tables as a torch.profiler trace."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl

from traceana import schema
from traceana.sources.losses import Loss, loss, losses_frame
from traceana.sources.nsys import NsysExport, process_of, read_export
from traceana.tables.capture import RankInfo, RankTables
from traceana.tables.nsys_p2p import MESSAGE, Launched, communication

__all__ = ["read_nsys"]

# Names as torch.profiler gives them, so that one copy has one name in both.
_COPIES = {
    1: "HtoD",
    2: "DtoH",
    3: "HtoA",
    4: "AtoH",
    5: "AtoA",
    6: "AtoD",
    7: "DtoA",
    8: "DtoD",
    9: "HtoH",
    10: "PtoP",
}
_KINDS = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device Static", 6: "Managed Static"}
_RANK = (
    r"^traceana\.rank\[rank=[0-9]{1,6} pp=(?P<pp>[0-9]{1,4})/(?P<pp_size>[0-9]{1,4}) "
    r"tp=(?P<tp>[0-9]{1,4})/(?P<tp_size>[0-9]{1,4})\]$"
)
_SPANS = r"^(?:scheduler\.)?(?:recv_requests|run_batch|get_next_batch_to_run)$|^step\["


class _Pair(NamedTuple):
    """One process on one GPU: a rank."""

    process: int
    device: int


def read_nsys(path: Path) -> tuple[RankTables, ...]:
    """The ranks of the SQLite export at `path`, in rank order. Times are epoch nanoseconds on the host's clock.

    nsys knows no ranks: they are told by the process name where it holds PP and TP, else by the order of the GPUs
    (`rank_source` order). Raises SourceError where `path` is damaged or no nsys export with GPU activity.
    """
    export = read_export(path)
    losses = list(export.losses)
    if export.epoch_ns is None:
        detail = f"{path.name} has no session start: its times begin at 0 and cannot be put beside other clocks"
        losses.append(loss("nsys_relative_time", "warning", 1, detail))
    device = _device(export, losses)
    calls = _calls(export)
    ranges = _ranges(export, calls, device)
    pairs = _pairs(device, losses)
    infos = _infos(export, pairs, ranges)
    told, lost = communication(
        device, calls, ranges, {Launched(p.process, p.device): info.rank for p, info in zip(pairs, infos, strict=True)}
    )
    losses += lost
    device = device.join(told, on="row", how="left", maintain_order="left")
    if not ranges.filter(pl.col("name").str.contains(_SPANS)).height:
        losses.append(
            loss(
                "nsys_no_spans",
                "info",
                1,
                f"{path.name} has none of SGLang's spans (record_function makes no NVTX ranges): micro-batches, empty "
                "slots and the scheduler's phases cannot be told; `traceana capture --profiler nsys` has the server say them",
            )
        )
    _count_unlaunched(export, device, calls, losses)
    several = {
        p
        for p, n in device.select("process", "device").unique().get_column("process").value_counts().iter_rows()
        if n > 1
    }
    if several:
        detail = "processes that use several GPUs: their calls stand beside each of them"
        losses.append(loss("nsys_shared_process", "info", len(several), detail))
    overheads = _overheads(export)
    ranks = [
        _rank(pair, info, device, calls, ranges, overheads, losses if info.rank == min(i.rank for i in infos) else [])
        for pair, info in zip(pairs, infos, strict=True)
    ]
    return tuple(sorted(ranks, key=lambda r: r.info.rank))


def _rank(
    pair: _Pair,
    info: RankInfo,
    device: pl.DataFrame,
    calls: pl.DataFrame,
    ranges: pl.DataFrame,
    overheads: pl.DataFrame,
    losses: Sequence[Loss],
) -> RankTables:
    own = pl.col("process") == pair.process
    # torch's ops under emit_nvtx carry an op id and a namespace, the hook's stand for torch's; all else annotates.
    comms = (pl.col("name") == "record_param_comms") | pl.col("name").str.contains(MESSAGE)
    op = (pl.col("op") & pl.col("name").str.contains("::", literal=True)) | comms
    spans = ranges.filter(own)
    return RankTables(
        info=info,
        device=schema.DEVICE.frame(_sorted(device.filter(own, pl.col("device") == pair.device))),
        calls=schema.CALLS.frame(_sorted(calls.filter(own))),
        annotations=schema.ANNOTATIONS.frame(_sorted(spans.filter(~op))),
        ops=schema.OPS.frame(_sorted(spans.filter(op).with_columns(_as_torch()))),
        overheads=schema.OVERHEADS.frame(_sorted(overheads.filter(own))),
        losses=losses_frame(losses),
    )


def _as_torch() -> pl.Expr:
    return pl.col("name").str.replace(MESSAGE, "record_param_comms")


def _sorted(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.sort(["ts_ns", "end_ns"], descending=[False, True], maintain_order=True)


def _times(export: NsysExport) -> tuple[pl.Expr, pl.Expr]:
    base = export.epoch_ns or 0
    return (pl.col("start") + base).alias("ts_ns"), (pl.col("end") + base).alias("end_ns")


def _named(export: NsysExport, frame: pl.DataFrame, column: str) -> pl.DataFrame:
    """`frame` with the string that `column` refers to as `name`."""
    strings = export.strings.rename({"id": column, "value": "name"})
    return frame.join(strings, on=column, how="left", maintain_order="left")


def _device(export: NsysExport, losses: list[Loss]) -> pl.DataFrame:
    """Every activity: process, device, stream, ts_ns, end_ns, kind, name, correlation, bytes, and its `row`."""
    kernels = export.tables["CUPTI_ACTIVITY_KIND_KERNEL"]
    kernels = _named(export, kernels.with_columns(id=pl.coalesce("demangledName", "shortName")), "id")
    graphs = export.tables["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"]
    if graphs.height:
        detail = "CUDA graphs recorded as one piece: their kernels are unknown (record with --cuda-graph-trace=node)"
        losses.append(loss("nsys_graph_as_one", "warning", graphs.height, detail))
    memory = dict(_KINDS) | dict(export.memory_kinds)

    def kind(column: str) -> pl.Expr:
        return pl.col(column).replace_strict(memory, default="Unknown", return_dtype=pl.String())

    copy = pl.col("copyKind").replace_strict(_COPIES, default="Unknown", return_dtype=pl.String())
    frames = (
        kernels.with_columns(kind=pl.lit("kernel"), name=pl.col("name").fill_null("(unnamed kernel)")),
        graphs.with_columns(kind=pl.lit("kernel"), name=pl.format("CUDA graph {}", pl.col("graphId").fill_null(-1))),
        export.tables["CUPTI_ACTIVITY_KIND_MEMCPY"].with_columns(
            kind=pl.lit("memcpy"), name=pl.format("Memcpy {} ({} -> {})", copy, kind("srcKind"), kind("dstKind"))
        ),
        export.tables["CUPTI_ACTIVITY_KIND_MEMSET"].with_columns(
            kind=pl.lit("memset"), name=pl.format("Memset ({})", kind("memKind"))
        ),
    )
    ts, end = _times(export)
    every = pl.concat(frames, how="diagonal").select(
        ts,
        end,
        "kind",
        "name",
        pl.col("globalPid").alias("process"),
        pl.col("deviceId").alias("device"),
        pl.col("streamId").alias("stream"),
        pl.col("correlationId").alias("correlation"),
        "bytes",
    )
    good = every.drop_nulls(["process", "stream"]).filter(pl.col("device").is_between(0, 2**31 - 1))
    if good.height < every.height:
        detail = "activities without a process, a GPU or a stream"
        losses.append(loss("nsys_activity_unplaced", "warning", every.height - good.height, detail))
    return good.with_row_index("row")


def _calls(export: NsysExport) -> pl.DataFrame:
    """Runtime and driver calls. nsys adds the version of the function (`cudaLaunchKernel_v7000`), torch does not."""
    ts, end = _times(export)
    calls = _named(export, export.tables["CUPTI_ACTIVITY_KIND_RUNTIME"], "nameId").drop_nulls("globalTid")
    return calls.select(
        ts,
        end,
        pl.col("name").str.replace(r"_v\d+$", "").fill_null("(unnamed call)"),
        *_thread(),
        pl.col("correlationId").alias("correlation"),
    )


def _thread() -> tuple[pl.Expr, ...]:
    thread = pl.col("globalTid")
    return (
        process_of(thread).alias("process"),
        ((thread // (1 << 24)) % (1 << 24)).alias("pid"),
        (thread % (1 << 24)).alias("tid"),
        thread.alias("thread"),
    )


def _ranges(export: NsysExport, calls: pl.DataFrame, device: pl.DataFrame) -> pl.DataFrame:
    """NVTX ranges: ts_ns, end_ns, name without torch's op id, whether it had one, thread, finished. A range that was
    open at the end (without an end of its own, or with the stop of the recording for one) ends with the last event."""
    ts, end = _times(export)
    closed = pl.col("end").is_not_null()
    if export.stop_ns is not None:
        closed &= pl.col("end").fill_null(export.stop_ns) < export.stop_ns
    raw = _named(export, export.tables["NVTX_EVENTS"], "textId").drop_nulls("globalTid")
    last = max((int(v) for f in (calls, device) if isinstance(v := f.get_column("end_ns").max(), int)), default=0)
    name = pl.coalesce("text", "name").fill_null("(unnamed range)")
    op_id = r", op_id = \d+.*$"
    return raw.select(
        ts,
        pl.max_horizontal(pl.when(closed).then(end).otherwise(last), ts).alias("end_ns"),
        name.str.replace(r"(?:, seq = \d+)?, op_id = \d+.*$", "").alias("name"),
        name.str.contains(op_id).alias("op"),
        *_thread(),
        closed.alias("finished"),
        pl.col("jsonText").alias("payload"),
    )


def _overheads(export: NsysExport) -> pl.DataFrame:
    ts, end = _times(export)
    frames = [export.tables[t] for t in ("PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_OVERHEAD")]
    every = _named(export, pl.concat(frames), "nameId").drop_nulls("globalTid")
    return every.select(ts, end, pl.col("name").fill_null("Unknown"), *_thread())


def _pairs(device: pl.DataFrame, losses: list[Loss]) -> list[_Pair]:
    """The pairs that ran kernels, in order of GPU, then process."""
    counted = device.group_by("device", "process").agg((pl.col("kind") == "kernel").sum().alias("kernels"), pl.len())
    idle = counted.filter(pl.col("kernels") == 0)
    if idle.height and idle.height < counted.height:
        detail = "copies and fills of processes that ran no kernel on that GPU: no rank of a model"
        losses.append(loss("nsys_activity_of_no_rank", "info", int(idle.get_column("len").sum()), detail))
        counted = counted.filter(pl.col("kernels") > 0)
    return [_Pair(p, d) for d, p in counted.sort("device", "process").select("device", "process").iter_rows()]


def _infos(export: NsysExport, pairs: Sequence[_Pair], ranges: pl.DataFrame) -> list[RankInfo]:
    """Who each pair is: as the hook says, else by the process name, else by order."""
    names = [export.processes.get(p.process, (None, ""))[1] for p in pairs]
    said = _said(ranges)
    places = [said.get(p.process) or _named_place(n) for p, n in zip(pairs, names, strict=True)]
    tp_size = max((p.tp_size or 1 + (p.tp or 0) for p in places), default=1)
    told = [None if p.pp is None and p.tp is None else (p.pp or 0) * tp_size + (p.tp or 0) for p in places]
    known = None not in told and len(set(told)) == len(told)
    return [
        RankInfo(
            rank=rank if known and rank is not None else order,
            file=export.path,
            world_size=place.world if known else None,
            pp_rank=place.pp if known else None,
            tp_rank=place.tp if known else None,
            host=export.host,
            pid=export.processes.get(pair.process, ((pair.process >> 24) % (1 << 24), ""))[0],
            device=pair.device,
            process_name=name or None,
            base_time_ns=export.epoch_ns or 0,
            rank_source="content" if known else "order",
            versions={"nsys": export.version} if export.version else {},
        )
        for order, (pair, name, rank, place) in enumerate(zip(pairs, names, told, places, strict=True))
    ]


class _Place(NamedTuple):
    """Where a rank stands, as far as that is said."""

    pp: int | None
    tp: int | None
    tp_size: int | None = None
    world: int | None = None


def _named_place(name: str) -> _Place:
    pp, tp = (int(m[1]) if (m := re.search(rf"{tag}(\d{{1,4}})(?!\d)", name)) else None for tag in ("PP", "TP"))
    return _Place(pp, tp)


def _said(ranges: pl.DataFrame) -> dict[int, _Place]:
    """The hook's word for each process."""
    found = ranges.filter(pl.col("name").str.contains(_RANK)).select(
        "process", pl.col("name").str.extract_groups(_RANK).alias("g")
    )
    places: dict[int, _Place] = {}
    for process, group in found.unique("process", keep="first", maintain_order=True).iter_rows():
        pp, pp_size, tp, tp_size = (int(group[k]) for k in ("pp", "pp_size", "tp", "tp_size"))
        if pp < pp_size and tp < tp_size:
            places[process] = _Place(pp, tp, tp_size, pp_size * tp_size)
    return places


def _count_unlaunched(export: NsysExport, device: pl.DataFrame, calls: pl.DataFrame, losses: list[Loss]) -> None:
    keys = ["process", "correlation"]
    lone = device.join(calls.select(keys), on=keys, how="anti").height
    if lone:
        losses.append(loss("kernel_without_launch", "info", lone, "activities whose call was not recorded"))
    syncs = export.tables["CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"].select(
        pl.col("globalPid").alias("process"), pl.col("correlationId").alias("correlation")
    )
    # A synchronisation is a call too; the record of its own adds nothing but the stream, which no table holds.
    lone = syncs.join(calls.select(keys), on=keys, how="anti").height
    if lone:
        losses.append(loss("nsys_sync_without_call", "info", lone, "synchronisations whose call was not recorded"))

"""What nsys would have recorded of a torch capture: the same activities, calls, spans as NVTX, and the hook's marks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import polars as pl
from nsys_export import Export, pid_of, tid_of

from traceana.tables import CaptureTables, RankTables

__all__ = ["record"]

_STEP = re.compile(r"step\[([A-Z]+) bs=(\d+)(?: toks=(\d+))?")
_TABLES = {
    "kernel": "CUPTI_ACTIVITY_KIND_KERNEL",
    "memcpy": "CUPTI_ACTIVITY_KIND_MEMCPY",
    "memset": "CUPTI_ACTIVITY_KIND_MEMSET",
}


def record(capture: CaptureTables, folder: Path, *, slots: int, late: dict[int, int] | None = None) -> Path:
    """Write the export into `folder`. Rank r is recorded `late[r]` ns after its trace begins: what started before is
    not in it, as nsys starts all processes at once. Kernels keep their correlations, clocks must be the same."""
    folder.mkdir(parents=True)
    export, base = Export(), min(int(r.calls["ts_ns"].min()) for r in capture.ranks)  # type: ignore[arg-type]
    for rank in capture.ranks:
        begin = int(rank.annotations["ts_ns"].min()) + (late or {}).get(rank.info.rank, 0)  # type: ignore[arg-type]
        _rank(export, capture, rank, base, begin, slots)
    for path in capture.folder.rglob("*"):  # what stands beside the traces
        if path.is_file() and ".trace.json" not in path.name:
            target = folder / path.relative_to(capture.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    return export.write(folder / "report.sqlite", epoch_ns=base)


def _rank(export: Export, capture: CaptureTables, rank: RankTables, base: int, begin: int, slots: int) -> None:
    me = rank.info.rank
    pid = 1000 + 10 * me
    text = pl.col("name").cast(pl.String)
    main = rank.annotations.filter(text == "recv_requests")["tid"][0]
    others = [t for t in rank.calls["tid"].unique().sort().to_list() if t != main]
    threads = {main: pid} | {t: pid + 1 + i for i, t in enumerate(others)}

    def later(frame: pl.DataFrame) -> list[dict[str, object]]:
        return frame.filter(pl.col("ts_ns") >= begin).with_columns(pl.col("ts_ns", "end_ns") - base).to_dicts()

    for row in later(rank.device):
        name = export.string(str(row["name"]))
        kinds = {"demangledName": name, "shortName": name} if row["kind"] == "kernel" else {}
        export.add(
            _TABLES[str(row["kind"])], start=row["ts_ns"], end=row["end_ns"], deviceId=me, streamId=row["stream"],
            correlationId=row["correlation"] or 0, globalPid=pid_of(pid), **kinds,
        )  # fmt: skip
    p2p = rank.device.filter(text.str.contains("SendRecv"))
    said = {row["correlation"]: _message(row) for row in p2p.to_dicts()}

    def span(name: str, start: object, end: object, kind: int = 59) -> None:
        export.add(
            "NVTX_EVENTS", start=start, end=end, text=name, globalTid=tid_of(pid, pid), domainId=0, eventType=kind
        )

    launches: list[tuple[object, str]] = []
    for row in later(rank.calls):
        export.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=row["ts_ns"], end=row["end_ns"], nameId=export.string(str(row["name"])),
            globalTid=tid_of(pid, threads[row["tid"]]), correlationId=row["correlation"],
        )  # fmt: skip
        if row["correlation"] in said and "Launch" in str(row["name"]):
            launches.append((row["ts_ns"], said[row["correlation"]]))
    own = rank.annotations.filter(pl.col("tid") == main)
    for row in later(own.filter(~text.str.contains(r"^(step\[|nccl:|PyTorch|ProfilerStep)"))):
        title = str(row["name"])
        span(title, row["ts_ns"], row["end_ns"] if row["finished"] else None, 60 if title.startswith("gloo") else 59)
    for row in later(rank.overheads):
        export.add(
            "PROFILER_OVERHEAD", start=row["ts_ns"], end=row["end_ns"], nameId=export.string(str(row["name"])),
            globalTid=tid_of(pid, pid),
        )  # fmt: skip
    for row in later(rank.ops.filter(text == "record_param_comms", pl.col("tid") == main)):
        held = [name for at, name in launches if row["ts_ns"] <= at < row["end_ns"]]  # type: ignore[operator]
        span(held[0] if held else "record_param_comms", row["ts_ns"], row["end_ns"])
    info, tp = rank.info, 1 + max(r.info.tp_rank or 0 for r in capture.ranks)
    place = f"pp={info.pp_rank}/{len(capture.ranks) // tp} tp={info.tp_rank}/{tp}"
    span(f"traceana.rank[rank={me} {place}]", begin - base, begin - base)
    steps = own.filter(text.str.starts_with("step[")).sort("ts_ns")
    anchors = own.filter(text == "recv_requests").sort("ts_ns")["ts_ns"]
    for number, (at, step) in enumerate(steps.select("ts_ns", text.alias("step")).iter_rows()):
        if at >= begin and (found := _STEP.match(str(step))):
            visit = int(anchors.search_sorted(at, side="right"))
            tokens = f" toks={found[3]}" if found[3] else ""
            mark = f"traceana.slot[mb={visit % slots} stage={me} {found[1]} bs={found[2]}{tokens} n={number + 77}]"
            span(mark, at - base, at - base)


def _message(row: dict[str, object]) -> str:
    sends = row["collective"] == "send"
    peer, elements = ("dst_rank", "in_elements") if sends else ("src_rank", "out_elements")
    return f"traceana.message[{row['collective']} peer={row[peer]} elements={row[elements]} dtype={row['dtype']}]"

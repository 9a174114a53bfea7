"""Who wrote a trace: rank and place in the parallel layout, from content first, then the file's name, then its order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from traceana.sources.kineto import RawTrace
from traceana.tables.capture import ProcessGroup, RankInfo

__all__ = ["identify"]

_PARTS = re.compile(r"-(TP|DP|PP|EP)-(\d+)(?=[-.])")
_RANK = re.compile(r"(?i)rank[-_]?(\d+)")


def identify(trace: RawTrace, order: int) -> RankInfo:
    """The rank of `trace`; `order` is its place among the traces of the folder."""
    dist: dict[str, Any] = trace.header.get("distributedInfo") or {}
    parts = {key.lower(): int(value) for key, value in _PARTS.findall(trace.path.name)}
    named = _RANK.search(trace.path.name)
    rank, source = dist.get("rank"), "content"
    if rank is None and named:
        rank, source = int(named.group(1)), "name"
    if rank is None:
        rank, source = order, "order"
    groups = tuple(
        ProcessGroup(str(g["pg_name"]), str(g["pg_desc"]), str(g["backend_config"]), tuple(g["ranks"]))
        for g in dist.get("pg_config") or ()
    )
    names = {m["pid"]: m["args"]["name"] for m in trace.metadata if m.get("name") == "process_name"}
    pid = next((p for p, n in names.items() if isinstance(p, int) and "sglang" in str(n)), None)
    device = trace.events["args"].combine_chunks().field("device").drop_null()
    versions = {
        key: str(value)
        for key, value in {
            "cuda_runtime": trace.header.get("cuda_runtime_version"),
            "cuda_driver": trace.header.get("cuda_driver_version"),
            "cupti": trace.header.get("cupti_version"),
            "nccl": dist.get("nccl_version"),
        }.items()
        if value is not None
    }
    return RankInfo(
        rank=int(rank),
        file=Path(trace.path),
        world_size=dist.get("world_size"),
        pp_rank=parts.get("pp"),
        tp_rank=parts.get("tp"),
        dp_rank=parts.get("dp"),
        ep_rank=parts.get("ep"),
        pid=pid,
        device=device[0].as_py() if len(device) else None,
        process_name=str(names[pid]) if pid is not None else None,
        base_time_ns=int(trace.header.get("baseTimeNanoseconds") or 0),
        rank_source=source,
        groups=groups,
        versions=versions,
    )

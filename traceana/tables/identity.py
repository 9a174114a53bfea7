"""Who wrote a trace: rank and place in the parallel layout, from content first, then the file's name, then its order.

claim(trace)              what one file says about itself, without looking at its name
identify(files, hosts)    the RankInfo of every file of a capture, or a SourceError naming files that contradict
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np

from traceana.arrays import numbered
from traceana.errors import SourceError
from traceana.sources.kineto import RawTrace
from traceana.sources.kineto_events import ANNOTATION, CALL, MEMSET, NULL, OP, Ints
from traceana.sources.losses import Loss, loss
from traceana.tables.capture import ProcessGroup, RankInfo

__all__ = ["Claim", "FileName", "check_facts", "claim", "identify", "listed_ranks"]

_SGLANG = re.compile(
    r"^(?P<id>.+?)-TP-(?P<tp>\d{1,6})(?:-DP-(?P<dp>\d{1,6}))?(?:-PP-(?P<pp>\d{1,6}))?(?:-EP-(?P<ep>\d{1,6}))?"
    r"(?:-(?P<stage>EXTEND|DECODE|prefill|decode))?\.trace\.json(?:\.gz)?$"
)
_RANK = re.compile(r"(?<![a-z])rank[-_ ]?(\d{1,6})(?!\d)", re.IGNORECASE)
_WORKER = re.compile(r"(?:^|[_\-.])(dp|pp|tp|ep)(\d{1,6})(?=[_\-.])")
_TORCH = re.compile(r"^(?P<host>.+)_(?P<pid>\d+)\.\d+(?:\.\d+)?\.pt\.trace\.json(?:\.gz)?$")
_PROCESS = re.compile(r"(?:^|[_:\s])(TP|PP|DP|EP)(\d{1,6})(?!\d)")
_LISTED = 8
_MOST_RANKS = 1_000_000  # of one job; a larger number is no rank, and lists of what is missing must stay short


@dataclass(frozen=True, slots=True)
class Claim:
    """What a trace's content says about who wrote it. Every field may be unknown."""

    rank: int | None = None
    world_size: int | None = None
    pid: int | None = None
    device: int | None = None
    process_name: str | None = None
    base_time_ns: int = 0
    groups: tuple[ProcessGroup, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict[str, str])

    def info(self, path: Path) -> RankInfo:
        """The RankInfo that content alone gives (rank -1 where it is unknown)."""
        return RankInfo(
            rank=-1 if self.rank is None else self.rank,
            file=path,
            world_size=self.world_size,
            pid=self.pid,
            device=self.device,
            process_name=self.process_name,
            base_time_ns=self.base_time_ns,
            groups=self.groups,
            versions=self.versions,
        )


@dataclass(frozen=True, slots=True)
class FileName:
    """What a file's name says: SGLang's, vLLM's and torch's patterns. `capture` is SGLang's profile id."""

    rank: int | None = None
    parts: Mapping[str, int] = field(default_factory=dict[str, int])
    capture: str | None = None
    stage: str | None = None
    host: str | None = None

    @classmethod
    def of(cls, name: str) -> FileName:
        """Reads `name` (without folders)."""
        if found := _SGLANG.match(name):
            parts = {key: int(found[key] or 0) for key in ("tp", "dp", "pp", "ep")}
            return cls(parts=parts, capture=found["id"], stage=found["stage"])
        ranks = {int(n) for n in _RANK.findall(name)}
        parts = {key: int(n) for key, n in _WORKER.findall(name)}
        torch = _TORCH.match(name)
        return cls(rank=ranks.pop() if len(ranks) == 1 else None, parts=parts, host=torch["host"] if torch else None)


def claim(trace: RawTrace) -> Claim:
    """What the content of `trace` says."""
    dist = _mapping(trace.header.get("distributedInfo"))
    pid = _scheduler_pid(trace)
    names = {
        m.get("pid"): _mapping(m.get("args")).get("name")
        for m in trace.events.metadata
        if m.get("name") == "process_name" and isinstance(m.get("pid"), (int, str))
    }
    process = names.get(pid)
    header = trace.header
    versions = {
        "cuda_runtime": header.get("cuda_runtime_version"),
        "cuda_driver": header.get("cuda_driver_version"),
        "cupti": header.get("cupti_version"),
        "hip_runtime": header.get("hip_runtime_version"),
        "nccl": dist.get("nccl_version"),
        "torch": header.get("torch_version") or header.get("pytorch_version"),
        "kineto_schema": header.get("schemaVersion"),
    }
    return Claim(
        rank=_rank(dist.get("rank")),
        world_size=_rank(dist.get("world_size")),
        pid=pid,
        device=_device(trace),
        process_name=str(process) if process else None,
        base_time_ns=_base(header.get("baseTimeNanoseconds")) or 0,
        groups=_groups(dist.get("pg_config")),
        versions={key: str(value) for key, value in versions.items() if value is not None},
    )


def check_facts(header: Mapping[str, Any], rank: int) -> list[Loss]:
    """Facts beside the events that no profiler writes; what they would have said counts as unknown."""
    dist = _mapping(header.get("distributedInfo"))
    read: dict[str, tuple[object, Callable[[object], object]]] = {
        "distributedInfo": (header.get("distributedInfo"), lambda value: value if isinstance(value, dict) else None),
        "rank": (dist.get("rank"), _rank),
        "world_size": (dist.get("world_size"), _rank),
        "baseTimeNanoseconds": (header.get("baseTimeNanoseconds"), _base),
    }
    wrong = [
        f"{key} is {value!r:.40}" for key, (value, sound) in read.items() if value is not None and sound(value) is None
    ]
    if not wrong:
        return []
    return [loss("header_fact_impossible", "warning", len(wrong), f"taken as unknown: {', '.join(wrong)}", rank)]


def identify(
    files: Sequence[tuple[Path, Claim]], manifest: Mapping[str, object] | None = None
) -> tuple[list[RankInfo], list[Loss]]:
    """The RankInfo of every file, in the order given, and what is doubtful about them. `manifest` is the capture's own
    list of ranks, where there is one.

    Raises SourceError where two captures are mixed, two files claim one rank, or name and content contradict.
    """
    names = [FileName.of(path.name) for path, _ in files]
    _one_capture(files, names)
    listed = listed_ranks(manifest)
    size = max((name.parts["tp"] + 1 for name in names if name.capture), default=1)
    ranks: list[tuple[int | None, str]] = []
    for (path, said), name in zip(files, names, strict=True):
        by_name = name.rank
        if name.capture:
            by_name = _rank(name.parts["pp"] * size + name.parts["tp"])
        entry = listed.get(path.name, {})
        in_list = _rank(entry.get("rank"))
        if in_list is not None and said.rank is not None and in_list != said.rank:
            _contradict(path, f"the manifest says rank {in_list}, the content rank {said.rank}")
        if said.rank is not None:
            ranks.append((said.rank, "content"))
        elif in_list is not None:
            ranks.append((in_list, "content"))
        else:
            ranks.append((by_name, "name") if by_name is not None else (None, "order"))
    _one_file_a_rank(files, names, [rank for rank, _ in ranks])
    for (path, said), name in zip(files, names, strict=True):
        if said.rank is not None and name.rank is not None and name.rank != said.rank:
            _contradict(path, f"the name says rank {name.rank}, the content rank {said.rank}")
    _grid(files, names)
    taken = {rank for rank, _ in ranks}
    free = (n for n in range(len(files) + len(taken)) if n not in taken)
    infos: list[RankInfo] = []
    for (path, said), name, (rank, source) in zip(files, names, ranks, strict=True):
        number = next(free) if rank is None else rank
        infos.append(_info(path, said, name, number, source, listed.get(path.name, {})))
    return infos, _doubts(infos)


def _info(path: Path, said: Claim, name: FileName, rank: int, source: str, entry: Mapping[str, object]) -> RankInfo:
    process = {key.lower(): int(n) for key, n in _PROCESS.findall(said.process_name or "")}
    if process and "pp" not in process and said.process_name and "scheduler" in said.process_name:
        process["pp"] = 0  # SGLang names the stage wherever there is more than one
    by_group = {key: place for key in ("pp", "tp", "dp", "ep") if (place := _place(said.groups, key, rank)) is not None}

    def part(key: str) -> int | None:
        for source in (name.parts, process, by_group):
            if key in source:
                return source[key]
        return _rank(entry.get(key))

    host = entry.get("host")
    return RankInfo(
        rank=rank,
        file=path,
        world_size=said.world_size,
        pp_rank=part("pp"),
        tp_rank=part("tp"),
        dp_rank=part("dp"),
        ep_rank=part("ep"),
        host=host if isinstance(host, str) else name.host,
        pid=said.pid,
        device=said.device,
        process_name=said.process_name,
        base_time_ns=said.base_time_ns,
        rank_source=source,
        groups=said.groups,
        versions=said.versions,
    )


def _one_capture(files: Sequence[tuple[Path, Claim]], names: Sequence[FileName]) -> None:
    captures: dict[str, list[str]] = defaultdict(list)
    for (path, _), name in zip(files, names, strict=True):
        if name.capture:
            captures[name.capture].append(path.name)
    if len(captures) > 1:
        ids = [f"{capture} ({len(held)} files)" for capture, held in sorted(captures.items())]
        raise SourceError(
            f"several captures lie in one folder: {', '.join(ids[:_LISTED])}",
            where=str(files[0][0].parent),
            hint="move each into a folder of its own, or give the files of one",
        )


def _one_file_a_rank(
    files: Sequence[tuple[Path, Claim]], names: Sequence[FileName], ranks: Sequence[int | None]
) -> None:
    owner: dict[int, int] = {}
    for i, rank in enumerate(ranks):
        if rank is None:
            continue
        if rank in owner:
            one, two = files[owner[rank]][0], files[i][0]
            hint = "keep the file that belongs to this capture"
            if names[owner[rank]].stage != names[i].stage:
                hint = "these are profiles of different stages (prefill, decode); give the files of one"
            elif names[owner[rank]].parts.get("dp") != names[i].parts.get("dp"):
                hint = "each data-parallel replica counts its own ranks; give the files of one"
            raise SourceError(
                f"two files claim rank {rank}: {one.name} and {two.name}", where=str(one.parent), hint=hint
            )
        owner[rank] = i


def _grid(files: Sequence[tuple[Path, Claim]], names: Sequence[FileName]) -> None:
    """SGLang's global rank is pp * tp_size + tp, with one tp_size for all files."""
    sizes: dict[int, Path] = {}
    for (path, said), name in zip(files, names, strict=True):
        if not name.capture or said.rank is None or name.parts["dp"]:
            continue
        pp, rest = name.parts["pp"], said.rank - name.parts["tp"]
        if (pp == 0 and rest != 0) or (pp > 0 and (rest <= 0 or rest % pp)):
            _contradict(path, f"the name says TP {name.parts['tp']} and PP {pp}, the content rank {said.rank}")
        if pp > 0:
            sizes[rest // pp] = path
    if len(sizes) > 1:
        one, two = list(sizes.values())[:2]
        _contradict(one, f"ranks and names of {one.name} and {two.name} do not fit one tensor-parallel size")


def _contradict(path: Path, why: str) -> NoReturn:
    raise SourceError(
        f"{path.name} contradicts itself: {why}",
        where=str(path),
        hint="rename the file as it was written, or leave it out",
    )


def _doubts(infos: Sequence[RankInfo]) -> list[Loss]:
    losses: list[Loss] = []
    ordered = [i for i in infos if i.rank_source == "order"]
    if ordered and len(infos) > 1:
        names = ", ".join(f"{i.file.name} is rank {i.rank}" for i in ordered[:_LISTED])
        losses.append(
            loss("rank_by_order", "warning", len(ordered), f"neither content nor name says the rank: {names}")
        )
    worlds = {i.world_size for i in infos if i.world_size is not None}
    if len(worlds) > 1:
        says = ", ".join(f"{i.file.name} says {i.world_size}" for i in infos[:_LISTED])
        losses.append(loss("world_sizes_disagree", "warning", len(worlds), f"are these of one job? {says}"))
    world = max(worlds, default=0)
    present = {i.rank for i in infos}
    missing = [rank for rank in range(world) if rank not in present]
    if missing:
        names = ", ".join(map(str, missing[:32])) + (", ..." if len(missing) > 32 else "")
        losses.append(loss("ranks_missing", "warning", len(missing), f"of {world} ranks these have no trace: {names}"))
    beyond = sorted(present - set(range(world))) if world else []
    if beyond:
        detail = f"ranks {', '.join(map(str, beyond[:32]))} lie outside a world of {world}"
        losses.append(loss("rank_beyond_world", "warning", len(beyond), detail))
    return losses


def listed_ranks(manifest: Mapping[str, object] | None) -> dict[str, Mapping[str, object]]:
    """The manifest's ranks by file name; folders in its paths are not followed."""
    ranks = (manifest or {}).get("ranks")
    rows = cast("list[object]", ranks) if isinstance(ranks, list) else []
    entries = [_mapping(row) for row in rows]
    return {Path(str(entry["file"])).name: entry for entry in entries if isinstance(entry.get("file"), str)}


def _scheduler_pid(trace: RawTrace) -> int | None:
    """The process of most CPU spans; runtime calls decide where there are no spans."""
    kind, pids = trace.events.columns["kind"], trace.events.columns["pid"]
    for kinds in ((ANNOTATION, OP), (CALL,)):
        found = _commonest(pids[np.isin(kind, kinds)])
        if found is not None:
            return found
    return None


def _device(trace: RawTrace) -> int | None:
    columns = trace.events.columns
    rows = columns["kind"] <= MEMSET
    device = np.where(columns["device"][rows] == NULL, columns["pid"][rows], columns["device"][rows])
    return _commonest(device)


def _commonest(values: Ints) -> int | None:
    """The value that occurs most often, the lowest on ties."""
    found, place = numbered(values)
    return int(found[np.argmax(np.bincount(place))]) if found.size else None


def _groups(config: object) -> tuple[ProcessGroup, ...]:
    groups: list[ProcessGroup] = []
    for row in cast("list[object]", config) if isinstance(config, list) else []:
        entry = _mapping(row)
        ranks = entry.get("ranks")
        members = [_rank(r) for r in cast("list[object]", ranks)] if isinstance(ranks, list) else []
        groups.append(
            ProcessGroup(
                name=str(entry.get("pg_name", "")),
                desc=str(entry.get("pg_desc", "")),
                backend=str(entry.get("backend_config", "")),
                ranks=tuple(r for r in members if r is not None),
            )
        )
    return tuple(groups)


def _place(groups: Sequence[ProcessGroup], key: str, rank: int) -> int | None:
    """The place of `rank` in its group of that kind (`pp:device`, `tp:device`, `moe_ep:device`, ...)."""
    for group in groups:
        if re.fullmatch(rf"(?:moe_)?{key}(?::\w+)?", group.desc) and rank in group.ranks:
            return group.ranks.index(rank)
    return None


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _rank(value: object) -> int | None:
    number = _count(value)
    return number if number is not None and number < _MOST_RANKS else None


def _base(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**30 else None


def _count(value: object) -> int | None:
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None

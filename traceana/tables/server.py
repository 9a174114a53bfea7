"""Everything beside the traces -> ServerFacts and GPU samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import cast

import polars as pl

from traceana import schema
from traceana.sources.client_requests import read_requests
from traceana.sources.gpu_samples import read_gpu_samples
from traceana.sources.losses import Loss, loss, losses_frame
from traceana.sources.manifest import Launch, Recording, read_launch, read_recording
from traceana.sources.metrics import read_metrics
from traceana.sources.server_info import ARGUMENTS, arguments_of_command, arguments_of_log, merged_info, split_command
from traceana.sources.server_log import ServerLog, read_log
from traceana.sources.sidecar import SECOND, Sidecar, plain, read_sidecars
from traceana.tables.capture import ServerFacts
from traceana.tables.scheduler_log import batch_lines, log_clock, profile_runs
from traceana.tables.server_facts import Evidence, clients, gpu_of_rank, server_facts, unknown
from traceana.tables.throughput import interval_of_dumps, throughput

__all__ = ["assign_gpu_ranks", "read_server"]


def read_server(
    paths: Sequence[Path], root: Path | None = None
) -> tuple[ServerFacts | None, pl.DataFrame, pl.DataFrame]:
    """Server facts, GPU_SAMPLES and LOSSES from the files beside the traces, at any depth and under any name.

    Facts are None where no file speaks of a server. Never raises for a file's content: what is damaged, unknown or
    contradictory is a row of the losses. The order of `paths` does not matter.
    """
    sidecars, losses = read_sidecars(paths, root)
    kinds: dict[str, list[Sidecar]] = {}
    for sidecar in sidecars:
        kinds.setdefault(sidecar.kind, []).append(sidecar)
    samples = _samples(kinds.pop("gpu", []), losses)
    if not kinds:
        return None, samples, losses_frame(losses)
    facts, seen = _facts(kinds, losses)
    gpus = gpu_of_rank(seen)
    # Indices that were sampled and indices that were handed out are the same kind of index only if they agree.
    if gpus is not None and set(gpus.values()) <= set(samples.get_column("gpu")):
        samples = assign_gpu_ranks(samples, gpus)
    elif samples.height:
        losses.append(loss("gpu_rank_unknown", "info", 1, "nothing says which rank used which sampled GPU"))
    return facts, samples, losses_frame(losses)


def assign_gpu_ranks(samples: pl.DataFrame, devices: Mapping[int, int]) -> pl.DataFrame:
    """`samples` with `rank` set from `devices` (rank -> NVML index); GPUs of no rank get null."""
    ranks = {gpu: rank for rank, gpu in devices.items()}
    rank = pl.col("gpu").replace_strict(ranks, default=None, return_dtype=pl.Int32())
    return schema.GPU_SAMPLES.frame(samples.with_columns(rank=rank))


def _samples(sidecars: Sequence[Sidecar], losses: list[Loss]) -> pl.DataFrame:
    frames: list[pl.DataFrame] = []
    for sidecar in sidecars:
        frame, lost = read_gpu_samples(sidecar)
        frames.append(frame)
        losses += lost
    return pl.concat(frames).sort("ts_ns", "gpu", maintain_order=True) if frames else schema.GPU_SAMPLES.empty()


def _facts(kinds: Mapping[str, list[Sidecar]], losses: list[Loss]) -> tuple[ServerFacts, Evidence]:
    logs: list[ServerLog] = []
    for sidecar in kinds.get("log", ()):
        log, lost = read_log(sidecar)
        logs.append(log)
        losses += lost
    metrics, lost = read_metrics(kinds.get("metrics", ()))
    losses += lost
    requests = _requests(kinds.get("requests", ()), losses)
    recording = _recording([*kinds.get("manifest", ()), *kinds.get("windows", ())], losses)
    launch = _launch(kinds.get("command", ()), recording)
    info, differ = merged_info(kinds.get("info", ()))
    if differ:
        losses.append(loss("server_info_changed", "info", len(differ), f"while it was captured: {', '.join(differ)}"))
    arguments = arguments_of_command(launch.command) if launch else {}
    for log in logs:
        arguments |= arguments_of_log(log.server_args or "")
    arguments |= {name: plain(info[name]) for name in ARGUMENTS if name in info}
    loads = _mapping(kinds.get("loads", ()))
    clock = log_clock(logs, _moments(loads), requests)
    if logs and clock.offset_ns is None:
        losses.append(
            loss("log_zone_unknown", "info", 1, "the log prints local time and nothing tells its zone: read as UTC")
        )
    offset = clock.offset_ns or 0
    since = recording.since_ns if recording else None
    decode, prefill = batch_lines(logs, offset, since)
    seen = Evidence(
        arguments=arguments,
        info=info,
        stages=_stages(logs),
        decode=decode,
        prefill=prefill,
        metrics=metrics,
        clock=clock,
        launch=launch,
        recording=recording,
        config=_mapping(kinds.get("config", ())),
        model=_mapping(kinds.get("model", ())),
    )
    facts, lost = server_facts(seen)
    losses += lost
    interval, lost = interval_of_dumps(metrics, logs, recording.steady_ns if recording else None, offset)
    losses += lost
    runs = profile_runs(logs, offset, since)
    starts = [t for run in runs if isinstance(t := run["started_ns"], int)]
    rates = throughput(decode, prefill, metrics, interval, recording.windows if recording else ())
    facts["throughput"] = {**rates, "profile_cost": recording.cost if recording else None}
    facts["profile"] = {"runs": runs, "request": recording.profile_request if recording else None} if runs else None
    facts["clients"] = clients(requests, recording.steady_ns if recording else None, min(starts, default=None))
    facts["steady_window_ns"] = list(recording.steady_ns) if recording and recording.steady_ns else None
    facts["pid_by_rank"] = _pids(metrics, seen)
    if recording and recording.pids:
        facts["pid_by_rank"] = [{"rank": rank, "pid": pid} for rank, pid in sorted(recording.pids.items())]
    if missing := unknown(facts):
        losses.append(loss("server_fact_unknown", "info", len(missing), ", ".join(missing)))
    return ServerFacts(
        facts=cast("dict[str, object]", plain(facts)),
        decode_log=schema.DECODE_LOG.frame(decode),
        prefill_log=schema.PREFILL_LOG.frame(prefill),
        requests=requests,
        metrics=metrics,
    ), seen


def _requests(sidecars: Sequence[Sidecar], losses: list[Loss]) -> pl.DataFrame:
    frames: list[pl.DataFrame] = []
    for sidecar in sidecars:
        frame, lost = read_requests(sidecar)
        frames.append(frame)
        losses += lost
    return pl.concat(frames).sort("start_ns", "end_ns", maintain_order=True) if frames else schema.REQUESTS.empty()


def _recording(sidecars: Sequence[Sidecar], losses: list[Loss]) -> Recording | None:
    """The first of several, a manifest before a script's own file."""
    found: Recording | None = None
    for sidecar in sidecars:
        recording, lost = read_recording(sidecar)
        losses += lost
        found = found or recording
    return found


def _launch(sidecars: Sequence[Sidecar], recording: Recording | None) -> Launch | None:
    for sidecar in sidecars:
        return read_launch(sidecar)
    if recording and recording.command:
        env, command = split_command(recording.command)
        return Launch(command, {**recording.env, **env}, recording.source)
    return None


def _stages(logs: Sequence[ServerLog]) -> pl.DataFrame:
    frames = [log.stages for log in logs if log.stages.height]
    if not frames:
        return pl.DataFrame()
    keys = ["pp_rank", "tp_rank", "dp_rank"]
    return pl.concat(frames).group_by(keys).agg(pl.exclude(keys).drop_nulls().last()).sort(keys)


def _mapping(sidecars: Sequence[Sidecar]) -> dict[str, object]:
    for sidecar in sidecars:
        if isinstance(sidecar.json, dict):
            return cast("dict[str, object]", sidecar.json)
    return {}


def _moments(loads: Mapping[str, object]) -> list[int]:
    """When /v1/loads was asked, to a microsecond."""
    text = loads.get("timestamp")
    try:
        at = datetime.fromisoformat(text.replace("Z", "+00:00")) if isinstance(text, str) else None
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        return []
    return [int(at.replace(microsecond=0).timestamp()) * SECOND + at.microsecond * 1000]


def _pids(metrics: pl.DataFrame, seen: Evidence) -> list[dict[str, int]] | None:
    """Process ids of the schedulers, where a metric of theirs carries one."""
    tp_size = seen.integer("tp_size") or 1
    parts = {
        k: pl.col("labels").str.extract(rf'(?:^|,){k}="([0-9]{{1,9}})"').cast(pl.Int64())
        for k in ("pid", "pp_rank", "tp_rank")
    }
    carried = metrics.filter(pl.col("labels").str.contains('pid="', literal=True))
    rows = carried.select(**parts).drop_nulls("pid").unique().sort("pp_rank", "tp_rank", "pid")
    found = [
        {"rank": (pp or 0) * tp_size + (tp or 0), "pid": pid}
        for pid, pp, tp in rows.select("pid", "pp_rank", "tp_rank").iter_rows()
    ]
    return found or None

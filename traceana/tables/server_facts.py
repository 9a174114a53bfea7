"""What a server is, from all that was recorded of it: the report's `server` object, key by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import polars as pl

from traceana.sources.losses import Loss, loss
from traceana.sources.manifest import Launch, Recording
from traceana.sources.metrics import label
from traceana.sources.secrets import allowed_env, mask_text, mask_value
from traceana.sources.server_info import effective_state, layer_split, model_shape
from traceana.sources.sidecar import plain
from traceana.tables.scheduler_log import LogClock
from traceana.tables.throughput import first_stage

__all__ = ["Evidence", "clients", "gpu_of_rank", "server_facts"]

_DEFAULTS: Mapping[str, object] = {
    "pp_size": 1, "tp_size": 1, "dp_size": 1, "pp_async_batch_depth": 0, "pp_max_micro_batch_size": None,
    "nnodes": 1, "base_gpu_id": 0, "gpu_id_step": 1, "disable_cuda_graph": False,
}  # fmt: skip
AUTO = "auto: max_running_requests // pp_size"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the files of one capture say. `arguments` are SGLang's options by name: absent is unknown, None is unset."""

    arguments: Mapping[str, object]
    info: Mapping[str, object]
    stages: pl.DataFrame
    decode: pl.DataFrame
    prefill: pl.DataFrame
    metrics: pl.DataFrame
    clock: LogClock
    launch: Launch | None = None
    recording: Recording | None = None
    config: Mapping[str, object] = field(default_factory=dict[str, object])
    model: Mapping[str, object] = field(default_factory=dict[str, object])

    def integer(self, name: str) -> int | None:
        """The option `name` as a number: as given, or SGLang's default where the options are known at all."""
        value = self.arguments.get(name, _DEFAULTS.get(name) if self.arguments else None)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def stage(self, name: str) -> list[object]:
        """The fact `name` of every stage that says it, in stage order."""
        return self.stages.get_column(name).drop_nulls().to_list() if name in self.stages.columns else []


def server_facts(seen: Evidence) -> tuple[dict[str, object], list[Loss]]:
    """All keys of the report's `server` that the files decide by themselves; None where nothing says it."""
    losses: list[Loss] = []
    state = effective_state(seen.info)
    pp_size, depth = seen.integer("pp_size"), seen.integer("pp_async_batch_depth")
    running = _max_running(seen, state, losses)
    cap, cap_source = _cap(seen, state, running)
    shape = model_shape(seen.config)
    env = seen.launch.env if seen.launch else {}
    partition = env.get("SGLANG_PP_LAYER_PARTITION") or seen.arguments.get("pp_layer_partition")
    layers, layers_source = layer_split(shape["layers"], pp_size, str(partition) if partition else None)
    if layers and not shape["layers"]:
        shape["layers"] = sum(layers)
    experts = {e for e in seen.stage("experts") if isinstance(e, int)}
    if shape["experts"] is None and len(experts) == 1 and seen.integer("ep_size") in (None, 1):
        shape["experts"] = experts.pop()
    listed = seen.model.get("architectures")
    names = seen.stage("architecture") or (cast("list[object]", listed) if isinstance(listed, list) else [])
    log_stages = 1 + max((int(r) for r in seen.stages.get_column("pp_rank")), default=-1) if seen.stages.height else 0
    if pp_size is not None and log_stages > pp_size:
        losses.append(
            loss("server_facts_conflict", "warning", 1, f"pp_size {pp_size}, but the log has {log_stages} stages")
        )
    lines = first_stage(seen.decode)
    steady = lines.filter(pl.col("phase") == "before") if lines.height else lines
    steady = steady if steady.height else lines
    facts: dict[str, object] = {
        "pp_size": pp_size,
        "tp_size": seen.integer("tp_size"),
        "dp_size": seen.integer("dp_size"),
        "async_depth": depth,
        "slots": None if pp_size is None or depth is None else pp_size + depth,
        "max_running_requests": running,
        "micro_batch_cap": cap,
        "cap_source": cap_source,
        "running_per_slot": _running(steady),
        "queue": _quantiles(steady, "queue") or _queue(seen),
        "kv": {
            "token_usage": _largest(steady, "token_usage"),
            "tokens": _largest(steady, "tokens"),
            "capacity": next(iter(seen.stage("capacity")), None) or plain(seen.info.get("max_total_num_tokens")),
        },
        "memory_by_rank": _memory(seen, state),
        "layers_by_rank": layers,
        "layers_source": layers_source,
        "cuda_graph": _graphs(seen),
        "chunked_prefill_size": next(iter(seen.stage("chunked_prefill_size")), None)
        or seen.arguments.get("chunked_prefill_size"),
        "context_length": next(iter(seen.stage("context_len")), None),
        "disable_overlap": seen.arguments.get("disable_overlap_schedule"),
        "attention_backend": seen.arguments.get("attention_backend"),
        "moe_backend": seen.arguments.get("moe_runner_backend"),
        "decode_log_interval": seen.integer("decode_log_interval"),
        "nnodes": seen.integer("nnodes"),
        "host": seen.arguments.get("host"),
        "hosts": list(seen.recording.hosts) or None if seen.recording else None,
        "gpu_name": next(iter(seen.stage("gpu_name")), None),
        "model": {
            "path": seen.arguments.get("model_path"),
            "architecture": str(names[0]) if names else None,
            **shape,
        },
        "versions": _versions(seen),
        "launch_command": _command(seen),
        "arguments": {k: mask_value(k, v) for k, v in sorted(seen.arguments.items())} or None,
        "environment": allowed_env(env) or None,
        "log_clock": {
            "resolution_ns": seen.clock.resolution_ns,
            "utc_offset_ns": seen.clock.offset_ns,
            "utc_offset_source": seen.clock.source,
        },
    }
    return facts, losses


def _max_running(seen: Evidence, state: Mapping[str, object], losses: list[Loss]) -> int | None:
    said: dict[str, int] = {}
    for where, value in (
        ("log", next(iter(seen.stage("max_running_requests")), None)),
        ("internal_states", state.get("effective_max_running_requests_per_dp")),
        ("server_info", seen.arguments.get("max_running_requests")),
    ):
        if isinstance(value, int) and not isinstance(value, bool):
            said[where] = value
    if "log" in said and said.get("internal_states", said["log"]) != said["log"]:
        losses.append(loss("server_facts_conflict", "warning", 1, f"max_running_requests: {said}"))
    return next(iter(said.values()), None)


def _cap(seen: Evidence, state: Mapping[str, object], running: int | None) -> tuple[int | None, str | None]:
    """The largest micro-batch of a slot, and who decided it. The rule divides by the stages, not by the slots."""
    asked = seen.integer("pp_max_micro_batch_size")
    pp_size = seen.integer("pp_size")
    auto = max(running // pp_size, 1) if running is not None and pp_size else None
    told = seen.recording.settings if seen.recording else {}
    real = told.get("pp_max_micro_batch_size", state.get("pp_max_micro_batch_size"))
    if isinstance(real, int) and not isinstance(real, bool):
        if real == asked:
            return real, "set"
        return real, AUTO if asked is None and real == auto else "set while the server ran"
    if asked is not None:
        return asked, "set"
    return (auto, AUTO) if auto is not None and seen.arguments else (None, None)


def _running(lines: pl.DataFrame) -> dict[str, object] | None:
    """Of one slot: `#running-req` counts the requests of the micro-batch that was there, never the server's."""
    summary = _quantiles(lines, "running")
    if summary is None:
        return None
    counts = lines.get_column("running").value_counts().sort("running")
    return {**summary, "histogram": [list(row) for row in counts.iter_rows()]}


def _quantiles(lines: pl.DataFrame, column: str) -> dict[str, object] | None:
    """min, p50 (a value that occurs) and max of a column of counts."""
    values = lines.get_column(column).drop_nulls() if lines.height else pl.Series([], dtype=pl.Int64())
    if not len(values):
        return None
    middle = values.quantile(0.5, interpolation="lower")
    return {"min": values.min(), "p50": None if middle is None else int(middle), "max": values.max()}


def _queue(seen: Evidence) -> dict[str, object] | None:
    """Length of the queue where no decode line tells it: the first stage's gauge, else its prefill lines, which are
    printed after they have taken from the queue."""
    gauge = seen.metrics.filter(
        pl.col("name") == "sglang:num_queue_reqs", label("pp_rank").fill_null("0") == "0", pl.col("value").is_finite()
    )
    counts = gauge.group_by("when").agg(pl.col("value").sum().cast(pl.Int64).alias("queue")).sort("when")
    return _quantiles(counts, "queue") or _quantiles(first_stage(seen.prefill), "queue")


def _largest(lines: pl.DataFrame, column: str) -> object:
    return lines.get_column(column).max() if lines.height else None


def _memory(seen: Evidence, state: Mapping[str, object]) -> list[dict[str, object]] | None:
    """GB of each rank as SGLang prints them (its GB are 2**30 bytes)."""
    tp_size = seen.integer("tp_size") or 1
    rows: list[dict[str, object]] = []
    for stage in seen.stages.iter_rows(named=True):
        kv = [stage[k] for k in ("k_gb", "v_gb", "kv_gb") if stage[k] is not None]
        row: dict[str, object] = {
            "rank": stage["pp_rank"] * tp_size + stage["tp_rank"],
            "pp_rank": stage["pp_rank"],
            "tp_rank": stage["tp_rank"],
            "weight_gb": stage["weight_gb"],
            "kv_gb": round(sum(kv), 6) if kv else None,
            "graph_gb": stage["graph_gb"],
            "available_gb": stage["available_gb"],
        }
        if any(v is not None for k, v in row.items() if k.endswith("_gb")):
            rows.append(row)
    used = plain(state.get("memory_usage"))
    if not rows and isinstance(used, dict):
        usage = cast("dict[str, object]", used)
        rows = [{"rank": 0, "pp_rank": 0, "tp_rank": 0, "weight_gb": usage.get("weight"), "kv_gb": usage.get("kvcache"),
                 "graph_gb": usage.get("graph"), "available_gb": None}]  # fmt: skip
    return rows or None


def _graphs(seen: Evidence) -> dict[str, object] | None:
    """Whether decode runs as CUDA graphs. The log tells which sizes were captured, the options which may be."""
    sizes = next((str(s) for s in seen.stage("decode_graph_sizes")), None)
    backend = next(iter(seen.stage("decode_graph_backend")), None)
    config = seen.info.get("cuda_graph_config")
    decode = cast("dict[str, object]", config).get("decode") if isinstance(config, dict) else None
    phase = cast("dict[str, object]", plain(decode)) if isinstance(decode, dict) else {}
    disabled = seen.arguments.get("disable_cuda_graph")
    captured = [int(s) for s in sizes.split(",") if s.strip()] if sizes is not None else None
    if captured is None and disabled is None and not phase:
        used = first_stage(seen.decode)
        graphed = used.get_column("cuda_graph").any() if used.height else None
        return {"enabled": graphed, "captured_sizes": None, "backend": None, "prefill": None} if used.height else None
    backend = backend or phase.get("backend")
    allowed = phase.get("bs")
    return {
        "enabled": captured is not None or (disabled is not True and backend not in (None, "disabled")),
        "captured_sizes": captured if captured is not None else None if disabled else allowed,
        "backend": backend,
        "prefill": bool(seen.stage("prefill_graph_backend")) if seen.stages.height else None,
    }


def _versions(seen: Evidence) -> dict[str, str] | None:
    versions = dict(seen.recording.versions) if seen.recording else {}
    if isinstance(version := seen.info.get("version"), str):
        versions["sglang"] = version
    if nccl := next(iter(seen.stage("nccl")), None):
        versions["nccl"] = str(nccl)
    return dict(sorted(versions.items())) or None


def _command(seen: Evidence) -> str | None:
    told = seen.info.get("launch_command")
    if isinstance(told, list):
        told = " ".join(str(word) for word in cast("list[object]", told))
    if isinstance(told, str) and told:
        return mask_text(told)
    if seen.launch and seen.launch.command:
        return mask_text(seen.launch.command)
    return mask_text(seen.recording.command) if seen.recording and seen.recording.command else None


def gpu_of_rank(seen: Evidence) -> dict[int, int] | None:
    """NVML index of every rank's GPU: as the recorder saw it, else as SGLang hands them out on one host; None where it
    cannot be known."""
    if seen.recording and seen.recording.gpus and len(seen.recording.hosts) <= 1:
        return dict(seen.recording.gpus)
    pp, tp = seen.integer("pp_size"), seen.integer("tp_size")
    base, step = seen.integer("base_gpu_id"), seen.integer("gpu_id_step")
    if pp is None or tp is None or base is None or step is None or seen.integer("nnodes") != 1 or pp * tp > 4096:
        return None
    gpus = {stage * tp + t: base + stage * tp + t * step for stage in range(pp) for t in range(tp)}
    visible = seen.launch.env.get("CUDA_VISIBLE_DEVICES") if seen.launch else None
    if visible is None:
        return gpus
    order = [int(g) for g in str(visible).split(",") if g.strip().isdigit()]
    return {r: order[g] for r, g in gpus.items()} if order and max(gpus.values()) < len(order) else None


def clients(
    requests: pl.DataFrame, steady_ns: tuple[int, int] | None, profile_start_ns: int | None
) -> dict[str, object] | None:
    """The load as clients saw it. Latencies are of requests answered in the steady window, else before the profile."""
    if not requests.height:
        return None
    good = requests.filter(pl.col("ok"))
    ended = pl.col("end_ns")
    calm, window = good, "all requests"
    if steady_ns is not None and (inside := good.filter(ended >= steady_ns[0], ended < steady_ns[1])).height:
        calm, window = inside, "answered in the steady window"
    elif profile_start_ns is not None and (before := good.filter(ended <= profile_start_ns)).height:
        calm, window = before, "answered before the profile"
    latency = calm.select((pl.col("end_ns") - pl.col("start_ns")).alias("ns")).get_column("ns")

    def quantile(q: float) -> int | None:
        value = latency.quantile(q, interpolation="lower")
        return None if value is None else int(value)

    return {
        "count": requests.height,
        "failed": requests.height - good.height,
        "concurrency": _concurrency(requests),
        "latency_ns_p50": quantile(0.5),
        "latency_ns_p99": quantile(0.99),
        "latency_of": window,
        "input_tokens": _quantiles(good, "input_tokens"),
        "output_tokens": _quantiles(good, "output_tokens"),
    }


def _concurrency(requests: pl.DataFrame) -> int:
    """Most requests open at once; one that ends when another starts is not open with it."""
    starts, ends = (np.sort(requests.get_column(c).to_numpy()) for c in ("start_ns", "end_ns"))
    return int((np.arange(1, len(starts) + 1) - np.searchsorted(ends, starts, side="right")).max())


def unknown(facts: Mapping[str, object]) -> Sequence[str]:
    """Names of the facts that nothing says."""
    return [k for k, v in facts.items() if v is None]

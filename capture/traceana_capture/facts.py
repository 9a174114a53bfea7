"""What can be known of the server from this host: its processes, versions, environment, GPUs, and its own answers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceana_capture.errors import CaptureError
from traceana_capture.files import write_json
from traceana_capture.gpu import Nvml
from traceana_capture.http import HttpServer
from traceana_capture.processes import (
    Scheduler,
    command_of,
    environment_of,
    is_local,
    listening_pid,
    schedulers,
    torch_version,
)
from traceana_capture.secrets import allowed_environment, mask_command, mask_value
from traceana_capture.server import RankKey, ServerInfo

__all__ = [
    "LocalServer",
    "command_row",
    "look_at",
    "profile_v2",
    "python_version",
    "rank_rows",
    "save_answers",
    "save_model_config",
    "server_row",
]

_ANSWERS = {"server_info": "/server_info", "model_info": "/model_info", "loads": "/v1/loads"}
_CHANGING = ("server_info", "loads")  # worth keeping again at the end
_LARGEST_CONFIG = 4 << 20


@dataclass(frozen=True)
class LocalServer:
    """The server's processes where they are visible here; everything is empty where the server is elsewhere."""

    pid: int | None = None
    schedulers: tuple[Scheduler, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    command: tuple[str, ...] = ()
    torch: str | None = None


def look_at(server: HttpServer) -> LocalServer:
    """The processes behind a server on this host."""
    pid = listening_pid(server.port) if is_local(server.host) else None
    if pid is None:
        return LocalServer()
    found = schedulers(pid)
    versions = (torch_version(s.pid) for s in found)
    torch = next((v for v in versions if v), None) or torch_version(pid)
    return LocalServer(pid, tuple(found), environment_of(pid), tuple(command_of(pid)), torch)


def profile_v2(local: LocalServer) -> bool:
    """Whether SGLANG_PROFILE_V2 is on: its scheduler then dies of a plain /start_profile."""
    return local.environment.get("SGLANG_PROFILE_V2", "").strip().lower() in ("1", "true", "yes", "on")


def save_answers(server: HttpServer, folder: Path, suffix: str = "") -> None:
    """Keep /server_info, /model_info and /v1/loads as the server gives them, secrets masked; with a `suffix` only those
    that can have changed."""
    for name, path in _ANSWERS.items():
        if suffix and name not in _CHANGING:
            continue
        try:
            document = server.get(path).json()
        except CaptureError:
            continue
        if isinstance(document, dict):
            write_json(folder / f"{name}{suffix}.json", mask_value("", document))


def save_model_config(info: ServerInfo, local: LocalServer, folder: Path) -> None:
    """Keep the model's config.json, secrets masked, where the server's files can be read here: it holds the number of
    layers, which no answer of the server does."""
    for path in _model_configs(info.model_path, local):
        with contextlib.suppress(OSError, ValueError):
            if path.stat().st_size <= _LARGEST_CONFIG:
                document = json.loads(path.read_bytes())
                if isinstance(document, dict):
                    write_json(folder / "config.json", mask_value("", document))
                    return


def _model_configs(model: str | None, local: LocalServer) -> Iterator[Path]:
    """Where it can lie: in the folder that the server was given, or in its cache of the model hub."""
    if not model or local.pid is None:
        return
    process, env = Path(f"/proc/{local.pid}"), local.environment
    root = process / "root"
    yield (root / model.lstrip("/") if os.path.isabs(model) else process / "cwd" / model) / "config.json"
    home = env.get("HF_HOME") or os.path.join(env.get("HOME", "/root"), ".cache/huggingface")
    hub = Path(env.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    snapshots = root / str(hub / f"models--{model.replace('/', '--')}" / "snapshots").lstrip("/")
    yield from sorted(snapshots.glob("*/config.json"), reverse=True)


def rank_rows(
    keys: tuple[RankKey, ...], info: ServerInfo, local: LocalServer, nvml: Nvml | None
) -> dict[int, dict[str, Any]]:
    """One row per rank for the manifest, file not yet known. GPU and process only where they can be seen here; without
    NVML's word the GPU index is the one the server assigns (`gpu_source` says which)."""
    devices = nvml.devices() if nvml else []
    rows: dict[int, dict[str, Any]] = {}
    for key in keys:
        process = next(
            (s for s in local.schedulers if (s.pp, s.tp) == (key.pp, key.tp) and (key.dp is None or s.dp == key.dp)),
            None,
        )
        row: dict[str, Any] = {
            "rank": key.rank,
            "pp_rank": key.pp,
            "tp_rank": key.tp,
            "dp_rank": process.dp if process and process.dp is not None else key.dp,
            "ep_rank": process.ep if process else None,
            "host": socket.gethostname() if process else None,
            "pid": process.pid if process else None,
            "gpu": None,
            "gpu_uuid": None,
            "gpu_source": None,
        }
        if process is not None:
            device = next((d for d in devices if process.pid in d["pids"]), None)
            source = "nvml"
            if device is None and devices and info.nnodes == 1 and "CUDA_VISIBLE_DEVICES" not in local.environment:
                index = info.base_gpu_id + key.rank * info.gpu_id_step
                device, source = next((d for d in devices if d["gpu"] == index), None), "server_args"
            if device is not None:
                row.update(gpu=device["gpu"], gpu_uuid=device["uuid"], gpu_source=source)
        rows[key.rank] = row
    return rows


def server_row(server: HttpServer, info: ServerInfo, local: LocalServer, *, started: bool) -> dict[str, Any]:
    """The manifest's `server`: address, layout, limits, and the environment that explains its speed."""
    return {
        "url": server.url,
        "pid": local.pid,
        "started_by_capture": started,
        "environment": allowed_environment(local.environment),
        "pp_size": info.pp_size,
        "tp_size": info.tp_size,
        "dp_size": info.dp_size,
        "ep_size": info.ep_size,
        "nnodes": info.nnodes,
        "pp_async_batch_depth": info.async_depth,
        "slots": info.slots,
        "max_running_requests": info.max_running_requests,
        "micro_batch_cap": info.micro_batch_cap,
        "cap_source": info.cap_source,
        "skip_tokenizer_init": info.skip_tokenizer_init,
    }


def command_row(local: LocalServer, given: tuple[str, ...]) -> list[str]:
    """The command that started the server, secrets masked: as given after `--`, else as its process shows it."""
    return mask_command(given or local.command)


def python_version(local: LocalServer) -> str | None:
    """The Python that the server runs, from its executable's name; None where it does not say."""
    try:
        name = os.path.basename(os.readlink(f"/proc/{local.pid}/exe")) if local.pid else ""
    except OSError:
        return None
    return name.removeprefix("python") if name.startswith("python3") and name != "python3" else None

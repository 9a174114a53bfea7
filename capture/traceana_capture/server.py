"""What a running server says about itself: its layout in ranks, its slots, its limits, and whether it is ready."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from traceana_capture.errors import CaptureError, Unreachable
from traceana_capture.http import HttpServer
from traceana_capture.versions import supports

__all__ = ["RankKey", "ServerInfo", "discover", "parse_ranks", "vocabulary", "wait_ready"]


@dataclass(frozen=True, order=True)
class RankKey:
    """A rank's place: `rank` is global (`pp * tp_size + tp` within a replica), `dp` a replica or None."""

    rank: int
    pp: int
    tp: int
    dp: int | None = None


@dataclass(frozen=True)
class ServerInfo:
    """The facts of /server_info that a capture needs; `raw` is the whole document, secrets included."""

    raw: Mapping[str, Any]
    is_sglang: bool
    version: str | None
    pp_size: int
    tp_size: int
    dp_size: int
    ep_size: int
    nnodes: int
    async_depth: int
    dp_attention: bool
    max_running_requests: int | None
    micro_batch_cap: int | None
    cap_source: str | None
    skip_tokenizer_init: bool
    enable_metrics: bool
    base_gpu_id: int
    gpu_id_step: int
    model_path: str | None

    @property
    def slots(self) -> int:
        """Slots of the scheduler's loop: pipeline size plus asynchronous depth."""
        return self.pp_size + self.async_depth

    @property
    def ranks(self) -> tuple[RankKey, ...]:
        """Every rank that writes a trace. Replicas without data-parallel attention come one after the other."""
        replicas = self.dp_size if self.dp_size > 1 and not self.dp_attention else 1
        size = self.pp_size * self.tp_size
        return tuple(
            RankKey(replica * size + pp * self.tp_size + tp, pp, tp, replica if replicas > 1 else None)
            for replica in range(replicas)
            for pp in range(self.pp_size)
            for tp in range(self.tp_size)
        )

    def supports(self, what: str) -> bool:
        """See `versions.supports`; never for a server that is not SGLang."""
        return self.is_sglang and supports(self.version, what)


def discover(server: HttpServer) -> ServerInfo:
    """Read /server_info, or what older SGLang versions call it. A server without either is taken as OpenAI-compatible,
    with one rank. Raises Unreachable, or CaptureError for an answer that is no server's."""
    for path in ("/server_info", "/get_server_info"):
        reply = server.get(path)
        document = reply.json() if reply.ok else None
        if isinstance(document, dict):
            return _from_document(cast("dict[str, Any]", document))
        if reply.status in (401, 403):
            raise CaptureError("the server wants a key", where=server.url + path, hint="set TRACEANA_API_KEY")
    reply = server.get("/v1/models")
    if not reply.ok or not isinstance(reply.json(), dict):
        raise CaptureError(
            f"no inference server answers (HTTP {reply.status} for /server_info and /v1/models)",
            where=server.url,
            hint="--url with the server's own host and port, not a router's",
        )
    return _from_document({}, is_sglang=False)


def _from_document(document: Mapping[str, Any], *, is_sglang: bool = True) -> ServerInfo:
    states = document.get("internal_states")
    state: Mapping[str, Any] = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    tp_size, pp_size = _size(document, "tp_size"), _size(document, "pp_size")
    limit = _count(state, "effective_max_running_requests_per_dp") or _count(document, "max_running_requests")
    cap, source = _count(state, "pp_max_micro_batch_size"), "internal_states"
    if cap is None:
        cap, source = _count(document, "pp_max_micro_batch_size"), "server_args"
    if cap is None and limit is not None:
        cap, source = max(limit // pp_size, 1), "max_running_requests // pp_size"
    return ServerInfo(
        raw=document,
        is_sglang=is_sglang,
        version=str(document["version"]) if document.get("version") else None,
        pp_size=pp_size,
        tp_size=tp_size,
        dp_size=_size(document, "dp_size"),
        ep_size=_size(document, "ep_size"),
        nnodes=_size(document, "nnodes"),
        async_depth=_count(document, "pp_async_batch_depth") or 0,
        dp_attention=bool(document.get("enable_dp_attention")),
        max_running_requests=limit,
        micro_batch_cap=cap,
        cap_source=source if cap is not None else None,
        skip_tokenizer_init=bool(document.get("skip_tokenizer_init")),
        enable_metrics=bool(document.get("enable_metrics")),
        base_gpu_id=_count(document, "base_gpu_id") or 0,
        gpu_id_step=_size(document, "gpu_id_step"),
        model_path=str(document["model_path"]) if document.get("model_path") else None,
    )


def vocabulary(info: ServerInfo) -> int:
    """How many token ids a made-up prompt may use: the model's vocabulary where its config.json is readable here, else
    a thousand, which every model has."""
    try:
        config: Any = json.loads((Path(info.model_path or "") / "config.json").read_text())
        size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
        return size if isinstance(size, int) and size > 16 else 1000
    except (OSError, ValueError, AttributeError):
        return 1000


def wait_ready(
    server: HttpServer, *, timeout_s: float, died: Callable[[], str | None], pause: Callable[[float], None] = time.sleep
) -> None:
    """Wait until the server is healthy and tells its facts. `died` says why it never will, or None."""
    end = time.monotonic() + timeout_s
    last = "nothing listens"
    while time.monotonic() < end:
        reason = died()
        if reason is not None:
            raise CaptureError(
                "the server ended before it was ready", where=reason, hint="see server/server.log in the capture folder"
            )
        try:
            health = server.get("/health", timeout_s=5.0)
            facts = ("/server_info", "/get_server_info", "/v1/models") if health.ok else ()
            if any(server.get(path, timeout_s=5.0).ok for path in facts):
                return
            last = f"/health says {health.status}"
        except Unreachable as error:
            last = error.what
        pause(0.3)
    raise CaptureError(
        f"the server was not ready after {timeout_s:.0f} s ({last})",
        where=server.url,
        hint="--ready-timeout SECONDS, or see server/server.log",
    )


def parse_ranks(text: str | None, info: ServerInfo) -> tuple[RankKey, ...]:
    """`0-7`, `0,2,5-6` or None for all. Raises CaptureError for ranks that the server does not have."""
    every = {k.rank: k for k in info.ranks}
    if text is None or text.strip().lower() == "all":
        return tuple(every.values())
    wanted: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (last and int(last) < int(first)):
            raise CaptureError(
                "not a list of ranks", where=f"--ranks {text}", hint="for instance --ranks 0-7 or --ranks 0,4"
            )
        low, high = int(first), int(last or first)
        if high - low > 1_000_000:
            raise CaptureError(
                "not a list of ranks", where=f"--ranks {text}", hint="for instance --ranks 0-7 or --ranks 0,4"
            )
        wanted |= set(range(low, high + 1))
    absent = sorted(wanted - set(every))
    if absent:
        shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        raise CaptureError(
            f"the server has {len(every)} rank{'s' if len(every) > 1 else ''}, not {shown}",
            where=f"--ranks {text}",
            hint=f"--ranks 0-{len(every) - 1} takes them all",
        )
    return tuple(every[r] for r in sorted(wanted))


def _count(document: Mapping[str, Any], name: str) -> int | None:
    value = document.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _size(document: Mapping[str, Any], name: str) -> int:
    return max(_count(document, name) or 1, 1)

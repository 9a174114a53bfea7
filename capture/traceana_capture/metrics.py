"""Counters out of a server's /metrics text: tokens by stage, requests, latency sums."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

__all__ = ["counters", "latency_ns", "tokens"]

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def counters(text: str, name: str) -> list[tuple[Mapping[str, str], float]]:
    """Every sample of `name`: its labels and value. Values that are no number are left out."""
    found: list[tuple[Mapping[str, str], float]] = []
    for match in _SAMPLE.finditer(text):
        if match[1] != name:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if math.isfinite(value):
            found.append((dict(_LABEL.findall(match[2] or "")), value))
    return found


def tokens(text: str) -> dict[str, int]:
    """Tokens counted so far, of the whole server: `decode` and `prefill`, and `decode_pp<N>` for each stage.

    Every rank of a replica counts the same tokens, so one rank (stage 0, tensor rank 0) stands for all. `decode` is
    live in SGLang's `realtime_tokens_total`; elsewhere it counts requests when they finish, and `live` is then 0.
    """
    out: dict[str, int] = {}
    live = counters(text, "sglang:realtime_tokens_total")
    for labels, value in live:
        if labels.get("tp_rank", "0") != "0":
            continue
        stage, mode = labels.get("pp_rank", "0"), labels.get("mode", "")
        kind = "decode" if mode == "decode" else "prefill" if mode == "prefill_compute" else None
        if kind is None:
            continue
        if kind == "decode":
            out[f"decode_pp{stage}"] = out.get(f"decode_pp{stage}", 0) + int(value)
        if stage == "0":
            out[kind] = out.get(kind, 0) + int(value)
    if live:
        return {"decode": 0, **out, "live": 1}
    for name in ("sglang:generation_tokens_total", "vllm:generation_tokens_total"):
        found = counters(text, name)
        if found:
            return {"decode": int(sum(v for _, v in found)), "live": 0}
    return {}


def latency_ns(before: str, after: str) -> int | None:
    """Mean time of the requests that finished between two dumps; None where none did or it is not counted."""
    for name in ("sglang:e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"):
        total = [sum(v for _, v in counters(t, f"{name}_sum")) for t in (before, after)]
        count = [sum(v for _, v in counters(t, f"{name}_count")) for t in (before, after)]
        if count[1] > count[0]:
            return round((total[1] - total[0]) / (count[1] - count[0]) * 1e9)
    return None

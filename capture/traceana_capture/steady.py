"""Waiting for a steady load: a profile of a server that fills up or runs dry explains nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from traceana_capture.errors import CaptureError
from traceana_capture.http import HttpServer
from traceana_capture.load import Load
from traceana_capture.metrics import tokens

__all__ = ["mid_request", "wait_steady"]

_SPREAD = 0.25  # rates of three seconds within a quarter of their mean
_SAMPLES = 3
_PAUSE_S = 1.0
_EARLY, _LATE = 0.1, 0.4  # of an answer


def wait_steady(
    server: HttpServer,
    load: Load | None,
    *,
    timeout_s: float,
    pause: Callable[[float], None],
    died: Callable[[], str | None],
    period_s: float = _PAUSE_S,
) -> dict[str, Any]:
    """Wait. With a load of its own: until every client has had two answers. With other traffic: until the decode rate
    of three seconds is even. Returns {steady, seconds, why}. Raises CaptureError without traffic or answers."""
    begin = time.monotonic()
    rates: list[float] = []
    last: tuple[float, int] | None = None
    counted = False
    while (spent := time.monotonic() - begin) < timeout_s:
        if (reason := died()) is not None:
            raise CaptureError("the server ended before the profile", where=reason, hint="see server/server.log")
        if load is not None:
            done, failed = [r for r in load.snapshot() if r.ok], load.failures()
            if len(done) >= 2 * load.spec.concurrency:
                return {"steady": True, "seconds": round(spent, 1), "why": f"{len(done)} requests answered"}
            if not done and len(failed) >= 3:
                raise CaptureError(
                    f"the load's requests fail ({failed[-1].error})",
                    where=server.url,
                    hint="does the server take input_ids? --load ...,api=openai uses /v1/completions",
                )
            if load.done:
                raise CaptureError(
                    "the load ended before it was steady",
                    where=f"requests={load.spec.requests}",
                    hint="leave `requests` out, or make it several times the concurrency",
                )
        else:
            reply = server.get("/metrics")
            count = tokens(reply.text) if reply.ok else {}
            if "decode" in count and count.get("live"):
                counted = True
                now = time.monotonic()
                if last is not None:
                    rates.append((count["decode"] - last[1]) / (now - last[0]))
                last = (now, count["decode"])
                recent = rates[-_SAMPLES:]
                mean = sum(recent) / len(recent) if recent else 0.0
                if len(recent) == _SAMPLES and min(recent) > 0 and max(recent) - min(recent) <= 2 * _SPREAD * mean:
                    return {"steady": True, "seconds": round(spent, 1), "why": f"{mean:.0f} decode tokens/s"}
            elif (running := _running(server)) is not None and spent > _SAMPLES * period_s and running > 0:
                return {
                    "steady": False,
                    "seconds": round(spent, 1),
                    "why": "the server counts no tokens (--enable-metrics); it runs requests",
                }
        pause(period_s if load is None else min(period_s, 0.1))
    if load is None and (counted and not any(rates[-10:])):
        raise CaptureError(
            "the server has no traffic", where=server.url, hint="--load concurrency=32,input=256,output=256 makes some"
        )
    if load is not None and not any(r.ok for r in load.snapshot()):
        raise CaptureError(
            f"no request was answered in {timeout_s:.0f} s",
            where=server.url,
            hint="--steady-timeout, or fewer output tokens",
        )
    return {"steady": False, "seconds": round(timeout_s, 1), "why": f"not steady after {timeout_s:.0f} s"}


def mid_request(load: Load, cycle: int | None, *, pause: Callable[[float], None]) -> bool:
    """Wait until the streaming client's request is between a tenth and two fifths of its answer, for three requests'
    lives at most: clients that march in step are then all decoding, and its tokens cover the profile. Whether it is."""
    end = time.monotonic() + min((cycle or 10**9) * 3e-9, 60.0)
    while time.monotonic() < end:
        share = load.streamed()
        if share is not None and _EARLY <= share <= _LATE:
            return True
        pause(0.005)
    return False


def _running(server: HttpServer) -> int | None:
    document = server.get("/v1/loads").json()
    loads: Any = document.get("loads") if isinstance(document, dict) else None
    if not isinstance(loads, list):
        return None
    return sum(int(entry.get("num_running_reqs") or 0) for entry in loads if isinstance(entry, dict))

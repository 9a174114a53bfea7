"""Throughput and latency without the profile, in windows of whole request cycles, and the counters while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceana_capture.cost import loop_times, quantile, usual_loop
from traceana_capture.errors import Unreachable
from traceana_capture.files import atomic_write
from traceana_capture.http import HttpServer
from traceana_capture.load import Load, Request
from traceana_capture.metrics import latency_ns, tokens

__all__ = ["Poller", "client_figures", "cycle_ns", "measure"]


def cycle_ns(load: Load | None, before: str | None, after: str | None) -> int | None:
    """How long a request takes: of the load's last requests, else by the server's own counters between two dumps."""
    done = [r for r in load.snapshot() if r.ok][-64:] if load else []
    if done:
        return quantile([r.end_ns - r.start_ns for r in done], 0.5)
    return latency_ns(before, after) if before and after else None


def measure(
    server: HttpServer,
    name: str,
    seconds: float,
    folder: Path | None,
    *,
    load: Load | None,
    pause: Callable[[float], None],
) -> dict[str, Any]:
    """One window without a profiler: counters at its start and end (the dumps go to `folder`/metrics_<name>_*.txt), the
    requests that ended in it, and its times as the server's log would print them on this host."""
    start_dump, start_ns = _dump(server), time.time_ns()
    pause(seconds)
    end_dump, end_ns = _dump(server), time.time_ns()
    window: dict[str, Any] = {
        "name": name,
        "start_ns": start_ns,
        "end_ns": end_ns,
        "log_time": [_local(start_ns), _local(end_ns)],
    }
    if folder is not None:
        for moment, dump in (("start", start_dump), ("end", end_dump)):
            if dump is not None:
                atomic_write(folder / f"metrics_{name}_{moment}.txt", dump.encode())
    if start_dump is not None and end_dump is not None:
        first, last = tokens(start_dump), tokens(end_dump)
        window["source"] = "realtime_tokens_total" if last.get("live") else "generation_tokens_total"
        for kind in ("decode", "prefill"):
            if kind in first and kind in last:
                window[f"{kind}_tokens"] = last[kind] - first[kind]
                window[f"{kind}_tokens_per_s"] = round((last[kind] - first[kind]) * 1e9 / (end_ns - start_ns), 2)
        mean = latency_ns(start_dump, end_dump)
        if mean is not None:
            window["server_latency_ns_mean"] = mean
    if load is not None:
        window.update(client_figures(load.snapshot(), start_ns, end_ns))
        window["loop_ns"] = usual_loop(loop_times(load.streams(), start_ns, end_ns))
    return window


def client_figures(requests: Sequence[Request], start_ns: int, end_ns: int) -> dict[str, Any]:
    """What the clients saw between two moments: requests ended, their latencies, and output tokens per second (those
    of a request spread evenly over its life, so requests still open at the end count only once they have ended)."""
    good = [r for r in requests if r.ok]
    ended = [r.end_ns - r.start_ns for r in good if start_ns <= r.end_ns < end_ns]
    out = 0
    for r in good:
        inside = min(end_ns, r.end_ns) - max(start_ns, r.start_ns)
        if inside > 0:
            out += (r.output_tokens or 0) * inside * 1000 // max(r.end_ns - r.start_ns, 1)
    return {
        "requests_ended": len(ended),
        "requests_failed": sum(not r.ok and start_ns <= r.end_ns < end_ns for r in requests),
        "latency_ns": {f"p{int(q * 100)}": quantile(ended, q) for q in (0.5, 0.9, 0.99)},
        "client_tokens_per_s": round(out / 1000 * 1e9 / (end_ns - start_ns), 2),
    }


@dataclass
class Poller:
    """Token counters read again and again while a profile runs. `series` is (epoch ns, decode tokens by stage).

    Making a /metrics page holds up the process that also sends tokens: `period_s` keeps it rare where a streaming
    client tells more.
    """

    server: HttpServer
    series: list[tuple[int, dict[str, int]]]
    period_s: float = 0.2
    lost: str | None = None
    _due: float = 0.0

    def poll(self) -> bool:
        """Read once, if it is time to. False, and `lost` says why, once the server no longer answers."""
        now = time.monotonic()
        if now < self._due:
            return self.lost is None
        self._due = now + self.period_s
        try:
            reply = self.server.get("/metrics", timeout_s=10.0)
        except Unreachable as error:
            self.lost = error.what
            return False
        if reply.ok:
            self.series.append((time.time_ns(), tokens(reply.text)))
        return True

    def poll_now(self) -> bool:
        """Read once, whatever the pace."""
        self._due = 0.0
        return self.poll()

    def moves(self) -> bool:
        """Whether tokens were counted over the last polls; True where the server counts none."""
        values = {v.get("decode") for _, v in self.series[-40:]}
        return len(values) != 1 or None in values

    def write(self, path: Path) -> None:
        """The series as CSV: epoch_ns, one column per stage. Nothing where the server counts nothing."""
        names = sorted({n for _, values in self.series for n in values if n.startswith("decode_pp")})
        if not names:
            return
        rows = [",".join([str(at), *(str(values.get(n, "")) for n in names)]) for at, values in self.series]
        atomic_write(path, ("\n".join([",".join(["epoch_ns", *names]), *rows]) + "\n").encode())


def _dump(server: HttpServer) -> str | None:
    reply = server.get("/metrics", timeout_s=30.0)
    return reply.text if reply.ok else None


def _local(at_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ns // 10**9)) + f".{at_ns // 10**6 % 1000:03d}"

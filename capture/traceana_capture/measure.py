"""Throughput and latency outside and inside the profile: windows of whole request cycles, and what profiling costs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceana_capture.errors import Unreachable
from traceana_capture.http import HttpServer
from traceana_capture.load import Load, Request
from traceana_capture.metrics import latency_ns, tokens

__all__ = ["Poller", "cycle_ns", "disturbance", "loop_times", "measure", "quantile", "recording_span", "usual_loop"]

_STALL = 4  # times the usual step: longer means that the server stood still
_LEAST_STALL_NS = 50_000_000
_LEAST_LOOPS = 10


def quantile(values: Sequence[int], share: float) -> int | None:
    """The value at `share` of the sorted values (the nearest rank above); None where there is none."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else None


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
                (folder / f"metrics_{name}_{moment}.txt").write_text(dump)
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


def loop_times(requests: Sequence[Request], start_ns: int, end_ns: int) -> list[int]:
    """Time from a token of the streaming client to the next, both between the two moments: the loop over all slots."""
    out: list[int] = []
    for r in requests:
        stamps = [t for t in r.token_ns if start_ns <= t < end_ns]
        out += [b - a for a, b in itertools.pairwise(stamps)]
    return out


def usual_loop(times: Sequence[int]) -> int | None:
    """Mean loop time without the long ones, four times the mean and more. A median would be fooled by tokens that an
    overloaded server sends in bursts. None for fewer than ten."""
    if len(times) < _LEAST_LOOPS:
        return None
    mean = sum(times) // len(times)
    kept = [t for t in times if t <= _STALL * mean]
    return sum(kept) // len(kept)


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
        path.write_text("\n".join([",".join(["epoch_ns", *names]), *rows]) + "\n")


def recording_span(stamps: Sequence[int], start_ns: int, end_ns: int) -> tuple[int, int, int] | None:
    """(first, last, stall): the moments of progress between which the profiler recorded, and how long the server then
    stood still to export. The longest silence after the start is taken for the export, if it is one at all (four usual
    steps and 50 ms); a silence that begins with the profile (its start-up) counts as recording."""
    inside = [t for t in stamps if start_ns <= t <= end_ns]
    if len(inside) < 3:
        return None
    gaps = [(b - a, i) for i, (a, b) in enumerate(itertools.pairwise(inside))]
    usual = quantile([g for g, _ in gaps], 0.5) or 0
    longest, at = max(gaps[1:], default=(0, 0))
    if longest < max(_STALL * usual, _LEAST_STALL_NS):
        return inside[0], inside[-1], 0
    return inside[0], inside[at], longest


def disturbance(
    windows: Sequence[dict[str, Any]],
    start_ns: int,
    end_ns: int,
    *,
    load: Load | None,
    series: Sequence[tuple[int, dict[str, int]]],
) -> dict[str, Any]:
    """Throughput inside the profile over throughput outside it, and what it rests on.

    With a streaming client, mean loop times are compared, long ones (a prefill, a stall) left out on both sides;
    without, the decode counters. Fewer than ten loops tell nothing. `whole` counts everything from the request to the
    last file, the stall of the export included; `lasting` is the loop time before over that after the profile. Keys
    whose facts are missing are None.
    """
    streams = load.streams() if load else []
    before = [w for w in windows if str(w["name"]).startswith("steady")]
    rates = [w["decode_tokens_per_s"] for w in before if w.get("decode_tokens_per_s")]
    outside = round(sum(rates) / len(rates), 2) if rates else None
    out: dict[str, Any] = {
        "outside_tokens_per_s": outside,
        "inside_tokens_per_s": None,
        "disturbance": None,
        "source": None,
    }
    later = next((w["loop_ns"] for w in windows if w["name"] == "after" and w.get("loop_ns")), None)
    earlier = [w["loop_ns"] for w in before if w.get("loop_ns")]
    if later and earlier:  # what stays after the profile: CUPTI is not unloaded
        out["lasting"] = round(sum(earlier) / len(earlier) / later, 4)
    polled = [(t, v["decode"]) for t, v in series if v.get("live")]
    if len(polled) > 1 and polled[-1][0] > polled[0][0]:
        out["whole_tokens_per_s"] = round((polled[-1][1] - polled[0][1]) * 1e9 / (polled[-1][0] - polled[0][0]), 2)
    # Only the request that streamed when the profile began: the time between two requests is no stall.
    present = [r for r in streams if r.token_ns and r.token_ns[0] < start_ns < r.token_ns[-1]]
    span = recording_span(present[-1].token_ns, start_ns, end_ns) if present else None
    if span is not None and before:
        first, last, stall = span
        still = loop_times(streams, before[0]["start_ns"], before[-1]["end_ns"])
        moved = loop_times(present[-1:], first, last + 1)
        usual, inside = usual_loop(still), usual_loop(moved)
        if usual and inside:
            out.update(
                source="token times of one streaming client",
                disturbance=round(usual / inside, 4),
                inside_tokens_per_s=round(outside * usual / inside, 2) if outside else None,
                loop_ns={"outside": usual, "inside": inside, "inside_count": len(moved)},
                recorded_ns=last - first,
                stall_ns=stall,
            )
            return out
    progress = [a for a, b in zip(polled, [(0, -1), *polled], strict=False) if a[1] != b[1]]
    span = recording_span([t for t, _ in progress if t >= start_ns], start_ns, end_ns)
    if span is not None:
        first, last, stall = span
        counted = dict(progress)
        if last > first:
            inside_rate = (counted[last] - counted[first]) * 1e9 / (last - first)
            out.update(
                source="realtime_tokens_total, polled",
                inside_tokens_per_s=round(inside_rate, 2),
                disturbance=round(inside_rate / outside, 4) if outside else None,
                recorded_ns=last - first,
                stall_ns=stall,
            )
    return out


def _dump(server: HttpServer) -> str | None:
    reply = server.get("/metrics", timeout_s=30.0)
    return reply.text if reply.ok else None


def _local(at_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ns // 10**9)) + f".{at_ns // 10**6 % 1000:03d}"

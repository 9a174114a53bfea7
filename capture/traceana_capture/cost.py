"""What a profile costs: the pace while it records against the pace without it, and how long the server stands still.

Like is compared with like: loops of one streaming client (from one of its tokens to the next: every slot once), without
the long ones (a prefill, a stall) by the same limit on both sides. Starting and exporting are stretches of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from traceana_capture.load import Load, Request

__all__ = ["Span", "disturbance", "loop_times", "quantile", "recording_span", "usual_loop"]

_STALL = 4  # times the mean loop: longer is a prefill or a standstill
_LEAST_STALL_NS = 50_000_000
_LEAST_LOOPS, _LEAST_INSIDE = 10, 5
_STARTING = 4  # loops after the request, in which the ranks start one after the other


class Span:
    """Moments of progress during a profile: `first` to `last` while it recorded, the `start` loops of them in which
    the ranks started, and the `stall_ns` that the server then stood still to export, all stages together."""

    def __init__(self, start: Sequence[int], recorded: Sequence[int], stall_ns: int) -> None:
        self.start = start
        self.recorded = recorded
        self.stall_ns = stall_ns

    @property
    def first(self) -> int:
        return self.start[0]

    @property
    def last(self) -> int:
        return self.recorded[-1]


def quantile(values: Sequence[int], share: float) -> int | None:
    """The value at `share` of the sorted values (the nearest rank above); None where there is none."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else None


def loop_times(requests: Sequence[Request], start_ns: int, end_ns: int) -> list[int]:
    """Time from a token of the streaming client to the next, both between the two moments: the loop over all slots."""
    out: list[int] = []
    for r in requests:
        out += _gaps([t for t in r.token_ns if start_ns <= t < end_ns])
    return out


def usual_loop(times: Sequence[int], limit_ns: int | None = None) -> int | None:
    """Mean of the loop times of at most `limit_ns`, by default four times their mean. A median would be fooled by
    tokens that an overloaded server sends in bursts. None for too few (ten; five under a given limit)."""
    if len(times) < (_LEAST_LOOPS if limit_ns is None else _LEAST_INSIDE):
        return None
    kept = [t for t in times if t <= (limit_ns or _limit(times))]
    return sum(kept) // len(kept) if kept else None


def recording_span(stamps: Sequence[int], start_ns: int, end_ns: int) -> Span | None:
    """Where the recording ended and the exports began: at the first silence of at least half the longest one, if that
    is one at all (four usual steps and 50 ms). Each stage's export is one; the stall is the sum of what they are longer
    than a usual step. A silence that begins with the profile is its start."""
    inside = [t for t in stamps if start_ns <= t <= end_ns]
    if len(inside) < 3:
        return None
    gaps = _gaps(inside)
    usual = quantile(gaps, 0.5) or 0
    least = max(_STALL * usual, _LEAST_STALL_NS)
    longest = max(gaps[1:])
    end, stall = len(inside) - 1, 0
    if longest >= least:
        end = next(i for i, gap in enumerate(gaps) if i > 0 and gap >= max(longest // 2, least))
        stall = sum(gap - usual for gap in gaps[end:] if gap >= least)
    begin = min(_STARTING, end)
    return Span(inside[: begin + 1], inside[begin : end + 1], stall)


def disturbance(
    windows: Sequence[dict[str, Any]],
    start_ns: int,
    end_ns: int,
    *,
    load: Load | None,
    series: Sequence[tuple[int, dict[str, int]]],
    logged: Sequence[float] = (),
) -> dict[str, Any]:
    """Throughput while the profile recorded over throughput without it, and what that rests on.

    `outside_tokens_per_s` is the counters' mean over the windows, prefills included. `outside_decode_tokens_per_s` is
    decode alone: the mean of `logged` (the server's own log, lines without a prefill between), else the counters
    with the streaming client's long loops taken out. `disturbance` compares the usual loop without the profile
    with the usual loop while it recorded, `start_pause_ns` is what the first loops took more than that, `stall_ns` what
    the exports took; without a streaming client the polled counters are compared, prefills included on both sides.
    `whole_tokens_per_s` counts everything from the request to the last file; `lasting` is the loop before over
    the loop after. Keys whose facts are missing are None.
    """
    streams = load.streams() if load else []
    before = [w for w in windows if str(w["name"]).startswith("steady")]
    rates = [w["decode_tokens_per_s"] for w in before if w.get("decode_tokens_per_s")]
    outside = round(sum(rates) / len(rates), 2) if rates else None
    still = loop_times(streams, before[0]["start_ns"], before[-1]["end_ns"]) if before else []
    usual = usual_loop(still)
    decode, decode_source = None, None
    if logged:
        decode, decode_source = round(sum(logged) / len(logged), 2), f"log: {len(logged)} lines"
    elif outside and usual:
        decode, decode_source = round(outside * sum(still) / len(still) / usual, 2), "counters and streaming client"
    out: dict[str, Any] = {
        "outside_tokens_per_s": outside,
        "outside_decode_tokens_per_s": decode,
        "outside_decode_source": decode_source,
        "inside_tokens_per_s": None,
        "disturbance": None,
        "source": None,
    }
    later = next((w["loop_ns"] for w in windows if w["name"] == "after" and w.get("loop_ns")), None)
    if later and usual:  # what stays after the profile: CUPTI is not unloaded
        out["lasting"] = round(usual / later, 4)
    polled = [(t, v["decode"]) for t, v in series if v.get("live")]
    if len(polled) > 1 and polled[-1][0] > polled[0][0]:
        out["whole_tokens_per_s"] = round((polled[-1][1] - polled[0][1]) * 1e9 / (polled[-1][0] - polled[0][0]), 2)
    # Only the request that streamed when the profile began: the time between two requests is no stall.
    present = [r for r in streams if r.token_ns and r.token_ns[0] < start_ns < r.token_ns[-1]]
    span = recording_span(present[-1].token_ns, start_ns, end_ns) if present else None
    if span is not None and usual:
        limit = _limit(still)
        moved, started = _gaps(span.recorded), _gaps(span.start)
        inside = usual_loop(moved, limit)
        if inside:
            out.update(
                source="token times of one streaming client",
                disturbance=round(usual / inside, 4),
                inside_tokens_per_s=round(decode * usual / inside, 2) if decode else None,
                loop_ns={"outside": usual, "inside": inside, "inside_count": sum(t <= limit for t in moved)},
                recorded_ns=span.last - span.first,
                start_pause_ns=max(sum(started) - inside * len(started), 0),
                stall_ns=span.stall_ns,
            )
            return out
    progress = [a for a, b in zip(polled, [(0, -1), *polled], strict=False) if a[1] != b[1]]
    span = recording_span([t for t, _ in progress if t >= start_ns], start_ns, end_ns)
    if span is not None and span.last > span.first:
        counted = dict(progress)
        inside_rate = (counted[span.last] - counted[span.first]) * 1e9 / (span.last - span.first)
        out.update(
            source="realtime_tokens_total, polled",
            inside_tokens_per_s=round(inside_rate, 2),
            disturbance=round(inside_rate / outside, 4) if outside else None,
            recorded_ns=span.last - span.first,
            stall_ns=span.stall_ns,
        )
    return out


def _gaps(stamps: Sequence[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(stamps)]


def _limit(times: Sequence[int]) -> int:
    return _STALL * (sum(times) // len(times))

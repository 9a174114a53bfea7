"""Report documents and tables made by hand, for tests of outputs: every sum in them is known.

A step of a stage is `PERIOD` ns: two idle stretches (waiting for a message, then launching), then pairs of a MoE kernel
and the gap behind it. Names can be made hostile: what a trace may hold must stay text wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from traceana import schema

__all__ = ["GAP", "HOSTILE", "KERNEL", "LAUNCH", "START", "WAIT", "sample"]

START = 1_795_969_813_000_000_000
WAIT, LAUNCH, KERNEL, GAP = 400_000, 200_000, 39_000, 1_000

HOSTILE = (
    "<script>window.hacked=1</script>",
    "</script><script>window.hacked=1</script>",
    '"onload="window.hacked=1" x="',
    "<img src=x onerror=window.hacked=1>",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \u202egnp.exe",
    "&lt;b&gt; & \u2028 \x00 end",
)

_CAUSES = (
    "no_work",
    "upstream_compute",
    "downstream_backpressure",
    "p2p_transfer_wait",
    "control_message",
    "host_schedule",
    "host_launch",
    "host_sync",
    "launch_latency",
    "stream_dependency",
    "collective_late",
    "profiler",
    "ambiguous",
    "unknown",
)
_CLASSES = ("moe", "attention", "gemm", "norm", "sampling", "collective", "memory", "other")


def sample(
    ranks: int = 2, steps: int = 6, kernels: int = 20, *, hostile: bool = False
) -> tuple[dict[str, object], dict[str, pl.DataFrame]]:
    """(document, tables) of `ranks` stages with so many steps of so many kernels."""
    period = WAIT + LAUNCH + kernels * (KERNEL + GAP)
    window = steps * period
    tables = _tables(ranks, steps, kernels, period, hostile)
    busy, gaps = steps * kernels * KERNEL, steps * kernels * GAP
    causes = dict.fromkeys(_CAUSES, 0) | {
        "control_message": steps * WAIT,
        "host_launch": steps * LAUNCH,
        "launch_latency": gaps,
    }
    bubble = sum(causes.values())
    name = HOSTILE[0] if hostile else "void fused_moe_kernel<float>(int, float*)"
    words = " ".join(HOSTILE) if hostile else "in words"
    wait = {"p50_ns": 1000, "p90_ns": 2000, "p99_ns": 3000, "max_ns": 4000}
    stages = [
        {
            "rank": r,
            "pp_rank": r,
            "window_ns": window,
            "busy_ns": busy,
            "transfer_ns": 0,
            "bubble_ns": bubble,
            "utilisation": busy / window,
            "reported_utilisation": 0.97,
            "busy_by_class_ns": dict.fromkeys(_CLASSES, 0) | {"moe": busy},
            "causes_ns": causes,
            "gaps": {"count": steps * (kernels + 1), "p50_ns": GAP, "p99_ns": WAIT, "max_ns": WAIT + LAUNCH},
            "coverage": 1.0,
        }
        for r in range(ranks)
    ]
    blame = [
        {
            "rank": r,
            "root_rank": root,
            "cause": cause,
            "detail": words,
            "crossed_token_return": cause == "control_message",
            "ns": ns,
        }
        for r in range(ranks)
        for root, cause, ns in (
            ((r + 1) % ranks, "control_message", steps * WAIT),
            (r, "host_launch", steps * LAUNCH),
            (r, "launch_latency", gaps),
        )
    ]
    document: dict[str, object] = {
        "schema_version": 1,
        "traceana_version": "0",
        "window": {
            "start_ns": START,
            "end_ns": START + window,
            "duration_ns": window,
            "trimmed": [{"rank": 0, "side": "head", "ns": 5, "why": words}],
        },
        "clock": {
            "reference_rank": 0,
            "ranks": [
                {"rank": r, "offset_ns": 0, "drift_ppm": 0.0, "uncertainty_ns": 5 if r else 0, "method": words}
                for r in range(ranks)
            ],
            "pairs": [{"a": 0, "b": r, "low_ns": -5, "high_ns": None} for r in range(1, ranks)],
            "violations": [],
            "identifiable": True,
        },
        "pipeline": {"pp_size": ranks},
        "stages": stages,
        "blame": blame,
        "worst_gaps": [
            {
                "rank": 0,
                "gap": 0,
                "ns": WAIT + LAUNCH,
                "ts_ns": START,
                "end_ns": START + WAIT + LAUNCH,
                "visit": 0,
                "chain": [
                    {
                        "ts_ns": START + WAIT,
                        "ns": LAUNCH,
                        "cause": "host_launch",
                        "root_rank": 0,
                        "detail": words,
                        "crossed_token_return": False,
                        "what": name,
                    },
                    {
                        "ts_ns": START,
                        "ns": WAIT,
                        "cause": "control_message",
                        "root_rank": 1,
                        "detail": None,
                        "crossed_token_return": True,
                        "what": name,
                    },
                ],
            }
        ],
        "micro_batches": {
            "slots": 2,
            "in_flight": {"mean": 1.5, "max": 2, "histogram": [[1, window // 2], [2, window - window // 2]]},
            "batch_size": {"min": 8, "p50": 8, "max": 8},
            "merged_between_stages": False,
            "compared": steps,
            "by_slot": [
                {
                    "slot": s,
                    "visits": 3,
                    "filled": 3,
                    "batch_size_min": 8,
                    "batch_size_p50": 8,
                    "batch_size_max": 8,
                    "modes": {name: 3},
                    "forward_ns_p50": 5,
                }
                for s in (0, 1)
            ],
            "overlap": {"mean_stages_busy": 1.0, "histogram_ns": [[0, 10], [1, window - 10]]},
        },
        "p2p": [
            {
                "src": 0,
                "dst": 1,
                "kind": words,
                "dtype": words,
                "bytes": 32768,
                "count": 3,
                "unmatched": 0,
                "latency_ns": wait,
                "transfer_ns": wait,
                "wait_ns": wait,
                "send_wait_ns": wait,
                "gbps_p50": 49.0,
            }
        ],
        "moe": [
            {
                "rank": r,
                "total_ns": busy,
                "share_of_busy": 1.0,
                "kernels": [{"name": name, "count": 3, "total_ns": busy, "p50_ns": KERNEL, "p99_ns": KERNEL}],
                "per_forward_ns": wait | {"count": 3},
            }
            for r in range(ranks)
        ],
        "cuda_graph": [
            {
                "rank": r,
                "forwards": 3,
                "graphed": 3,
                "launch_ns_p50": 9,
                "captured_sizes": [1, 2],
                "by_mode": [{"mode": name, "forwards": 3, "graphed": 3, "launch_ns_p50": 9, "kernels_p50": 20}],
            }
            for r in range(ranks)
        ],
        "host_spans": [{"rank": r, "span": words, "count": 3, "mean_ns": 5, "p50_ns": 5} for r in range(ranks)],
        "gpu": [
            {
                "rank": r,
                "power_w": {"mean": 400.0, "p50": 400.0, "min": 1.0, "max": 410.0, "limit": 700.0},
                "utilisation": {"mean": 0.5},
                "clocks_mhz": {"min": 1980.0, "max": 1980.0},
                "memory_bytes": 1 << 30,
                "temperature_c": {"max": 40.0},
                "samples": 9,
                "window": words,
            }
            for r in range(ranks)
        ],
        "model": {
            "tau_ns": period - 7,
            "measured_period_ns": period,
            "binding_term": "ring",
            "binding_stage": None,
            "needed_in_flight": 3,
            "in_flight": 2,
            "terms_ns": {"compute": period - 100, "host": period - 50, "ring": period - 7},
            "per_stage": [
                {
                    "rank": r,
                    "t_ns": period - 100,
                    "k_ns": 1,
                    "c_ns": 2,
                    "imbalance_ns": 0,
                    "host_ns": 50,
                    "under_filled_ns": 43,
                    "variance_ns": 7,
                    "idle_ns": 100,
                }
                for r in range(ranks)
            ],
        },
        "server": {
            "pp_size": ranks,
            "slots": 2,
            "gpu_name": words,
            "launch_command": words,
            "arguments": {words: words},
            "throughput": {"decode": 984.0, "source": words},
            "model": {"architecture": words},
        },
        "skipped": {},
        "losses": [{"name": "something_odd", "severity": "warning", "rank": 1, "count": 3, "detail": words}],
        "answers": [{"question": "Is the pipe fed?", "answer": f"Yes, {words}", "known": True}],
        "findings": [
            {
                "id": words,
                "title": f"Change {words}",
                "rank": None,
                "lost_ns": 5_000_000,
                "recoverable_fraction": 0.5,
                "evidence": [words],
                "action": words,
                "predicted": {"throughput_tokens_per_s": 1500.0, "low": 1400.0, "high": 1600.0},
            }
        ],
    }
    return document, tables


def _tables(ranks: int, steps: int, kernels: int, period: int, hostile: bool) -> dict[str, pl.DataFrame]:
    # Lengths of one step in order, and which of them are work.
    lengths = np.array([WAIT, LAUNCH] + [KERNEL, GAP] * kernels, dtype=np.int64)
    n = lengths.size
    ends = np.cumsum(np.tile(lengths, steps)) + START
    starts = ends - np.tile(lengths, steps)
    step = np.repeat(np.arange(steps), n)
    kind = np.tile(np.array([1, 2] + [0, 3] * kernels), steps)
    lane = pl.DataFrame({"ts_ns": starts, "end_ns": ends, "visit": step, "kind": kind}).with_columns(
        pl.when(pl.col("kind") <= 2)
        .then(pl.col("visit") * (kernels + 1))
        .otherwise(pl.int_range(pl.len()))
        .alias("gap")
    )
    states: list[pl.DataFrame] = []
    attribution: list[pl.DataFrame] = []
    forwards: list[Mapping[str, object]] = []
    detail = HOSTILE[1] if hostile else "run_batch"
    event = HOSTILE[3] if hostile else "a kernel"
    for r in range(ranks):
        states.append(
            lane.select(
                pl.lit(r).alias("rank"),
                "ts_ns",
                "end_ns",
                pl.when(pl.col("kind") == 0).then(pl.lit("busy")).otherwise(pl.lit("bubble")).alias("state"),
                pl.when(pl.col("kind") == 0).then(pl.lit("moe")).alias("kernel_class"),
                "visit",
            )
        )
        idle = lane.filter(pl.col("kind") > 0)
        attribution.append(
            idle.select(
                pl.lit(r).alias("rank"),
                "ts_ns",
                "end_ns",
                pl.col("kind")
                .replace_strict({1: "control_message", 2: "host_launch", 3: "launch_latency"}, return_dtype=pl.String)
                .alias("cause"),
                pl.when(pl.col("kind") == 1).then((r + 1) % ranks).otherwise(r).alias("root_rank"),
                pl.when(pl.col("kind") < 3).then(pl.lit(detail)).alias("detail"),
                (pl.col("kind") == 1).alias("crossed_token_return"),
                "visit",
                "gap",
                (2 - pl.col("kind")).clip(0).alias("chain"),
                pl.lit(event).alias("first_event"),
                pl.lit(event).alias("last_event"),
            )
        )
        for k in range(steps):
            start = START + k * period + WAIT + LAUNCH
            forwards.append(
                {
                    "rank": r,
                    "visit": k,
                    "slot": k % 2,
                    "ts_ns": start,
                    "end_ns": start + kernels * (KERNEL + GAP) - GAP,
                    "mode": event,
                    "batch_size": 8,
                    "tokens": 8,
                    "busy_ns": kernels * KERNEL,
                    "launch_ns": 9,
                    "graphs": 1,
                    "kernels": kernels,
                }
            )
    messages = [
        {
            "src": 0,
            "dst": ranks - 1,
            "kind": "proxy",
            "ordinal": k,
            "visit": k,
            "send_ts_ns": START + k * period + 10,
            "send_end_ns": START + k * period + 20,
            "recv_ts_ns": START + k * period + 15,
            "recv_end_ns": START + k * period + 30,
            "send_row": 0,
            "recv_row": 0,
            "bytes": 1,
            "dtype": "Int",
        }
        for k in range(steps)
    ]
    samples = [
        {
            "ts_ns": START + 1_000_000 * i,
            "rank": r,
            "gpu": r,
            "power_w": 400.0 + i,
            "power_limit_w": 700.0,
            "utilisation": 0.5,
            "sm_clock_mhz": 1980.0,
            "memory_bytes": 1,
            "temperature_c": 40.0,
        }
        for i in range(-3, 9)
        for r in range(ranks)
    ]
    flight = pl.DataFrame(
        {"ts_ns": [START, START + period], "end_ns": [START + period, START + steps * period], "count": [1, 2]}
    )
    return {
        "states": schema.STATES.frame(pl.concat(states)),
        "attribution": schema.ATTRIBUTION.frame(pl.concat(attribution)),
        "forwards": schema.FORWARDS.frame(forwards),
        "messages": schema.MESSAGES.frame(messages),
        "gpu_samples": schema.GPU_SAMPLES.frame(samples),
        "in_flight": flight,
    }

"""What each stage does in a visit, as far as findings need it: GPU time of a layer and of the rest, kernels that no other
stage runs, and host time that no other stage spends in the same code."""

from __future__ import annotations

import numpy as np
import polars as pl

from traceana.simulate.hosts import planted
from traceana.simulate.parts import COLUMNS, Parts, StageParts

__all__ = ["SPAN_OF", "stage_work"]

# The span of the trace in which a piece of the loop lies; between the spans lies what has none.
SPAN_OF = {
    "receive": "recv_requests", "ingest": "process_input_requests", "commit_requests": "send_reqs_to_next_stage",
    "send_requests": "send_reqs_to_next_stage", "schedule": "get_next_batch_to_run", "prepare": "run_batch",
    "launch": "run_batch", "tail": "run_batch", "after_launch": "run_batch", "process": "process_batch_result",
    "await_result": "recv_res_dict_from_prev_stage", "receive_result": "recv_res_dict_from_prev_stage",
    "send_output": "send_res_dict_to_next_stage", "post_output": "send_res_dict_to_next_stage",
    "send_proxy": "send_proxy_dict_to_next_stage", "post_proxy": "send_proxy_dict_to_next_stage",
}  # fmt: skip
# What only the last stage has to run: lm_head and sampling.
_OF_THE_LAST = ("gemm", "norm", "sampling")
_LEAST_KERNEL_NS = 200_000
_MANY_TIMES = 8


def stage_work(parts: Parts) -> list[dict[str, object]]:
    """Per stage `rank`, `layers` (None where unknown), `layer_ns` (GPU time of a layer), `rest_ns` (of what is no
    layer), `own_kernels` ({name, ns}) and `held` ({span, piece, ns}), all means or medians of a visit with a batch.

    `own_kernels`: at least 0.2 ms a visit, and no other stage spends an eighth of that in them. `held`: see
    `traceana.simulate.hosts.planted`.
    """
    filled = np.flatnonzero(parts.batch > 0)
    told = parts.facts.get("layers_by_rank")
    known = [int(x) for x in told] if isinstance(told, list) and len(told) == len(parts.stages) else None
    by_name = [_by_name(s, filled.size) for s in parts.stages]
    held = planted(parts)
    out: list[dict[str, object]] = []
    for s, stage in enumerate(parts.stages):
        kernels = stage.kernels
        layers = known[s] if known is not None else kernels.layers
        whole = kernels.gpu + kernels.of(pl.lit(True), "head")
        inside = kernels.layered()
        layer_ns = int(inside[filled].mean()) // layers if layers and filled.size and inside.any() else None
        others: dict[str, int] = {}
        for other in by_name[:s] + by_name[s + 1 :]:
            for name, (ns, _) in other.items():
                others[name] = max(others.get(name, 0), ns)
        last = s == len(parts.stages) - 1
        own = [
            (ns, name)
            for name, (ns, kind) in by_name[s].items()
            if ns >= max(_LEAST_KERNEL_NS, _MANY_TIMES * others.get(name, 0)) and not (last and kind in _OF_THE_LAST)
        ]
        total = int(whole[filled].mean()) if filled.size else 0
        out.append(
            {
                "rank": stage.rank,
                "layers": layers,
                "layer_ns": layer_ns,
                "rest_ns": None if layer_ns is None or layers is None else max(0, total - layers * layer_ns),
                "own_kernels": [{"name": name, "ns": ns} for ns, name in sorted(own, key=lambda k: (-k[0], k[1]))],
                "held": [
                    {"span": SPAN_OF.get(COLUMNS[c], "between spans"), "piece": COLUMNS[c], "ns": int(held[s][c])}
                    for c in np.flatnonzero(held[s])
                ],
            }
        )
    return out


def _by_name(stage: StageParts, visits: int) -> dict[str, tuple[int, str]]:
    """Mean ns a visit and class of each kernel, messages between stages left out."""
    frame = stage.kernels.table.group_by("name").agg(pl.col("ns").sum(), pl.col("class").first())
    rows = frame.filter(pl.col("class") != "collective").iter_rows()
    return {name: (int(ns) // max(visits, 1), str(kind)) for name, ns, kind in rows}

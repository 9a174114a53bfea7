"""The bubble in one formula (docs/concepts/attribution.md, section 5): what bounds the period of a micro-batch step,
and how each stage's idle time divides into imbalance, host, under-filled pipe and variance."""

from __future__ import annotations

import polars as pl

from traceana.model.model import Model
from traceana.model.periods import forward_gpu_ns, hop_costs, visit_waits
from traceana.result import Result

__all__ = ["NAME", "run"]

NAME = "bound"
_HOST = ("host_schedule", "host_launch", "host_sync", "profiler")

_EMPTY: dict[str, object] = {
    "tau_ns": None, "measured_period_ns": None, "binding_term": None, "binding_stage": None, "needed_in_flight": None,
    "in_flight": None, "terms_ns": None, "per_stage": [],
}  # fmt: skip


def run(model: Model) -> Result:
    """Fact `model`. Per stage, integers that add up: imbalance + host + under_filled + variance = measured period - t.

    All are means over the micro-batch steps of the window, rounded down; remainders are in the variance. `skipped`
    where there is no pipeline or no whole step.
    """
    trace = model.trace
    heads = model.stage_heads()
    visits = model.window_visits()
    steps = visits.filter((pl.col("rank") == heads[0]) & pl.col("mode").is_not_null()) if heads else visits.clear()
    if not trace.topology.is_pipeline or steps.height == 0:
        why = "no pipeline" if not trace.topology.is_pipeline else "no micro-batch step lies wholly inside the window"
        return Result(NAME, facts={"model": _EMPTY | {"reason": why}}, skipped=why)
    own = visits.filter(pl.col("rank") == heads[0])
    span = int((own.get_column("end_ns") - own.get_column("ts_ns")).sum())
    period = span // steps.height
    first, last = trace.window.first_visit or 0, trace.window.last_visit or 0
    inside = pl.col("visit").is_between(first, last)
    gpu = {r: forward_gpu_ns(model, r) for r in heads}
    t = [_mean(gpu[r].filter(inside).get_column("gpu_ns")) for r in heads]
    k: list[int] = []
    spread: list[dict[str, int]] = []
    for rank in heads:
        waits = visit_waits(model, rank).filter(inside & pl.col("complete"))
        # Host time of every visit, empty ones too, falls on the steps: a slot without a batch costs the others.
        k.append(int(waits.get_column("host_ns").sum()) // max(1, waits.filter(pl.col("mode").is_not_null()).height))
        host = waits.get_column("host_ns").sort()
        spread.append(
            {"k_ns_p50": int(host[(host.len() - 1) // 2]), "k_ns_max": int(host[-1])}
            if host.len()
            else {"k_ns_p50": 0, "k_ns_max": 0}
        )
    slots = trace.slots or _slots(trace.visits) or trace.topology.pp_size
    hops = hop_costs(model, gpu, slots).filter(inside)
    c = [_mean(hops.filter(pl.col("stage") == s).get_column("hop_ns")) for s in range(len(heads))]
    filled = steps.get_column("slot").n_unique() if steps.get_column("slot").null_count() == 0 else slots
    in_flight = max(1, filled)
    stages = [trace.topology.stage[r] for r in heads]
    terms = {"compute": max(t), "host": max(k)}
    if len(heads) == trace.topology.pp_size:  # the round trip of a pipeline that is not all there is not known
        terms["ring"] = (sum(t) + sum(c)) // in_flight
    facts = model.facts
    no_depth = facts.get("async_depth") == 0 or (facts.get("async_depth") is None and slots == trace.topology.pp_size)
    if no_depth and stages[-1] == trace.topology.pp_size - 1:
        terms["last_stage_serial"] = t[-1] + _serial_host(model, heads[-1], period)
    without_ring = max(v for name, v in terms.items() if name != "ring")
    tau = max(terms.values())
    order = ("compute", "host", "last_stage_serial", "ring")
    binding = next(name for name in order if terms.get(name) == tau)
    at = {"compute": t.index(max(t)), "host": k.index(max(k)), "last_stage_serial": -1}.get(binding)
    per_stage = [
        {
            "rank": rank,
            "t_ns": t[s],
            "k_ns": k[s],
            **spread[s],
            "c_ns": c[s],
            "imbalance_ns": max(t) - t[s],
            "host_ns": without_ring - max(t),
            "under_filled_ns": tau - without_ring,
            "variance_ns": period - tau,
            "idle_ns": period - t[s],
        }
        for s, rank in enumerate(heads)
    ]
    needed = -(-(sum(t) + sum(c)) // without_ring) if without_ring and "ring" in terms else None
    table = pl.DataFrame(per_stage)
    return Result(
        NAME,
        {"bound": table},
        {
            "model": {
                "tau_ns": tau,
                "measured_period_ns": period,
                "binding_term": binding,
                "binding_stage": None if at is None else stages[at],
                "needed_in_flight": needed,
                "in_flight": in_flight,
                "terms_ns": terms,
                "steps": steps.height,
                "per_stage": per_stage,
            }
        },
    )


def _mean(values: pl.Series) -> int:
    return int(values.sum()) // values.len() if values.len() else 0


def _slots(visits: pl.DataFrame) -> int | None:
    top = visits.get_column("slot").max()
    return int(top) + 1 if isinstance(top, int) else None


def _serial_host(model: Model, rank: int, period_ns: int) -> int:
    """Host time of a stage that its own GPU had to sit out, per step."""
    mine = model.blame.compact.filter(
        (pl.col("rank") == rank) & (pl.col("root_rank") == rank) & pl.col("cause").is_in(_HOST)
    )
    total = int((mine.get_column("end_ns") - mine.get_column("ts_ns")).sum())
    return total * period_ns // model.trace.window.duration_ns

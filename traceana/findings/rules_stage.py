"""Rules about what stages compute: imbalance, kernels of one stage, CUDA graphs, MoE spread, prefill."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

from traceana.findings.facts import Facts, Row, ints, ms, number, percent
from traceana.findings.finding import FLOOR, Draft

__all__ = ["RULES", "balanced"]


def imbalance(facts: Facts) -> list[Draft]:
    """One stage's GPU time a step is above the others', and it bounds the period or nearly does. Kernels that only one
    stage runs are another finding's."""
    stages = facts.rows_of_bound()
    if len(stages) < 2 or not facts.period_ns:
        return []
    work = facts.rows("stage_work")
    own = [_own_ns(w) for w in work] if len(work) == len(stages) else [0] * len(stages)
    times = [max(0, number(s, "t_ns") - extra) for s, extra in zip(stages, own, strict=True)]
    slowest, mean = max(times), sum(times) / len(times)
    share = (slowest - mean) / facts.period_ns
    if share < FLOOR:
        return []
    who = times.index(slowest)
    evidence = [f"GPU time a step: {', '.join(f'stage {i} {ms(t)}' for i, t in enumerate(times))}"]
    action = "move layers from the slowest stage: SGLANG_PP_LAYER_PARTITION"
    changes: tuple[str, ...] = ()
    layers = [number(w, "layers") for w in work]
    if layers and all(layers) and all(w.get("layer_ns") for w in work):
        each, rest = [number(w, "layer_ns") for w in work], [number(w, "rest_ns") for w in work]
        fixed = [max(0, r - extra) for r, extra in zip(rest, own, strict=True)]
        better = balanced(each, fixed, sum(layers))
        evidence.append(f"layers now: {ints(layers)}; a layer takes {', '.join(f'{ns / 1e3:.1f}' for ns in each)} us")
        evidence.append(
            f"beside the layers (embedding, lm_head, sampling): {', '.join(f'{ns / 1e3:.0f}' for ns in fixed)} us"
        )
        usual = sorted(each)[(len(each) - 1) // 2]
        if each[who] > 1.2 * usual:
            evidence.append(
                f"a layer of stage {who} takes {each[who] / usual:.1f} times as long as the others': its GPU is slower, or"
                " its layers are others"
            )
        if better != layers:
            text = ",".join(str(x) for x in better)
            action, changes = f"SGLANG_PP_LAYER_PARTITION={text}", (f"pp_layer_partition={text}",)
    idle = sum(slowest - t for t in times)
    return [Draft(
        "stage_imbalance", f"Stage {who} does more work than the others: {ms(slowest)} a step against {ms(mean)} on average",
        number(stages[who], "rank"), int(idle * facts.steps), tuple(evidence), action, changes, ceiling=share,
    )]  # fmt: skip


def _own_ns(work: Row) -> int:
    return sum(number(k, "ns") for k in cast("list[Row]", work.get("own_kernels") or []))


def balanced(layer_ns: Sequence[int], fixed_ns: Sequence[int], layers: int) -> list[int]:
    """The partition of `layers` with the smallest slowest stage: a layer takes `layer_ns[stage]`, what is no layer
    (embedding, lm_head, sampling) stays with its stage."""
    out = [1] * len(layer_ns)
    for _ in range(layers - len(out)):
        cheapest = min(range(len(out)), key=lambda i: (fixed_ns[i] + (out[i] + 1) * layer_ns[i], i))
        out[cheapest] += 1
    return out


def stage_kernels(facts: Facts) -> list[Draft]:
    """Kernels that one stage runs and the others hardly or never do."""
    out: list[Draft] = []
    for work in facts.rows("stage_work"):
        for kernel in cast("list[Row]", work.get("own_kernels") or []):
            ns, name, stage = number(kernel, "ns"), str(kernel["name"]), facts.document_stage(number(work, "rank"))
            if not facts.period_ns or ns < FLOOR * facts.period_ns:
                continue
            out.append(
                Draft(
                    "stage_kernel",
                    f"Only stage {stage} runs {_short(name)}: {ms(ns)} a step",
                    number(work, "rank"),
                    int(ns * facts.steps),
                    (f"{name}: {ms(ns)} of GPU time a micro-batch on stage {stage}, less than an eighth on any other",),
                    f"find what launches {_short(name)} on stage {stage}, and whether it has to",
                    (f"remove ^{re.escape(name)}$",),
                    ceiling=ns / facts.period_ns,
                    fallback=f"nothing to gain from {_short(name)} now: it hides behind other waits",
                )
            )
    return out


def _short(name: str) -> str:
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "").split("(")[0].split("<")[0]
    return name if len(name) <= 48 else f"{name[:45]}..."


def cuda_graphs(facts: Facts) -> list[Draft]:
    """Decode forwards that were launched kernel by kernel."""
    ranks = facts.rows("cuda_graph")
    modes = [m for r in ranks for m in cast("list[Row]", r.get("by_mode") or []) if m.get("mode") == "decode"]
    forwards, graphed = sum(number(m, "forwards") for m in modes), sum(number(m, "graphed") for m in modes)
    if forwards == 0 or graphed * 10 >= forwards * 9:
        return []
    kernels = max((number(m, "kernels_p50") for m in modes), default=0)
    launch = max((number(m, "launch_ns_p50") for m in modes), default=0)
    sizes = facts.server("cuda_graph", "captured_sizes")
    largest = facts.part("micro_batches").get("batch_size")
    batch = number(cast("Row", largest), "max") if isinstance(largest, Mapping) else 0
    evidence = [
        f"{forwards - graphed} of {forwards} decode forwards launch their {kernels} kernels one by one",
        f"{ms(launch)} of host time in launch calls a forward (profiled)",
    ]
    if facts.server("cuda_graph", "enabled") is False:
        title, action = "CUDA graphs are off", "remove --disable-cuda-graph"
    elif isinstance(sizes, list) and sizes and batch > max(int(s) for s in sizes):
        title = f"CUDA graphs missed: micro-batches of {batch} are above the largest captured size {max(sizes)}"
        action = f"--cuda-graph-max-bs-decode {batch}"
        evidence.append(f"captured sizes: {ints([int(s) for s in sizes])}")
    else:
        title, action = (
            "Decode forwards run without CUDA graphs",
            "check the server's log for why graphs were not captured",
        )
    lost = facts.cause_ns(None, "host_launch", "launch_latency")
    total = facts.window_ns * max(1, len(facts.stages))
    return [
        Draft(
            "cuda_graphs_off",
            title,
            None,
            lost,
            tuple(evidence),
            action,
            ("disable_cuda_graph=false",),
            ceiling=lost / total,
        )
    ]


def recaptured(facts: Facts) -> list[Draft]:
    """CUDA graphs are captured while the server serves."""
    count = sum(number(r, "captures") for r in facts.rows("cuda_graph"))
    if not count:
        return []
    lost = facts.cause_ns(None, "host_launch")
    return [Draft(
        "cuda_graphs_recaptured", f"CUDA graphs are captured while serving: {count} capture{'s' * (count > 1)} in the window", None, lost,
        (f"{count} stream captures begin in the window, all ranks together; a capture runs the forward launch by launch",),
        "capture all sizes at start: --cuda-graph-bs-decode with every batch size that occurs, and no size left to lazy capture",
        (), ceiling=min(1.0, lost / max(1, facts.window_ns * len(facts.stages))),
    )]  # fmt: skip


def moe_spread(facts: Facts) -> list[Draft]:
    """MoE time of a forward varies much between micro-batches of one stage."""
    worst: tuple[float, Row] | None = None
    for row in facts.rows("moe"):
        spread = cast("Row", row.get("per_forward_ns") or {})
        median, high = number(spread, "p50_ns"), number(spread, "p99_ns")
        if (
            number(spread, "count") >= 8
            and median
            and facts.period_ns
            and (worst is None or (high - median) / median > worst[0])
        ):
            worst = ((high - median) / median, row)
    if worst is None or worst[0] < 0.25:
        return []
    spread = cast("Row", worst[1]["per_forward_ns"])
    extra = number(spread, "p99_ns") - number(spread, "p50_ns")
    modes = {row["mode"] for row in facts.rows("forward_modes")}
    if extra < FLOOR * (facts.period_ns or 0) or len(set(facts.slot_sizes())) > 1 or modes != {"decode"}:
        return []
    return [Draft(
        "moe_spread", f"MoE time varies between micro-batches: {ms(number(spread, 'p50_ns'))} median, {ms(number(spread, 'p99_ns'))} at p99",
        number(worst[1], "rank"), extra, (f"over {spread['count']} forwards of rank {worst[1]['rank']} with equal batch sizes",),
        "balance experts (--enable-eplb), or compare the micro-batches' token mix", (), ceiling=0.0,
    )]  # fmt: skip


def prefill(facts: Facts) -> list[Draft]:
    """Prefill among decode: decode micro-batches wait for long forwards."""
    by_mode: dict[str, int] = {}
    for row in facts.rows("forward_modes"):
        by_mode[str(row["mode"])] = by_mode.get(str(row["mode"]), 0) + number(row, "total_ns")
    extend = sum(v for k, v in by_mode.items() if k in ("extend", "mixed"))
    decode = by_mode.get("decode", 0)
    if not extend or not decode or extend < 0.1 * (extend + decode):
        return []
    return [Draft(
        "prefill_among_decode", f"Prefill takes {percent(extend / (extend + decode))} of the stages' forward time and decode waits for it",
        None, facts.blamed_ns(cause="upstream_compute", detail="workload"),
        (f"forwards in the window: decode {ms(decode)}, prefill {ms(extend)}, all stages together",),
        "smaller --chunked-prefill-size, or --enable-mixed-chunk, or separate prefill (PD disaggregation)", (), ceiling=0.0,
    )]  # fmt: skip


RULES = (imbalance, cuda_graphs, stage_kernels, recaptured, moe_spread, prefill)

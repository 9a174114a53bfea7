"""Rules about stages: imbalance, kernels of one stage, CUDA graphs, links, MoE spread, straggling GPUs, prefill, memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

from traceana.findings.facts import Facts, Row, ints, ms, number, percent
from traceana.findings.finding import Draft

__all__ = ["FLOOR", "RULES", "balanced"]

# A finding below this share of the window is noise to the reader: identical runs differ by more.
FLOOR = 0.03


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
        "cuda_graphs_recaptured", f"CUDA graphs are captured while serving: {count} captures in the window", None, lost,
        (f"{count} stream captures begin in the window, all ranks together; a capture runs the forward launch by launch",),
        "capture all sizes at start: --cuda-graph-bs-decode with every batch size that occurs, and no size left to lazy capture",
        (), ceiling=min(1.0, lost / max(1, facts.window_ns * len(facts.stages))),
    )]  # fmt: skip


def back_pressure(facts: Facts) -> list[Draft]:
    """Transfers that stages sit out, or sends that wait for the next stage to take them."""
    total = facts.window_ns * max(1, len(facts.stages))
    moving = sum(number(s, "transfer_ns") for s in facts.stages) + facts.cause_ns(None, "p2p_transfer_wait")
    held = sum(
        number(cast("Row", link["send_wait_ns"]), "p50_ns") * number(link, "count") for link in facts.rows("p2p")
    )
    pressed = facts.cause_ns(None, "downstream_backpressure")
    held = max(held, pressed if pressed > 3 * FLOOR * total else 0)
    lost = moving + held
    if not facts.is_pipeline or lost < FLOOR * total or _slow_links(facts):
        return []
    sends = held > moving
    title = (
        f"Sends wait for the next stage to take them: {percent(held / total)} of the stages' time"
        if sends
        else f"Stages sit out {percent(moving / total)} of the window while activations move between them"
    )
    return [Draft(
        "exposed_p2p", title, None, lost,
        (
            f"transfer {ms(moving / facts.steps)} and blocked sends {ms(held / facts.steps)} a step, all stages together",
            *_slowest(facts),
            "the prediction is for messages that take no time: overlap can give that much at most",
        ),
        "SGLANG_PP_COMM_OVERLAP=1, and check the links (nvidia-smi topo -m)", ("remove cause:p2p_transfer_wait",), ceiling=0.0,
        fallback="SGLANG_PP_COMM_OVERLAP=1 frees stages from sends that wait; the stage that takes late is what to speed up",
    )]  # fmt: skip


def _slowest(facts: Facts) -> list[str]:
    """The activation link with the longest transfers, in words."""
    links = [k for k in facts.rows("p2p") if k.get("kind") == "proxy"]
    if not links:
        return []
    worst = max(links, key=lambda k: number(cast("Row", k["transfer_ns"]), "p50_ns"))
    each = number(cast("Row", worst["transfer_ns"]), "p50_ns")
    return [f"longest: {worst['src']} to {worst['dst']}, {worst['bytes']} bytes in {ms(each)} (median)"]


def control_messages(facts: Facts) -> list[Draft]:
    """gloo messages between the schedulers take long."""
    lost = facts.cause_ns(None, "control_message")
    total = facts.window_ns * max(1, len(facts.stages))
    if not facts.is_pipeline or lost < 5 * FLOOR * total:
        return []
    return [Draft(
        "control_messages", f"Stages idle {percent(lost / total)} of the time for gloo messages in flight", None, lost,
        (f"{ms(lost / facts.steps)} a step, all stages together: requests, shapes and metadata go over gloo on the CPU",),
        "check the network that gloo uses (GLOO_SOCKET_IFNAME) and the CPUs that serve it", ("scale cause:control_message=0.5",),
        ceiling=0.0, fallback="check the network that gloo uses (GLOO_SOCKET_IFNAME); halving its time alone gains nothing now",
        probes=(("gloo messages took no time", ("remove cause:control_message",)),),
    )]  # fmt: skip


def late_rank(facts: Facts) -> list[Draft]:
    """One rank of a stage comes late to its collectives, and the others wait."""
    late: dict[int, int] = {}
    for row in facts.rows("blame"):
        if row["cause"] == "collective_late":
            late[number(row, "root_rank")] = late.get(number(row, "root_rank"), 0) + number(row, "ns")
    rank = max(late, key=lambda r: (late[r], -r), default=None)
    if rank is None or late[rank] < FLOOR * facts.window_ns:
        return []
    busy = {number(s, "rank"): number(s, "busy_ns") for s in facts.stages}
    peers = [number(s, "rank") for s in facts.stages if s.get("pp_rank") == _stage(facts, rank) and s["rank"] != rank]
    evidence = [f"other ranks wait {percent(late[rank] / facts.window_ns)} of the window for it at collectives"]
    if peers:
        most = max(busy[p] for p in peers)
        evidence.append(f"it computes {ms(busy[rank])} of the window, its peers at most {ms(most)}")
    return [Draft(
        "late_rank", f"Rank {rank} comes late to the collectives of its stage", rank, late[rank], tuple(evidence),
        "compare its GPU's clock, power and other load with its peers' (nvidia-smi -q -d PERFORMANCE)", (), ceiling=0.0,
    )]  # fmt: skip


def _stage(facts: Facts, rank: int) -> object:
    return next((s.get("pp_rank") for s in facts.stages if s["rank"] == rank), None)


def _slow_links(facts: Facts) -> list[Row]:
    """Activation links whose median rate is half of the usual one or less, of at least three."""
    links = [
        link
        for link in facts.rows("p2p")
        if link.get("kind") == "proxy" and isinstance(link.get("gbps_p50"), int | float)
    ]
    rates = sorted(float(cast("float", link["gbps_p50"])) for link in links)
    if len(rates) < 3:
        return []
    usual = rates[len(rates) // 2]
    slow = [k for k in links if float(cast("float", k["gbps_p50"])) * 2 <= usual]
    cost = {id(k): number(cast("Row", k["transfer_ns"]), "p50_ns") * number(k, "count") for k in slow}
    return [k for k in slow if cost[id(k)] >= FLOOR * facts.window_ns]


def slow_link(facts: Facts) -> list[Draft]:
    """A link moves the same messages far slower than the others."""
    out: list[Draft] = []
    rates = sorted(
        float(rate) for k in facts.rows("p2p")
        if k.get("kind") == "proxy" and isinstance(rate := k.get("gbps_p50"), int | float)
    )  # fmt: skip
    for slow in _slow_links(facts):
        usual, rate = rates[len(rates) // 2], float(cast("float", slow["gbps_p50"]))
        each = number(cast("Row", slow["transfer_ns"]), "p50_ns")
        cost = each * number(slow, "count")
        out.append(
            Draft(
                "slow_link",
                f"The link {slow['src']} to {slow['dst']} is slow: {rate:.2g} Gbit/s where others reach {usual:.2g}",
                None,
                cost,
                (f"{slow['count']} messages of {slow['bytes']} bytes, {ms(each)} each (median)",),
                "check the topology (nvidia-smi topo -m) and place neighbouring stages on linked GPUs",
                (f"link {slow['src']}-{slow['dst']}={rate / usual:.6f}",),
                ceiling=cost / facts.window_ns,
            )
        )
    return out


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


def straggling_gpu(facts: Facts) -> list[Draft]:
    """One GPU clocks lower than the others, or sits at its power limit, and its stage is slower."""
    gpus = [g for g in facts.rows("gpu") if isinstance(cast("Row", g["clocks_mhz"]).get("p50"), int | float)]
    if len(gpus) < 2:
        return []
    clocks = {number(g, "rank"): float(cast("float", cast("Row", g["clocks_mhz"])["p50"])) for g in gpus}
    slow = min(clocks, key=lambda r: (clocks[r], r))
    usual = sorted(clocks.values())[len(clocks) // 2]
    times = {number(s, "rank"): number(s, "t_ns") for s in facts.rows_of_bound()}
    if clocks[slow] > 0.93 * usual or (times and times.get(slow, 0) < max(times.values())):
        return []
    power = cast("Row", next(g for g in gpus if g["rank"] == slow)["power_w"])
    limit = power.get("limit")
    evidence = [f"SM clock {clocks[slow]:.0f} MHz on rank {slow}, {usual:.0f} on the others (median)"]
    if isinstance(limit, int | float) and number(power, "p50") > 0.95 * limit:
        evidence.append(f"it draws {power['p50']:.0f} W of a limit of {limit:.0f} W")
    share = 1 - clocks[slow] / usual
    return [Draft(
        "straggling_gpu", f"The GPU of rank {slow} runs at {clocks[slow] / usual:.0%} of the others' clock", slow,
        int(share * facts.window_ns), tuple(evidence), "check nvidia-smi -q -d PERFORMANCE for throttling; swap or cool it",
        (), ceiling=share,
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


def memory_limit(facts: Facts) -> list[Draft]:
    """KV memory, not the cap, keeps requests waiting."""
    usage, waiting = facts.server("kv", "token_usage"), facts.waiting()
    if not isinstance(usage, int | float) or usage < 0.9 or not waiting:
        return []
    return [Draft(
        "kv_memory", f"KV memory is {percent(float(usage))} full and {waiting} requests wait", None, facts.cause_ns(None, "no_work"),
        (f"token usage {usage} of {facts.server('kv', 'capacity')} tokens",),
        "--mem-fraction-static higher, an fp8 KV cache (--kv-cache-dtype fp8_e4m3), or fewer tokens a request", (), ceiling=0.0,
    )]  # fmt: skip


RULES = (
    imbalance, cuda_graphs, stage_kernels, recaptured, back_pressure, control_messages, late_rank, slow_link, moe_spread, straggling_gpu, prefill, memory_limit,
)  # fmt: skip

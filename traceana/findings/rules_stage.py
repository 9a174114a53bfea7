"""Rules about stages: imbalance, CUDA graphs, host time, links, MoE spread, straggling GPUs, prefill, memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from traceana.findings.facts import Facts, Row, ints, ms, number, percent
from traceana.findings.finding import Draft

__all__ = ["RULES"]

# Spans whose work differs by role: the first stage hears clients where others hear their neighbour, the last samples.
_BY_ROLE = ("between spans", "recv_requests", "process_input_requests", "run_batch", "graph launch")
_FASTER_HOST = "larger micro-batches, so that each host pass serves more tokens; faster host cores"
# A finding below this share of the window is noise to the reader: identical runs differ by more.
_FLOOR = 0.03


def imbalance(facts: Facts) -> Draft | None:
    """One stage's GPU time a step is above the others', and it bounds the period or nearly does."""
    stages = facts.rows_of_bound()
    if len(stages) < 2 or not facts.period_ns:
        return None
    times = [number(s, "t_ns") for s in stages]
    slowest, mean = max(times), sum(times) / len(times)
    share = (slowest - mean) / facts.period_ns
    if share < _FLOOR:
        return None
    who = times.index(slowest)
    layers = facts.server("layers_by_rank")
    known = [int(x) for x in layers] if isinstance(layers, list) and len(layers) == len(times) else None
    evidence = [f"GPU time a step: {', '.join(f'stage {i} {ms(t)}' for i, t in enumerate(times))}"]
    action = "move layers from the slowest stage: SGLANG_PP_LAYER_PARTITION"
    changes: tuple[str, ...] = ()
    if known is not None:
        better = balanced(times, known)
        evidence.append(f"layers now: {ints(known)}; embedding, lm_head and sampling are counted where they run")
        if better != known:
            text = ",".join(str(x) for x in better)
            action, changes = f"SGLANG_PP_LAYER_PARTITION={text}", (f"pp_layer_partition={text}",)
    idle = sum(number(s, "imbalance_ns") for s in stages)
    return Draft(
        "stage_imbalance", f"Stage {who} does more work than the others: {ms(slowest)} a step against {ms(mean)} on average",
        number(stages[who], "rank"), int(idle * facts.steps), tuple(evidence), action, changes, ceiling=share,
    )  # fmt: skip


def balanced(times: list[int], layers: list[int]) -> list[int]:
    """The partition of the same layers with the smallest slowest stage: time of a layer from the stages that hold
    most of them, what is left over (embedding, lm_head, sampling) stays with its stage."""
    order = sorted(range(len(times)), key=lambda i: times[i] / max(layers[i], 1))
    per_layer = times[order[0]] / max(layers[order[0]], 1)
    fixed = [max(0.0, t - n * per_layer) for t, n in zip(times, layers, strict=True)]
    out = [1] * len(layers)
    for _ in range(sum(layers) - len(layers)):
        cheapest = min(range(len(out)), key=lambda i: (fixed[i] + (out[i] + 1) * per_layer, i))
        out[cheapest] += 1
    return out


def cuda_graphs(facts: Facts) -> Draft | None:
    """Decode forwards that were launched kernel by kernel."""
    ranks = facts.rows("cuda_graph")
    modes = [m for r in ranks for m in cast("list[Row]", r.get("by_mode") or []) if m.get("mode") == "decode"]
    forwards, graphed = sum(number(m, "forwards") for m in modes), sum(number(m, "graphed") for m in modes)
    if forwards == 0 or graphed * 10 >= forwards * 9:
        return None
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
    return Draft(
        "cuda_graphs_off",
        title,
        None,
        lost,
        tuple(evidence),
        action,
        ("disable_cuda_graph=false",),
        ceiling=lost / total,
    )


def host_span(facts: Facts) -> Draft | None:
    """One stage's scheduler spends far longer in a span than the other stages' do, and GPUs wait for it."""
    spans = facts.rows("host_spans")
    by_span: dict[str, list[Row]] = {}
    for row in spans:
        by_span.setdefault(str(row["span"]), []).append(row)
    best: Draft | None = None
    for span, rows in by_span.items():
        if len(rows) < 2:
            continue
        rows = sorted(rows, key=lambda r: -number(r, "mean_ns"))
        slow, rest = rows[0], rows[1:]
        usual = sorted(number(r, "mean_ns") for r in rest)[len(rest) // 2]
        excess = number(slow, "mean_ns") - usual
        lost = facts.blamed_ns(root=number(slow, "rank"), cause="host_schedule", detail=span)
        if not facts.period_ns or excess < _FLOOR * facts.period_ns or number(slow, "mean_ns") < 2 * usual or lost == 0:
            continue
        if (span in _BY_ROLE or "_dict_" in span or span.startswith("send_")) and excess < max(
            4 * usual, 0.15 * facts.period_ns
        ):
            continue
        stage = facts.document_stage(number(slow, "rank"))
        draft = Draft(
            "host_span",
            f"The scheduler of stage {stage} is slow in {span}: {ms(number(slow, 'mean_ns'))} a visit, {ms(usual)} elsewhere",
            number(slow, "rank"),
            lost,
            (
                f"{span}: {ms(number(slow, 'mean_ns'))} a visit on stage {stage}, {ms(usual)} on the others (profiled)",
                f"stages idle {ms(lost / facts.steps)} a step for it; what hides behind other waits costs nothing",
            ),
            f"find what stage {stage} does in {span}: py-spy dump --pid {_pid(facts, number(slow, 'rank'))}",
            (f"host {stage}=-{excess / 1e6:.3f}ms",),
            ceiling=min(excess / facts.period_ns, lost / facts.window_ns),
        )
        if best is None or draft.ceiling > best.ceiling:
            best = draft
    return best


def _pid(facts: Facts, rank: int) -> str:
    pids = facts.server("pid_by_rank")
    for row in pids if isinstance(pids, list) else []:
        if isinstance(row, Mapping) and row.get("rank") == rank:
            return str(row.get("pid"))
    return "PID"


def host_bound(facts: Facts) -> Draft | None:
    """The hosts, not the GPUs, bound the period, on every stage alike."""
    bound = facts.part("model")
    terms = bound.get("terms_ns")
    if not isinstance(terms, Mapping) or not facts.period_ns:
        return None
    host = max(number(terms, "host"), number(terms, "last_stage_serial"))
    extra = host - number(terms, "compute")
    if extra < 0.1 * facts.period_ns:
        return None
    lost = facts.cause_ns(None, "host_schedule", "host_launch", "host_sync")
    if lost < _FLOOR * facts.window_ns * len(facts.stages):
        return None
    depth = facts.server_int("async_depth")
    serial = number(terms, "last_stage_serial") >= number(terms, "host")
    evidence = (
        f"a step needs {ms(number(terms, 'compute'))} of GPU time and {ms(host)} of serial host time"
        + (" (the last stage waits for its own forward before it goes on)" if serial else ""),
        f"stages idle {ms(lost / facts.steps)} a step, all stages together, while a host schedules or launches (profiled)",
    )
    if serial and depth == 0:
        cap = facts.server_int("micro_batch_cap")
        total = facts.running() + (facts.waiting() or 0)
        pp = number(facts.part("pipeline"), "pp_size")
        wanted = max(1, -(-total // (pp + 1)))
        changes: tuple[str, ...] = ("pp_async_batch_depth=1", f"pp_max_micro_batch_size={min(wanted, cap or wanted)}")
        action = f"--pp-async-batch-depth 1 --pp-max-micro-batch-size {min(wanted, cap or wanted)}"
    else:
        changes, action = (), _FASTER_HOST
    return Draft(
        "host_bound", "The hosts bound the period, not the GPUs", None, lost, evidence, action, changes,
        ceiling=0.0 if not changes else extra / facts.period_ns, fallback=_FASTER_HOST,
    )  # fmt: skip


def back_pressure(facts: Facts) -> Draft | None:
    """Transfers that stages sit out, or sends that wait for the next stage to take them."""
    total = facts.window_ns * max(1, len(facts.stages))
    moving = sum(number(s, "transfer_ns") for s in facts.stages) + facts.cause_ns(None, "p2p_transfer_wait")
    held = sum(
        number(cast("Row", link["send_wait_ns"]), "p50_ns") * number(link, "count") for link in facts.rows("p2p")
    )
    lost = moving + held
    if not facts.is_pipeline or lost < _FLOOR * total:
        return None
    return Draft(
        "exposed_p2p", f"Stages sit out {percent(lost / total)} of the window while activations move between them", None, lost,
        (f"transfer {ms(moving / facts.steps)} and blocked sends {ms(held / facts.steps)} a step, all stages together",),
        "SGLANG_PP_COMM_OVERLAP=1", (), ceiling=lost / total,
    )  # fmt: skip


def slow_link(facts: Facts) -> Draft | None:
    """One link moves the same messages far slower than the others."""
    links = [
        link
        for link in facts.rows("p2p")
        if link.get("kind") == "proxy" and isinstance(link.get("gbps_p50"), int | float)
    ]
    rates = sorted(float(cast("float", link["gbps_p50"])) for link in links)
    if len(rates) < 3:
        return None
    usual = rates[len(rates) // 2]
    slow = min(links, key=lambda link: float(cast("float", link["gbps_p50"])))
    rate = float(cast("float", slow["gbps_p50"]))
    cost = number(cast("Row", slow["transfer_ns"]), "p50_ns") * number(slow, "count")
    if rate * 2 > usual or cost < _FLOOR * facts.window_ns:
        return None
    return Draft(
        "slow_link", f"The link {slow['src']} to {slow['dst']} is slow: {rate:.0f} Gbit/s where others reach {usual:.0f}", None, cost,
        (f"{slow['count']} messages of {slow['bytes']} bytes, {ms(number(cast('Row', slow['transfer_ns']), 'p50_ns'))} each (median)",),
        "check the topology (nvidia-smi topo -m) and place neighbouring stages on linked GPUs",
        (f"link {slow['src']}-{slow['dst']}={rate / usual:.3f}",), ceiling=cost / facts.window_ns,
    )  # fmt: skip


def moe_spread(facts: Facts) -> Draft | None:
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
        return None
    spread = cast("Row", worst[1]["per_forward_ns"])
    extra = number(spread, "p99_ns") - number(spread, "p50_ns")
    if extra < _FLOOR * (facts.period_ns or 0) or len(set(facts.slot_sizes())) > 1:
        return None
    return Draft(
        "moe_spread", f"MoE time varies between micro-batches: {ms(number(spread, 'p50_ns'))} median, {ms(number(spread, 'p99_ns'))} at p99",
        number(worst[1], "rank"), extra, (f"over {spread['count']} forwards of rank {worst[1]['rank']} with equal batch sizes",),
        "balance experts (--enable-eplb), or compare the micro-batches' token mix", (), ceiling=0.0,
    )  # fmt: skip


def straggling_gpu(facts: Facts) -> Draft | None:
    """One GPU clocks lower than the others, or sits at its power limit, and its stage is slower."""
    gpus = [g for g in facts.rows("gpu") if isinstance(cast("Row", g["clocks_mhz"]).get("p50"), int | float)]
    if len(gpus) < 2:
        return None
    clocks = {number(g, "rank"): float(cast("float", cast("Row", g["clocks_mhz"])["p50"])) for g in gpus}
    slow = min(clocks, key=lambda r: (clocks[r], r))
    usual = sorted(clocks.values())[len(clocks) // 2]
    times = {number(s, "rank"): number(s, "t_ns") for s in facts.rows_of_bound()}
    if clocks[slow] > 0.93 * usual or (times and times.get(slow, 0) < max(times.values())):
        return None
    power = cast("Row", next(g for g in gpus if g["rank"] == slow)["power_w"])
    limit = power.get("limit")
    evidence = [f"SM clock {clocks[slow]:.0f} MHz on rank {slow}, {usual:.0f} on the others (median)"]
    if isinstance(limit, int | float) and number(power, "p50") > 0.95 * limit:
        evidence.append(f"it draws {power['p50']:.0f} W of a limit of {limit:.0f} W")
    share = 1 - clocks[slow] / usual
    return Draft(
        "straggling_gpu", f"The GPU of rank {slow} runs at {clocks[slow] / usual:.0%} of the others' clock", slow,
        int(share * facts.window_ns), tuple(evidence), "check nvidia-smi -q -d PERFORMANCE for throttling; swap or cool it",
        (), ceiling=share,
    )  # fmt: skip


def prefill(facts: Facts) -> Draft | None:
    """Prefill among decode: decode micro-batches wait for long forwards."""
    by_mode: dict[str, int] = {}
    for row in facts.rows("forward_modes"):
        by_mode[str(row["mode"])] = by_mode.get(str(row["mode"]), 0) + number(row, "total_ns")
    extend = sum(v for k, v in by_mode.items() if k in ("extend", "mixed"))
    decode = by_mode.get("decode", 0)
    if not extend or not decode or extend < 0.1 * (extend + decode):
        return None
    return Draft(
        "prefill_among_decode", f"Prefill takes {percent(extend / (extend + decode))} of the stages' forward time and decode waits for it",
        None, facts.blamed_ns(cause="upstream_compute", detail="workload"),
        (f"forwards in the window: decode {ms(decode)}, prefill {ms(extend)}, all stages together",),
        "smaller --chunked-prefill-size, or --enable-mixed-chunk, or separate prefill (PD disaggregation)", (), ceiling=0.0,
    )  # fmt: skip


def memory_limit(facts: Facts) -> Draft | None:
    """KV memory, not the cap, keeps requests waiting."""
    usage, waiting = facts.server("kv", "token_usage"), facts.waiting()
    if not isinstance(usage, int | float) or usage < 0.9 or not waiting:
        return None
    return Draft(
        "kv_memory", f"KV memory is {percent(float(usage))} full and {waiting} requests wait", None, facts.cause_ns(None, "no_work"),
        (f"token usage {usage} of {facts.server('kv', 'capacity')} tokens",),
        "--mem-fraction-static higher, an fp8 KV cache (--kv-cache-dtype fp8_e4m3), or fewer tokens a request", (), ceiling=0.0,
    )  # fmt: skip


RULES = (
    imbalance, cuda_graphs, host_span, host_bound, back_pressure, slow_link, moe_spread, straggling_gpu, prefill, memory_limit,
)  # fmt: skip

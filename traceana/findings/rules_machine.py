"""Rules about what lies between and under the stages: messages, links, late ranks, straggling GPUs, KV memory."""

from __future__ import annotations

from typing import cast

from traceana.findings.facts import Facts, Row, held, ms, number, percent
from traceana.findings.finding import FLOOR, Draft

__all__ = ["RULES"]

_FULL = 0.9  # a KV pool this full takes no request that needs more than a little


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
        "straggling_gpu", f"The GPU of rank {slow} runs at {percent(clocks[slow] / usual)} of the others' clock", slow,
        int(share * facts.window_ns), tuple(evidence), "check nvidia-smi -q -d PERFORMANCE for throttling; swap or cool it",
        (), ceiling=share,
    )]  # fmt: skip


def memory_limit(facts: Facts) -> list[Draft]:
    """KV memory, not the cap, keeps requests waiting; and which stage's memory is the least."""
    usage, waiting, sizes = facts.server("kv", "token_usage"), facts.waiting(), facts.slot_sizes()
    if not isinstance(usage, int | float) or usage < _FULL or not waiting or not sizes:
        return []
    cap, running = facts.server_int("micro_batch_cap"), facts.running()
    if cap is not None and min(sizes) >= cap:
        return []  # the cap would hold them back as well
    evidence = [f"token usage {usage:g} of {facts.server_int('kv', 'capacity')} tokens, with {held(sizes)} running"]
    tokens = facts.server_int("kv", "tokens")
    if tokens and running:
        evidence.append(
            f"a request holds about {tokens // running} tokens: {waiting} more need {waiting * (tokens // running)}"
        )
    action = "an fp8 KV cache (--kv-cache-dtype fp8_e4m3), or fewer tokens a request"
    stages = [m for m in cast("list[Row]", facts.server("memory_by_rank") or []) if _gb(m, "kv_gb") is not None]
    evidence += [f"{facts.name(m['rank'])}: {_memory_words(m)}" for m in stages]
    free = [left for m in stages if (left := _gb(m, "available_gb")) is not None]
    if free and min(free) > 0.1 * max(_gb(m, "kv_gb") or 0.0 for m in stages):
        action = f"--mem-fraction-static higher ({min(free):.0f} GB are free on the fullest stage); {action}"
    if facts.is_pipeline and len(free) == len(stages) > 1 and max(free) - min(free) > 0.1 * max(free):
        least, most = (facts.name(stages[free.index(f(free))]["rank"]) for f in (min, max))
        evidence.append(
            f"all stages have the pool of the one with the least memory, {least}: {max(free) - min(free):.0f} GB of {most}"
            " serve nothing until layers move there (SGLANG_PP_LAYER_PARTITION)"
        )
    evidence.append("the prediction is for a pool that holds all of them")
    return [Draft(
        "kv_memory", f"KV memory is {percent(float(usage))} full and {waiting} requests wait for it", None,
        facts.cause_ns(None, "no_work", "upstream_compute"), tuple(evidence), action,
        (f"concurrency={running + waiting}",), ceiling=0.0,
    )]  # fmt: skip


def _gb(row: Row, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else None


def _memory_words(row: Row) -> str:
    """`19.4 GB of weights, 63.6 GB of KV, 0.04 GB of graphs, 55.1 GB free`."""
    kinds = (
        ("weight_gb", "of weights"), ("kv_gb", "of KV"), ("graph_gb", "of graphs"), ("available_gb", "free"),
    )  # fmt: skip
    return ", ".join(f"{value:.3g} GB {words}" for key, words in kinds if (value := _gb(row, key)) is not None)


RULES = (back_pressure, control_messages, late_rank, slow_link, straggling_gpu, memory_limit)

"""Rules about a pipe that is not full: the cap, greedy filling, too few requests, too few slots."""

from __future__ import annotations

from traceana.findings.facts import Facts, held, number, percent
from traceana.findings.finding import Draft

__all__ = ["RULES", "capped", "few_requests", "few_slots", "unequal_slots"]

_WAITS = ("no_work", "upstream_compute", "downstream_backpressure", "control_message", "p2p_transfer_wait")


def _cap_words(facts: Facts) -> str:
    cap, source = facts.server_int("micro_batch_cap"), facts.server("cap_source")
    if cap is None:
        return "the cap is unknown (no server facts)"
    if isinstance(source, str) and source.startswith("auto"):
        most, pp = facts.server_int("max_running_requests"), facts.server_int("pp_size")
        return f"cap {cap} a slot = max_running_requests {most} // pp_size {pp} (automatic)"
    return f"cap {cap} a slot (--pp-max-micro-batch-size)"


def capped(facts: Facts) -> list[Draft]:
    """Requests wait in the queue while every slot is at the cap."""
    cap, waiting, sizes = facts.server_int("micro_batch_cap"), facts.waiting(), facts.slot_sizes()
    if not facts.is_pipeline or cap is None or not waiting or not sizes or max(sizes) < cap or facts.running() == 0:
        return []
    slots = len(sizes)
    total = facts.running() + waiting
    wanted = -(-total // slots)
    pp = facts.server_int("pp_size") or slots
    most = max(wanted * slots, wanted * pp)
    action = f"--max-running-requests {most} --pp-max-micro-batch-size {wanted}"
    limit = facts.server_int("max_running_requests")
    at_cap = min(sizes) >= cap or limit is None or facts.running() < limit
    holds = "The micro-batch cap holds" if at_cap else f"max_running_requests {limit} holds"
    return [
        Draft(
            "micro_batch_cap",
            f"{holds} back {waiting} waiting requests: {held(sizes)} run in {slots} slots",
            None,
            facts.cause_ns(None, *_WAITS),
            (
                f"{waiting} requests in the queue (median of the log) while "
                + ("each slot is at its cap" if at_cap else f"{facts.running()} run"),
                _cap_words(facts),
                f"{total} requests over {slots} slots would be {wanted} a slot: more share each step, beside the idle time",
            ),
            action,
            (f"max_running_requests={most}", f"pp_max_micro_batch_size={wanted}"),
            ceiling=waiting / total,
        )
    ]


def unequal_slots(facts: Facts) -> list[Draft]:
    """Greedy filling left slots empty or nearly so while others are full, and nothing waits."""
    sizes = facts.slot_sizes()
    total = sum(sizes)
    if not facts.is_pipeline or len(sizes) < 2 or total < 2 or (facts.waiting() or 0) > 0:
        return []
    largest = max(sizes)
    useful = [s for s in sizes if 2 * s >= largest]
    if len(useful) == len(sizes) or largest < 2:
        return []
    even = -(-total // len(sizes))
    pp = number(facts.part("pipeline"), "pp_size")
    limit = min(1.0, len(useful) / max(pp, 1))
    plural = "micro-batch" if len(useful) == 1 else "micro-batches"
    empty = sum(s == 0 for s in sizes)
    evidence = [
        f"{'slots hold ' if len(sizes) <= 4 else ''}{held(sizes)}; slots are filled greedily, in visiting order",
        _cap_words(facts),
    ]
    if empty:
        evidence.append(
            f"{len(sizes) - empty} of the {len(sizes)} slots {'is' if len(sizes) - empty == 1 else 'are'} filled"
        )
    evidence.append(
        f"{len(useful)} useful {plural} for {pp} stages: at most {percent(limit)} utilisation if a micro-batch costs the same at any size"
    )
    full, most = facts.server_int("micro_batch_cap"), facts.server_int("max_running_requests") or 0
    caps = dict.fromkeys((even, max(1, -(-total // max(pp, 1)))))
    alternatives = [
        (f"--pp-max-micro-batch-size {cap}", (f"pp_max_micro_batch_size={cap}",)) for cap in caps if cap != even
    ]
    if full is not None and full * len(sizes) > total and most > total:
        more = min(full * len(sizes), most)
        words = f"send up to {more} requests at once, so that greedy filling reaches every slot"
        alternatives.append((words, (f"concurrency={more}",)))
    return [
        Draft(
            "greedy_slots",
            f"The pipe holds {_word(len(useful))} useful {plural}: "
            + (f"slots of {held(sizes)} requests" if len(sizes) <= 4 else held(sizes)),
            None,
            facts.cause_ns(None, *_WAITS),
            tuple(evidence),
            f"--pp-max-micro-batch-size {even}",
            (f"pp_max_micro_batch_size={even}",),
            ceiling=max(0.0, 1 - limit),
            alternatives=tuple(alternatives),
        )
    ]


def _word(n: int) -> str:
    return {1: "one", 2: "two", 3: "three", 4: "four"}.get(n, str(n))


def few_requests(facts: Facts) -> list[Draft]:
    """Nothing waits, the slots are alike, and far fewer requests run than the server may hold."""
    sizes, cap = facts.slot_sizes(), facts.server_int("micro_batch_cap")
    total = sum(sizes)
    waiting = facts.waiting()
    if not facts.is_pipeline or not sizes or total == 0 or cap is None or waiting is None or waiting > 0:
        return []
    room = min(cap * len(sizes), facts.server_int("max_running_requests") or cap * len(sizes))
    if facts.prefills():
        return []  # a prefill's batch says how many prompts fit it, not how many requests run
    if total >= len(sizes) and 4 * total > room and any(2 * size < max(sizes) for size in sizes):
        return []  # then the slots are the problem before the requests are
    if total * 2 > room:
        return []
    clients = facts.server_int("clients", "concurrency")
    filled = sum(s > 0 for s in sizes)
    evidence = [
        f"{total} {'request runs' if total == 1 else 'requests run'} in {filled} of {len(sizes)} slots ({held(sizes)}),"
        f" none waits, {room} would fit",
    ]
    if clients is not None:
        evidence.append(f"the client kept {clients} requests open")
    return [
        Draft(
            "few_requests",
            f"Too few requests arrive: {total} in the whole server, room for {room}",
            None,
            facts.cause_ns(None, *_WAITS),
            tuple(evidence),
            f"send more requests at once (up to {room}); no server flag can fill micro-batches that nobody sends",
            (f"concurrency={room}",),
            ceiling=1 - total / room,
        )
    ]


def few_slots(facts: Facts) -> list[Draft]:
    """All slots are filled, and the ring still limits the period: more micro-batches must be in flight."""
    bound = facts.part("model")
    needed, have = bound.get("needed_in_flight"), bound.get("in_flight")
    sizes = facts.slot_sizes()
    if (
        bound.get("binding_term") != "ring"
        or not isinstance(needed, int)
        or not isinstance(have, int)
        or needed <= have
    ):
        return []
    if not sizes or 0 in sizes or facts.prefills():
        return []
    depth = (facts.server_int("async_depth") or 0) + needed - have
    pp = number(facts.part("pipeline"), "pp_size")
    total = facts.running() + (facts.waiting() or 0)
    cap = max(1, -(-total // (pp + depth)))
    under = sum(number(s, "under_filled_ns") for s in facts.rows_of_bound())
    return [
        Draft(
            "few_slots",
            f"Too few micro-batches in flight: {have}, and {needed} would be needed to hide the hops between stages",
            None,
            int(under * facts.steps),
            (
                f"the ring term binds: one round trip of a micro-batch takes {have} periods",
                f"{have} slots = pp_size {pp} + async depth {facts.server_int('async_depth') or 0}",
            ),
            f"--pp-async-batch-depth {depth} --pp-max-micro-batch-size {cap}",
            (f"pp_async_batch_depth={depth}", f"pp_max_micro_batch_size={cap}"),
            ceiling=under / max(1, facts.period_ns or 1) / max(1, len(facts.rows_of_bound())),
        )
    ]


RULES = (capped, unequal_slots, few_requests, few_slots)

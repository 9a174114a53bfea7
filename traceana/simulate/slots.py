"""Which slot holds how many requests: SGLang's greedy admission, played until every request that can run does.

A slot takes from the shared queue up to its cap when it is visited, slots are visited in turn, and a request stays in
its slot for life (docs/concepts/whatif.md). Nothing balances slots, so the order of arrival decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

__all__ = ["ARRIVALS", "Admission", "admission", "arrivals_that_explain", "fill"]

# The first request finds an idle server, whose next visit takes it alone; the rest come while its prefill runs. Or all
# are there at once.
FIRST_ALONE, TOGETHER = "one first", "together"
ARRIVALS = (FIRST_ALONE, TOGETHER)


@dataclass(frozen=True, slots=True)
class Admission:
    """What decides how slots fill. `cap`: requests of a slot; `auto`: the cap follows max_running // pp_size;
    `per_visit`: requests whose prompts fit one prefill; `clients`: requests in the closed loop. None: unlimited."""

    pp_size: int
    depth: int
    cap: int | None
    auto: bool
    max_running: int | None
    clients: int
    per_visit: int | None = None

    @property
    def slots(self) -> int:
        """Slots of the loop."""
        return self.pp_size + self.depth

    @property
    def slot_cap(self) -> int | None:
        """Requests a slot may hold; the automatic rule divides by the stages, not by the slots."""
        if self.auto and self.max_running is not None:
            return max(self.max_running // self.pp_size, 1)
        return self.cap

    @property
    def running(self) -> int:
        """Requests that run at once."""
        limits = [self.clients]
        if self.max_running is not None:
            limits.append(self.max_running)
        if self.slot_cap is not None:
            limits.append(self.slot_cap * self.slots)
        return max(0, min(limits))


def admission(facts: Mapping[str, object], pp_size: int, depth: int, seen: Sequence[int]) -> Admission:
    """The admission of the capture: from the server's facts, and where they are silent from the batches `seen`."""

    def integer(value: object) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def entry(name: str, key: str) -> int | None:
        part = facts.get(name)
        return integer(cast("Mapping[str, object]", part).get(key)) if isinstance(part, Mapping) else None

    running = sum(seen)
    queue = entry("queue", "p50") or 0
    clients = entry("clients", "concurrency") or running + queue
    chunk = integer(facts.get("chunked_prefill_size"))
    prompt = None
    load = facts.get("clients")
    if isinstance(load, Mapping):
        tokens = cast("Mapping[str, object]", load).get("input_tokens")
        prompt = integer(cast("Mapping[str, object]", tokens).get("p50")) if isinstance(tokens, Mapping) else None
    per_visit = max(1, chunk // prompt) if chunk is not None and chunk > 0 and prompt else None
    return Admission(
        pp_size=pp_size,
        depth=depth,
        cap=integer(facts.get("micro_batch_cap")),
        auto=str(facts.get("cap_source") or "").startswith("auto"),
        max_running=integer(facts.get("max_running_requests")),
        clients=max(clients, running),
        per_visit=per_visit,
    )


def fill(rule: Admission, arrival: str) -> tuple[int, ...]:
    """Requests of each slot once all that can run have been admitted."""
    slots = [0] * rule.slots
    room = rule.slot_cap if rule.slot_cap is not None else rule.running
    waiting = rule.running
    visit = 0
    if arrival == FIRST_ALONE and waiting:
        slots[0], waiting, visit = 1, waiting - 1, 1
    while waiting > 0:
        slot = visit % rule.slots
        taken = min(room - slots[slot], waiting, rule.per_visit or waiting)
        slots[slot] += taken
        waiting -= taken
        visit += 1
    return tuple(slots)


def arrivals_that_explain(rule: Admission, seen: Sequence[int]) -> tuple[str, ...]:
    """The orders of arrival under which the rule fills the slots as `seen` (which slot is which does not matter), the
    likeliest first; none where the rule does not explain them."""
    wanted = sorted(seen)
    return tuple(a for a in ARRIVALS if sorted(fill(rule, a)) == wanted)

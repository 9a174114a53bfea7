"""Merging: what if a busy stage took all waiting micro-batches at once? SGLang has no such mode
(docs/concepts/whatif.md).

The slots' lockstep does not hold then, so stages are queues in a ring: a stage that becomes free takes everything
that waits for it as one micro-batch, and what was merged stays together. Service times are those of the slot
simulator: the longer of GPU and host time; what a round takes beyond them is kept, per forward of the last stage at
async depth 0 (it waits for its own forward), per hop otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from traceana.simulate.growth import PPM

__all__ = ["merged_ratio", "ring_ns"]

_SERVICES = 400


def merged_ratio(
    pattern: Sequence[int], round_ns: int, service: Sequence[Callable[[int], int]], *, serial_last: bool
) -> int:
    """Throughput with merging over throughput without, ppm. `pattern` are the slots' batches, `round_ns` a round
    without merging, `service[stage](batch)` the time a stage is taken by a batch."""
    groups = [b for b in pattern if b]
    if len(groups) < 2:
        return PPM
    taken = [[of(b) for b in groups] for of in service]
    bound = max(max(sum(t) for t in taken), max(sum(t[g] for t in taken) for g in range(len(groups))))
    rest = max(0, round_ns - bound)
    after = [0] * len(service)
    more = [0] * len(service)
    if serial_last:
        more[-1] = rest // len(groups)
    else:
        after = [rest // len(service)] * len(service)
    apart = ring_ns(groups, service, more, after, merge=False)
    merged = ring_ns(groups, service, more, after, merge=True)
    return apart * PPM // max(merged, 1)


def ring_ns(
    groups: Sequence[int],
    service: Sequence[Callable[[int], int]],
    more: Sequence[int],
    after: Sequence[int],
    *,
    merge: bool,
) -> int:
    """Mean ns in which every request gets a token, of a ring of queues. `more` is added to a stage's service, `after`
    is the way to the next stage."""
    stages = len(service)
    waiting: list[list[tuple[int, int, int]]] = [[] for _ in range(stages)]
    number = 0
    for group in groups:
        heappush(waiting[0], (0, number, group))
        number += 1
    free = [0] * stages
    done: list[tuple[int, int]] = []  # (time, tokens) at the last stage
    for _ in range(_SERVICES * stages):
        # The stage that can begin first, the later stage on a tie: it drains the ring.
        begin, stage = min((max(free[s], waiting[s][0][0]), -s) for s in range(stages) if waiting[s])
        stage = -stage
        batch = heappop(waiting[stage])[2]
        while merge and waiting[stage] and waiting[stage][0][0] <= begin:
            batch += heappop(waiting[stage])[2]
        end = begin + service[stage](batch) + more[stage]
        free[stage] = end
        heappush(waiting[(stage + 1) % stages], (end + after[stage], number, batch))
        number += 1
        if stage == stages - 1:
            done.append((end, batch))
    half = len(done) // 2
    tokens = sum(batch for _, batch in done[half:-1])
    span = done[-1][0] - done[half][0]
    return span * sum(groups) // max(tokens, 1)

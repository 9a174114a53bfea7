"""SGLang's pipeline loop as a discrete-event model: `event_loop_pp` in program order, one host clock a stage, and the
ends of what its schedule, forward, NCCL and copy streams have been given.

Only what orders the stages is modelled: gloo messages (a send's commit returns when the peer has posted its receive),
NCCL messages (a send is eager within the channel's credit), streams that wait for each other, and the sync on the
copied result. All times are integer nanoseconds from the loop's start.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from traceana.errors import ModelError

__all__ = ["Hops", "Loop", "Run", "Step", "simulate"]

_Need: TypeAlias = "tuple[list[int], int]"
_Program: TypeAlias = "Generator[_Need, None, None]"
_COMMIT, _SEND, _RECEIVE, _COPY, _FORWARD = range(5)


class Step(NamedTuple):
    """One visit of one stage: host work before each point of the loop (see `traceana.simulate.marks`), in ns, and its
    forward. `batch` is 0 in a slot without a batch; `gpu` is the forward's GPU time, `graph` whether one launch holds
    most of it (it then starts when the launch returns), `last` the kernel that the last launch call brings;
    `side_before` and `side_after` are GPU time of the scheduler's own kernels ahead of the forward and behind it,
    `head` of the forward's kernels ahead of its graph, launched when `head_at` (ppm) of `prepare` have passed."""

    receive: int = 0
    ingest: int = 0
    commit_requests: int = 0
    send_requests: int = 0
    schedule: int = 0
    await_proxy: int = 0
    receive_proxy: int = 0
    commit_output: int = 0
    send_output: int = 0
    post_output: int = 0
    await_result: int = 0
    receive_result: int = 0
    commit_proxy: int = 0
    prepare: int = 0
    launch: int = 0
    tail: int = 0
    after_launch: int = 0
    before_sync: int = 0
    process: int = 0
    send_proxy: int = 0
    post_proxy: int = 0
    finish: int = 0
    wake: int = 0
    batch: int = 0
    gpu: int = 0
    last: int = 0
    graph: bool = True
    side_before: int = 0
    side_after: int = 0
    head: int = 0
    head_at: int = 0


@dataclass(frozen=True, slots=True)
class Hops:
    """Costs of the hop from a stage to the next one, in ns: gloo messages by kind (from the later of both calls to the
    receive's end), the NCCL kernels (floors), and the copy of a result to the host on the receiver. `eager` is false
    where an activation message exceeds the channel's credit: its send then ends with the receive."""

    requests: int = 0
    proxy: int = 0
    output: int = 0
    send_proxy: int = 0
    recv_proxy: int = 0
    send_output: int = 0
    recv_output: int = 0
    copy: int = 0
    eager: bool = True


@dataclass(frozen=True, slots=True)
class Loop:
    """A server to simulate. `steps[stage]` repeats: visit v of a stage takes `steps[stage][v % len]`; `hops[stage]`
    leads to the next stage (the last one's to the first). `one_stream`: all NCCL messages of a rank share one stream.
    `lags[stage]`: what a graph's forward takes beyond its GPU time where its launch came last, and where its stream's
    other work did. `receives_first[stage]`: results come in before they go out; `copies_last[stage]`: their copy to
    the host then waits for what the schedule stream was given for both."""

    steps: Sequence[Sequence[Step]]
    hops: Sequence[Hops]
    depth: int = 0
    one_stream: bool = False
    lags: Sequence[tuple[int, int]] = ()
    receives_first: Sequence[bool] = ()
    copies_last: Sequence[bool] = ()

    @property
    def slots(self) -> int:
        """Slots of the loop."""
        return len(self.steps) + self.depth


@dataclass(frozen=True, slots=True)
class Run:
    """`starts[stage]`: when each visit began; `ends[stage]`: when the forward of each visit with a batch was done."""

    starts: Sequence[Sequence[int]]
    ends: Sequence[Sequence[int]]


@dataclass(slots=True)
class _Wires:
    """What one stage has sent to the next one and what the next one has asked for, by kind, in order."""

    requests: list[int] = field(default_factory=list[int])
    requests_asked: list[int] = field(default_factory=list[int])
    proxy: list[int] = field(default_factory=list[int])
    proxy_asked: list[int] = field(default_factory=list[int])
    proxy_sent: list[int] = field(default_factory=list[int])
    proxy_taken: list[int] = field(default_factory=list[int])
    output: list[int] = field(default_factory=list[int])
    output_asked: list[int] = field(default_factory=list[int])
    output_sent: list[int] = field(default_factory=list[int])


def simulate(loop: Loop, visits: int) -> Run:
    """Plays `visits` visits of the first stage. Raises ModelError where the stages wait for each other for ever."""
    pp = len(loop.steps)
    wires = [_Wires() for _ in range(pp)]
    starts: list[list[int]] = [[] for _ in range(pp)]
    ends: list[list[int]] = [[] for _ in range(pp)]
    programs = [_stage(loop, s, visits, wires, starts[s], ends[s]) for s in range(pp)]
    needs: list[_Need] = [([0], 0)] * pp
    while True:
        moved = False
        for s, program in enumerate(programs):
            have, index = needs[s]
            while len(have) > index:
                moved = True
                try:
                    have, index = next(program)
                except StopIteration:
                    if s == 0:
                        return Run(starts, ends)
                    have, index = [], 0
            needs[s] = (have, index)
        if not moved:
            raise ModelError("the simulated stages wait for each other", hint="report this as a bug")


def _stage(loop: Loop, s: int, visits: int, wires: list[_Wires], starts: list[int], ends: list[int]) -> _Program:
    # Played millions of times: the later of two is told without a call of max.
    pp, depth, slots = len(loop.steps), loop.depth, loop.slots
    mine, before = wires[s], wires[s - 1]
    out, into = loop.hops[s], loop.hops[s - 1]
    steps = loop.steps[s]
    cycle = len(steps)
    filled = [steps[v % cycle].batch > 0 for v in range(visits)]
    launched = list(accumulate(filled, initial=0))  # forwards before each visit
    first, last = s == 0, s == pp - 1
    after_launch, after_stream = loop.lags[s] if loop.lags else (0, 0)
    one = loop.one_stream or pp == 2  # two stages are one pair, and a pair has one stream
    host = schedule = forward = copied = 0
    nccl_next = nccl_previous = 0
    proxy_end = output_end = -1  # ends of the sends that are not committed yet
    proxies = outputs = taken = received = 0  # messages so far, of each kind and side
    waiting_output = passing = False
    first_in = bool(loop.receives_first) and loop.receives_first[s]
    late = bool(loop.copies_last) and loop.copies_last[s]
    exchange = (_COMMIT, _RECEIVE, _SEND, _COPY) if first_in else (_COMMIT, _SEND, _RECEIVE, _COPY)
    halves = (*exchange, _FORWARD) if depth else (_FORWARD, *exchange)
    for v in range(visits):
        p = steps[v % cycle]
        batch = filled[v]
        starts.append(host)
        # Requests come in and go on.
        if first:
            host += p.receive + p.ingest
        else:
            host += p.receive
            before.requests_asked.append(host)
            if len(before.requests) <= v:
                yield before.requests, v
            came = before.requests[v]
            host = (came if came > host else host) + into.requests + p.ingest
        if not last:
            if v:
                if len(mine.requests_asked) < v:
                    yield mine.requests_asked, v - 1
                asked = mine.requests_asked[v - 1]
                host = asked if asked > host else host
            host += p.commit_requests + p.send_requests
            mine.requests.append(host)
        host += p.schedule
        if p.side_before:
            schedule = (host if host > schedule else schedule) + p.side_before
        if batch and not first:
            host += p.await_proxy
            before.proxy_asked.append(host)
            if len(before.proxy) <= taken:
                yield before.proxy, taken
            came = before.proxy[taken]
            host = (came if came > host else host) + into.proxy + p.receive_proxy
            begin = nccl_previous if nccl_previous > schedule else schedule
            begin = host if host > begin else begin
            before.proxy_taken.append(begin)
            sent = before.proxy_sent[taken]
            schedule = nccl_previous = (sent if sent > begin else begin) + into.recv_proxy
            if one:
                nccl_next = nccl_previous
            taken += 1
        for half in halves:
            if half == _SEND:
                source = v - depth
                if (source >= 0 and filled[source]) if last else passing:
                    if last:
                        done = ends[launched[source]]
                        schedule = done if done > schedule else schedule
                    host += p.commit_output + p.send_output
                    mine.output.append(host)
                    host += p.post_output
                    begin = nccl_next if nccl_next > schedule else schedule
                    begin = host if host > begin else begin
                    mine.output_sent.append(begin)
                    nccl_next = output_end = begin + out.send_output
                    if one:
                        nccl_previous = nccl_next
                    outputs += 1
            elif half == _COMMIT:
                if output_end >= 0:
                    if len(mine.output_asked) < outputs:
                        yield mine.output_asked, outputs - 1
                    asked = mine.output_asked[outputs - 1]
                    host = asked if asked > host else host
                    schedule = output_end if output_end > schedule else schedule
                    output_end = -1
                passing = waiting_output  # what came in by the visit before has to be passed on
            elif half == _RECEIVE:
                source = v + 1 - slots
                waiting_output = source >= 0 and filled[source]
                if waiting_output:
                    host += p.await_result
                    before.output_asked.append(host)
                    if len(before.output) <= received:
                        yield before.output, received
                    came = before.output[received]
                    host = (came if came > host else host) + into.output + p.receive_result
                    begin = nccl_previous if nccl_previous > schedule else schedule
                    begin = host if host > begin else begin
                    sent = before.output_sent[received]
                    schedule = nccl_previous = (sent if sent > begin else begin) + into.recv_output
                    if one:
                        nccl_next = nccl_previous
                    received += 1
                    if not late:
                        copied = (schedule if schedule > copied else copied) + into.copy
            elif half == _COPY:
                if waiting_output and late:
                    copied = (schedule if schedule > copied else copied) + into.copy
            else:
                host += p.commit_proxy
                if proxy_end >= 0:
                    if len(mine.proxy_asked) < proxies:
                        yield mine.proxy_asked, proxies - 1
                    asked = mine.proxy_asked[proxies - 1]
                    host = asked if asked > host else host
                    if not out.eager:
                        if len(mine.proxy_taken) < proxies:
                            yield mine.proxy_taken, proxies - 1
                        proxy_end = max(proxy_end, mine.proxy_taken[proxies - 1] + out.send_proxy)
                        nccl_next = max(nccl_next, proxy_end)
                    schedule = proxy_end if proxy_end > schedule else schedule
                    proxy_end = -1
                if batch:
                    ready = schedule if schedule > forward else forward
                    if p.head:
                        ready = max(ready, host + p.prepare * p.head_at // 1_000_000) + p.head
                    host += p.prepare
                    issued = host
                    host += p.launch
                    if not p.graph:
                        forward = max(max(ready, issued) + p.gpu, host + p.last)
                    elif ready > host:
                        forward = ready + p.gpu + after_stream
                    else:
                        forward = host + p.gpu + after_launch
                    host += p.tail
                    if p.tail:
                        forward = max(forward, host + p.last)
                    ends.append(forward)
                    host += p.after_launch
        if waiting_output:
            host += p.before_sync
            host = (copied if copied > host else host) + p.wake + p.process
        if p.side_after:
            schedule = (host if host > schedule else schedule) + p.side_after
        if batch and not last:
            schedule = forward if forward > schedule else schedule
            host += p.send_proxy
            mine.proxy.append(host)
            host += p.post_proxy
            begin = nccl_next if nccl_next > schedule else schedule
            begin = host if host > begin else begin
            mine.proxy_sent.append(begin)
            nccl_next = proxy_end = begin + out.send_proxy
            if one:
                nccl_previous = nccl_next
            proxies += 1
        host += p.finish

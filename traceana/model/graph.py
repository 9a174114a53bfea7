"""The dependency graph of a capture in columns: device activities, host threads and messages of all ranks, each with
what it had to wait for. `traceana.model.chain` walks it backwards.

Arrays are concatenated over the ranks (`rank` is the position in `Graph.ranks`), times are trace time. What the trace
does not record is rebuilt by rules named in docs/concepts/attribution.md: an activity waits for another stream only
where a stream-wait call lies between its launch and the previous launch on its stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceana.arrays import distinct, groups_of, numbered
from traceana.categories import matching
from traceana.engine import side_by_side
from traceana.errors import ModelError
from traceana.intervals import IntArray, Intervals
from traceana.matching.spans import main_thread
from traceana.model.forwards import forward_of_activities
from traceana.model.kernel_classes import is_communication
from traceana.model.phases import span_numbers
from traceana.model.stream_waits import STREAM_WAITS, Issued, find_stream_waits
from traceana.model.streams import awaited_activities
from traceana.model.trace import Trace
from traceana.model.transfers import message_parts
from traceana.tables import RankTables

__all__ = ["NEVER", "STOP_ALONE", "STOP_COMMIT", "STOP_RECEIVE", "STOP_SYNC", "Graph", "build_graph"]

NEVER = np.int64(-(1 << 62))
NO_LIMIT = np.int64(1 << 62)
STOP_RECEIVE, STOP_COMMIT, STOP_SYNC, STOP_ALONE = 1, 2, 3, 4

_SYNCS = r"^(cuda|hip)(EventSynchronize|StreamSynchronize|DeviceSynchronize)|^cu(Event|Stream|Ctx)Synchronize"
# Without any stream-wait call in the trace, an activity that starts this soon after another stream's end followed it.
_FOLLOWS_NS = 20_000
_INDEX = np.int32


@dataclass(frozen=True, slots=True)
class Activities:
    """Device activities, by rank and start. Indices are global; -1 means none. Lanes are streams, sends apart from the
    rest of their stream. Times and streams are int64, what counts things int32."""

    rank: IntArray
    row: IntArray
    start: IntArray
    end: IntArray
    stream: IntArray
    lane: IntArray
    call_start: IntArray
    call_end: IntArray
    thread: IntArray
    forward: IntArray
    send_of: IntArray
    recv_of: IntArray
    waits: IntArray
    receives: np.ndarray
    sends: np.ndarray
    previous: IntArray
    other: IntArray

    def of_rank(self, position: int) -> slice:
        """The rows of the rank at a position."""
        first, last = self.rank.searchsorted(np.array([position, position + 1], dtype=self.rank.dtype)).tolist()
        return slice(first, last)


@dataclass(frozen=True, slots=True)
class Stops:
    """Points at which a host thread may have been held, by (thread, end). `ref` is a control message or an activity;
    `before` is the last event boundary on the thread ahead of the end; `usual` and
    `fastest` are how long commits on that thread take from there when nothing holds them (90th percentile and minimum),
    `soon` how long after the message's arrival those return, at most, that were surely held."""

    thread: IntArray
    start: IntArray
    end: IntArray
    kind: IntArray
    ref: IntArray
    before: IntArray
    usual: IntArray
    fastest: IntArray
    soon: IntArray


@dataclass(frozen=True, slots=True)
class Graph:
    """See the module. `thread_begin` is the first event of each thread, `main` the scheduler's thread of each rank."""

    ranks: tuple[int, ...]
    activity: Activities
    forward_rank: IntArray
    forward_first: IntArray
    forward_visit: IntArray
    forward_start: IntArray
    message_send: IntArray
    message_recv: IntArray
    message_token: np.ndarray
    control_src: IntArray
    control_dst: IntArray
    control_send: IntArray
    control_recv: IntArray
    control_done: IntArray
    control_token: np.ndarray
    stop: Stops
    thread_rank: IntArray
    thread_begin: IntArray
    main: IntArray


def _follows(start: IntArray, end: IntArray, lane: IntArray, released: IntArray) -> IntArray:
    """For traces without any stream-wait call: the latest-ending activity of another lane, if it ended just before."""
    by_end = np.argsort(end, kind="stable")
    ends = end[by_end]
    position = np.searchsorted(ends, start, side="right") - 1
    found = np.full(start.size, -1, dtype=np.int64)
    active = np.flatnonzero((start > released) & (position >= 0))
    while active.size:
        candidate = by_end[position[active]]
        near = (ends[position[active]] > released[active]) & (start[active] - end[candidate] <= _FOLLOWS_NS)
        active, candidate = active[near], candidate[near]
        fits = (lane[candidate] != lane[active]) & (start[candidate] < start[active])
        found[active[fits]] = candidate[fits]
        active = active[~fits]
        position[active] -= 1
        active = active[position[active] >= 0]
    return found


def _runs(visits: pl.DataFrame) -> tuple[IntArray, IntArray]:
    """Starts and ends of the `run_batch` spans of one rank's visits; one that the profiler's stop cut ends with its
    visit."""
    runs = visits.filter(pl.col("run_ts_ns").is_not_null())
    end = runs.select(pl.coalesce("run_end_ns", "end_ns")).to_series()
    return runs.get_column("run_ts_ns").to_numpy(), end.to_numpy()


def _forward_ends(visits: pl.DataFrame, member: IntArray, end: IntArray) -> IntArray:
    """The activity that ends last in the forward of each `run_batch` span, -1 where it issued none."""
    order = np.lexsort((end, member))
    order = order[member[order] >= 0]
    visit = visits.filter(pl.col("run_ts_ns").is_not_null()).get_column("visit").to_numpy()
    if not order.size:
        return np.full(visit.size, -1, dtype=np.int64)
    at = np.searchsorted(member[order], visit, side="right") - 1
    last = np.append(order, -1)[at]
    return np.where((last >= 0) & (member[last] == visit), last, -1)


def _communication(rank: RankTables) -> np.ndarray:
    names = rank.device.get_column("name")
    return names.is_in([n for n in names.unique().cast(pl.String) if is_communication(n)]).to_numpy()


def _rank_activities(
    trace: Trace, phases: pl.DataFrame, index: int
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The columns of the activities of one rank (indices count from its own first), the visit of the forward that each
    belongs to, and the id of the thread that launched it."""
    rank = trace.capture.ranks[index]
    me = rank.info.rank
    launch = trace.launches[me]
    frame = pl.concat([rank.device.select("ts_ns", "end_ns", "stream"), launch], how="horizontal")
    start, end = frame.get_column("ts_ns").to_numpy(), frame.get_column("end_ns").to_numpy()
    stream = frame.get_column("stream").to_numpy()
    n = start.size
    call_start = frame.get_column("call_ts_ns").fill_null(int(NEVER)).to_numpy()
    call_end = frame.get_column("call_end_ns").fill_null(int(NEVER)).to_numpy()
    tid = frame.get_column("call_tid").fill_null(-1).to_numpy()
    order = np.lexsort((np.arange(n), start, stream))
    previous = np.full(n, -1, dtype=np.int64)
    same = stream[order][1:] == stream[order][:-1]
    previous[order[1:][same]] = order[:-1][same]
    visits = trace.visits.filter(pl.col("rank") == me)
    member = forward_of_activities(rank, visits, launch)
    e1 = np.where(previous >= 0, np.minimum(end[np.maximum(previous, 0)], start), NEVER)
    released = np.maximum(e1, np.where(call_start == NEVER, NEVER, np.minimum(call_end, start)))
    issued = np.where(call_start == NEVER, start, call_start)
    receives = (rank.device.get_column("collective") == "recv").fill_null(False).to_numpy()
    sends = (rank.device.get_column("collective") == "send").fill_null(False).to_numpy()
    lane = 2 * numbered(stream)[1] + sends
    if rank.calls.get_column("name").unique().cast(pl.String).str.contains(STREAM_WAITS).any():
        runs = _runs(visits)
        calls = Issued(issued, tid, lane // 2, _communication(rank), sends)
        waits = find_stream_waits(rank, calls, Intervals(*runs), main_thread(rank))
        ends = _forward_ends(visits, member, end)
        other = awaited_activities(start, end, released, calls, waits, phases, (runs[0], ends))
    else:
        other = _follows(start, end, lane, released)
    none = np.full(n, -1, dtype=_INDEX)
    return (
        {
            "rank": np.full(n, index, dtype=_INDEX), "row": np.arange(n, dtype=_INDEX), "start": start, "end": end,
            "stream": stream, "lane": lane.astype(_INDEX), "call_start": call_start, "call_end": call_end,
            "thread": none.copy(), "forward": none, "send_of": none, "recv_of": none,
            "waits": np.zeros(n, dtype=np.int64), "receives": receives, "sends": sends,
            "previous": previous.astype(_INDEX), "other": other.astype(_INDEX),
        },
        member,
        tid,
    )  # fmt: skip


def _sync_stops(trace: Trace, phases: pl.DataFrame, index: int, act: Activities) -> list[IntArray]:
    """Thread id, start, end, activity of every blocking sync that work issued before it ended within.

    Which event or stream a sync waits for the trace does not say. A stream sync follows the copy it is for: PyTorch
    syncs the stream it has just copied on. For the rest, a lane is waited for at a site (a call in a span of the
    scheduler) unless, at any instance, its last work issued before the call was still running when the call returned.
    """
    rank = trace.capture.ranks[index]
    calls = rank.calls.filter(matching(rank.calls.get_column("name"), _SYNCS))
    here = act.of_rank(index)
    mine = here.start + np.flatnonzero(act.call_start[here] != NEVER)
    if calls.height == 0 or mine.size == 0:
        return [np.zeros(0, dtype=np.int64)] * 4
    start, end = calls.get_column("ts_ns").to_numpy(), calls.get_column("end_ns").to_numpy()
    thread = calls.get_column("tid").to_numpy()
    site = groups_of(calls.get_column("name").to_physical().to_numpy().astype(np.int64), span_numbers(phases, start))
    mine = mine[np.argsort(act.call_start[mine], kind="stable")]
    only = np.full(start.size, -1, dtype=np.int64)
    at = np.searchsorted(act.call_start[mine], start, side="left") - 1
    by_stream = matching(calls.get_column("name"), "StreamSynchronize").to_numpy() & (at >= 0)
    only[by_stream] = act.stream[mine[at[by_stream]]]
    found = np.full(start.size, -1, dtype=np.int64)
    best = start.copy()
    everything = matching(calls.get_column("name"), "DeviceSynchronize|Ctx").to_numpy()
    for lane in distinct(act.lane[mine]):
        members = mine[act.lane[mine] == lane]
        at = np.searchsorted(act.call_start[members], start, side="left") - 1
        last = members[np.maximum(at, 0)]
        # The host waits for results; a send is waited for by the streams that reuse its buffer.
        known = (at >= 0) & ((only < 0) | (act.stream[last] == only)) & (everything | (lane % 2 == 0))
        refuted = np.isin(site, site[known & (act.end[last] > end)])
        take = known & ~refuted & (act.end[last] > best)
        found[take] = last[take]
        best[take] = act.end[last[take]]
    keep = found >= 0
    return [thread[keep], start[keep], end[keep], found[keep]]


def _lone_receives(trace: Trace, index: int, main: int) -> Intervals:
    """gloo receives of a rank's scheduler whose send is in no trace: what they waited for is not known."""
    rank = trace.capture.ranks[index]
    me = rank.info.rank
    paired = trace.controls.filter(pl.col("dst") == me).get_column("recv_ts_ns")
    own = rank.annotations.filter(
        (pl.col("name") == "gloo:recv") & pl.col("tid").eq_missing(main_thread(rank)) & pl.col("finished")
    )
    lone = own.filter(~pl.col("ts_ns").is_in(paired.implode())) if main >= 0 else own.clear()
    return Intervals(lone.get_column("ts_ns").to_numpy(), lone.get_column("end_ns").to_numpy())


def _boundaries(trace: Trace, index: int, tid: int) -> IntArray:
    """Every start and end of something on a thread, but for the ends of gloo sends, which outlive their call."""
    rank = trace.capture.ranks[index]
    parts: list[IntArray] = []
    for frame in (rank.annotations, rank.ops, rank.calls):
        own = frame.filter(pl.col("tid") == tid)
        parts.append(own.get_column("ts_ns").to_numpy())
        ends = own.filter(pl.col("name") != "gloo:send") if frame is rank.annotations else own
        parts.append(ends.get_column("end_ns").to_numpy())
    return distinct(np.concatenate(parts))


def _numbers(threads: dict[tuple[int, int], int], index: int, tid: IntArray) -> IntArray:
    """The numbers of the threads `tid` of the rank at `index` in `threads`, which is given the new ones."""
    different, place = numbered(tid)
    numbers = [threads.setdefault((index, t), len(threads)) for t in different.tolist()]
    return np.array(numbers, dtype=np.int64)[place]


def build_graph(trace: Trace, phases: Sequence[pl.DataFrame]) -> Graph:
    """The graph of `trace`; `phases` are the `host_phases` of each rank, by position."""
    ranks = trace.ranks
    numbers = np.array(ranks, dtype=np.int64)

    def places(column: pl.Series) -> IntArray:
        return np.searchsorted(numbers, column.to_numpy())

    threads: dict[tuple[int, int], int] = {}
    mains: list[int] = []
    for i, rank in enumerate(trace.capture.ranks):
        tid = main_thread(rank)
        mains.append(-1 if tid is None else threads.setdefault((i, tid), len(threads)))
    columns: dict[str, list[np.ndarray]] = {name: [] for name in Activities.__slots__}
    members: list[np.ndarray] = []
    firsts: list[int] = []
    total = 0
    alone = not trace.capture.in_memory
    every = side_by_side(lambda i: _rank_activities(trace, phases[i], i), range(len(ranks)), alone=alone)
    for i, (part, member, launcher) in enumerate(every):
        for name in ("previous", "other"):
            part[name] += np.where(part[name] >= 0, total, 0).astype(_INDEX)
        launched = launcher >= 0
        part["thread"][launched] = _numbers(threads, i, launcher[launched])
        firsts.append(total)
        total += member.size
        if total > np.iinfo(_INDEX).max:
            raise ModelError("too many GPU activities for one analysis", hint="ask for fewer ranks with --ranks")
        members.append(member)
        for name, column in part.items():
            columns[name].append(column)
    # One column at a time: all of them together are as large as what is made of them.
    act = Activities(*(np.concatenate(columns.pop(name)) for name in Activities.__slots__))
    # Forwards, and which one an activity belongs to.
    forwards = trace.forwards.sort("rank", "visit")
    f_rank = places(forwards.get_column("rank"))
    f_visit = forwards.get_column("visit").to_numpy()
    f_first = np.full(f_rank.size, -1, dtype=np.int64)
    for i in range(len(ranks)):
        own = np.flatnonzero(f_rank == i)
        if own.size == 0:
            continue
        index = np.searchsorted(f_visit[own], members[i])
        inside = members[i] >= 0
        act.forward[firsts[i] : firsts[i] + inside.size][inside] = own[index[inside]]
        for_act = np.flatnonzero(inside)
        order = np.lexsort((for_act, act.start[firsts[i] + for_act], members[i][for_act]))
        heads = for_act[order]
        _, first_index = np.unique(members[i][heads], return_index=True)
        f_first[own] = firsts[i] + heads[first_index]
    f_start = forwards.get_column("ts_ns").to_numpy()
    # Messages.
    m = trace.messages
    offset = np.array(firsts, dtype=np.int64)
    send = offset[places(m.get_column("src"))] + m.get_column("send_row").to_numpy()
    recv = offset[places(m.get_column("dst"))] + m.get_column("recv_row").to_numpy()
    act.send_of[send] = np.arange(send.size)
    act.recv_of[recv] = np.arange(recv.size)
    split = message_parts(m, trace.uncertainty_ns)
    waiting = split.filter(pl.col("transfer_ns") < pl.col("end_ns") - pl.col("ts_ns"))
    row = offset[places(waiting.get_column("rank"))] + waiting.get_column("row").to_numpy()
    act.waits[row] = waiting.select(pl.col("end_ns") - pl.col("ts_ns") - pl.col("transfer_ns")).to_series().to_numpy()
    # Control messages.
    c = trace.controls
    main = np.array(mains, dtype=np.int64)
    c_src, c_dst = main[places(c.get_column("src"))], main[places(c.get_column("dst"))]
    stops: list[list[IntArray]] = []
    receive = [c_dst, c.get_column("recv_ts_ns").to_numpy(), c.get_column("recv_end_ns").to_numpy()]
    stops.append([*receive, np.full(c.height, STOP_RECEIVE), np.arange(c.height)])
    commit = [c_src, c.get_column("send_ts_ns").to_numpy(), c.get_column("send_end_ns").to_numpy()]
    whole = np.flatnonzero(c.get_column("committed").fill_null(True).to_numpy())
    stops.append([*(x[whole] for x in commit), np.full(whole.size, STOP_COMMIT), whole])
    found = side_by_side(
        lambda i: (_lone_receives(trace, i, mains[i]), _sync_stops(trace, phases[i], i, act)),
        range(len(ranks)),
        alone=alone,
    )
    for i, (lone, (holder, start, end, ref)) in enumerate(found):
        n = lone.start.size
        stops.append([np.full(n, mains[i]), *lone, np.full(n, STOP_ALONE), np.zeros_like(lone.start)])
        stops.append([_numbers(threads, i, holder), start, end, np.full(holder.size, STOP_SYNC), ref])
    joined = [np.concatenate([s[k] for s in stops]).astype(np.int64) for k in range(5)]
    lasting = joined[2] > joined[1]  # an instant holds nobody up
    joined = [x[lasting] for x in joined]
    order = np.lexsort((joined[1], joined[2], joined[0]))
    s_thread, s_start, s_end, s_kind, s_ref = (x[order] for x in joined)
    before = np.full(s_end.size, NEVER)
    usual = np.zeros(s_end.size, dtype=np.int64)
    fastest = np.zeros(s_end.size, dtype=np.int64)
    soon = np.full(s_end.size, NO_LIMIT)
    done, posted = c.get_column("recv_end_ns").to_numpy(), c.get_column("recv_ts_ns").to_numpy()
    begin = np.full(len(threads), np.iinfo(np.int64).max)
    of_thread = np.searchsorted(s_thread, np.arange(len(threads) + 1))
    known = sorted(threads.items())  # by rank: its tables may have to be read from the store
    bounds = side_by_side(lambda thread: _boundaries(trace, *thread[0]), known, alone=alone)
    for (_, thread_no), marks in zip(known, bounds, strict=True):
        if marks.size == 0:
            continue
        begin[thread_no] = marks[0]
        first, last = of_thread[thread_no : thread_no + 2]
        own = first + np.flatnonzero(s_kind[first:last] == STOP_COMMIT)
        # The ends of the commits themselves are boundaries too: two sends are committed one after the other.
        marks = distinct(np.concatenate([marks, s_end[own]]))
        index = np.searchsorted(marks, s_end[own], side="left") - 1
        before[own] = np.where(index >= 0, marks[np.maximum(index, 0)], NEVER)
        # Commits of messages that had arrived before the thread came to them show what a commit costs by itself.
        free = own[done[s_ref[own]] <= before[own]]
        usual[own] = int(np.quantile(s_end[free] - before[free], 0.9, method="lower")) if free.size else 0
        fastest[own] = int((s_end[free] - before[free]).min()) if free.size else 0
        # And those that the peer surely held show how soon they return once the message has arrived.
        ref = s_ref[own]
        lag = (s_end[own] - done[ref])[(posted[ref] > before[own]) & (posted[ref] < s_end[own])]
        soon[own] = lag.max() if (lag >= 0).any() else NO_LIMIT
    thread_rank = np.array([i for (i, _), _ in sorted(threads.items(), key=lambda x: x[1])], dtype=np.int64)
    return Graph(
        ranks=ranks, activity=act, forward_rank=f_rank, forward_first=f_first, forward_visit=f_visit, forward_start=f_start,
        message_send=send, message_recv=recv, message_token=_token(m, trace), control_src=c_src, control_dst=c_dst,
        control_send=c.get_column("send_ts_ns").to_numpy(), control_recv=posted,
        control_done=done, control_token=_token(c, trace),
        stop=Stops(s_thread, s_start, s_end, s_kind, s_ref, before, usual, fastest, soon),
        thread_rank=thread_rank, thread_begin=begin, main=main,
    )  # fmt: skip


def _token(messages: pl.DataFrame, trace: Trace) -> np.ndarray:
    """Whether a message is the token return: results of the last stage to the first."""
    stage = dict(trace.topology.stage)
    last = trace.topology.pp_size - 1
    src = pl.col("src").replace_strict(stage, default=-1, return_dtype=pl.Int64)
    dst = pl.col("dst").replace_strict(stage, default=-1, return_dtype=pl.Int64)
    if messages.height == 0 or last == 0:
        return np.zeros(messages.height, dtype=np.bool_)
    return messages.select((pl.col("kind") == "output") & (src == last) & (dst == 0)).to_series().to_numpy()

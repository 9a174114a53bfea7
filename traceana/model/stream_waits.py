"""Stream-wait calls: which stream waits, and for what. The calls carry no ids, so both are told by their place.

PyTorch leaves four shapes of call. *Into* a communication stream: an NCCL op records the current stream and makes the
op's stream wait for it, before it launches its kernel. *Out* of one: `work.wait()`, a `record_param_comms` op that
launches nothing, makes the current stream wait for an NCCL kernel. *Pair*: an event recorded just before is waited for
(`wait_stream`): nothing begins or ends in between. *Lone*: an event recorded earlier is. The current stream is the scheduler's own stream outside of
`run_batch`, and the stream of the launch before inside it. See docs/concepts/attribution.md, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from traceana.categories import matching
from traceana.intervals import IntArray, Intervals, within
from traceana.tables import RankTables

__all__ = ["NOTHING", "STREAM_WAITS", "Issued", "StreamWaits", "find_stream_waits"]

STREAM_WAITS = r"StreamWait(Event|Value)"
_RECORDS = r"EventRecord"
# PyTorch's events; the others are the allocator's and NCCL's own.
_FLAGGED = r"EventRecordWithFlags"
NOTHING = np.int64(-1)
_NEVER = np.int64(-(1 << 62))


@dataclass(frozen=True, slots=True)
class Issued:
    """What is known of the activities of one rank, by row: when they were issued (start of the launch call, or their
    own start), the thread that did (-1: no call), stream (numbered from 0), and whether they are communication, sends
    among it."""

    at: IntArray
    tid: IntArray
    stream: IntArray
    communication: np.ndarray
    sends: np.ndarray


@dataclass(frozen=True, slots=True)
class StreamWaits:
    """Wait calls in order of (target, time). `target` waits for what `source` had to finish at `recorded`; or for
    `activity` alone; or, `lone`, for an event of a time that the place does not tell. -1 where a field does not apply.
    `thread` is the thread's id."""

    ts: IntArray
    target: IntArray
    source: IntArray
    recorded: IntArray
    activity: IntArray
    lone: np.ndarray
    thread: IntArray


def _empty() -> StreamWaits:
    zero = np.zeros(0, dtype=np.int64)
    return StreamWaits(zero, zero, zero, zero, zero, np.zeros(0, dtype=np.bool_), zero)


def _before(times: IntArray, at: IntArray) -> IntArray:
    """Index of the last of the sorted `times` before each of `at`, -1 where none is."""
    return np.searchsorted(times, at, side="left") - 1


def _pick(values: IntArray, index: IntArray, missing: np.int64) -> IntArray:
    """`values[index]`, and `missing` where the index is -1 or past the end."""
    out: IntArray = np.append(values, missing)[np.where(index < values.size, index, -1)]
    return out


def find_stream_waits(rank: RankTables, issued: Issued, runs: Intervals, main: int | None) -> StreamWaits:
    """The stream waits of one rank. `runs` are the `run_batch` spans of its thread `main`; both may be missing."""
    text = pl.col("name")
    calls = rank.calls.filter(matching(rank.calls.get_column("name"), f"{STREAM_WAITS}|{_RECORDS}"))
    names = calls.get_column("name")
    calls = calls.with_columns(matching(names, STREAM_WAITS).alias("waits"), matching(names, _FLAGGED).alias("flagged"))
    parts: list[StreamWaits] = []
    for tid in calls.filter("waits").get_column("tid").unique().sort():
        own = calls.filter(pl.col("tid") == tid).sort("ts_ns", maintain_order=True)
        inside = rank.ops.filter((pl.col("tid") == tid) & (text == "record_param_comms")).sort("ts_ns")
        spans = rank.annotations.filter((pl.col("tid") == tid) & (text != "gloo:send"))
        gloo = rank.annotations.filter((pl.col("tid") == tid) & (text == "gloo:send") & pl.col("finished"))
        thread = _Thread(own, inside, gloo, issued, int(tid), runs if tid == main else None)
        thread.marks = _marks(spans, rank.ops.filter(pl.col("tid") == tid))
        parts.append(thread.waits())
    if not parts:
        return _empty()
    every = _joined(parts)
    known = (every.target >= 0) & ((every.source >= 0) | (every.activity >= 0) | every.lone)
    known &= every.source != every.target
    rows = np.flatnonzero(known)
    return _taken(every, rows[np.lexsort((every.ts[rows], every.target[rows]))])


def _marks(*frames: pl.DataFrame) -> IntArray:
    """Every start and end, sorted."""
    return np.sort(np.concatenate([f.get_column(c).to_numpy() for f in frames for c in ("ts_ns", "end_ns")]))


def _joined(parts: Sequence[StreamWaits]) -> StreamWaits:
    return StreamWaits(*(np.concatenate([getattr(p, f) for p in parts]) for f in StreamWaits.__slots__))


def _taken(waits: StreamWaits, rows: IntArray) -> StreamWaits:
    return StreamWaits(*(getattr(waits, f)[rows] for f in StreamWaits.__slots__))


class _Thread:
    """The calls of one thread, and what it issued."""

    def __init__(
        self, calls: pl.DataFrame, ops: pl.DataFrame, gloo: pl.DataFrame, issued: Issued, tid: int, runs: Intervals | None
    ) -> None:  # fmt: skip
        self.tid, self.issued = tid, issued
        waits, flagged = calls.get_column("waits").to_numpy(), calls.get_column("flagged").to_numpy()
        ts = calls.get_column("ts_ns").to_numpy()
        self.wait, self.record = ts[waits], ts[~waits]
        self.flagged = flagged[~waits] if flagged.any() else np.ones(self.record.size, dtype=np.bool_)
        self.marks = np.zeros(0, dtype=np.int64)
        self.ops = Intervals(ops.get_column("ts_ns").to_numpy(), ops.get_column("end_ns").to_numpy())
        gloo = gloo.sort("ts_ns")
        self.gloo = Intervals(gloo.get_column("ts_ns").to_numpy(), gloo.get_column("end_ns").to_numpy())
        mine = np.flatnonzero(issued.tid == tid)
        mine = mine[np.argsort(issued.at[mine], kind="stable")]
        self.launched = mine
        self.launch = issued.at[mine]
        plain = mine[~issued.communication[mine]]
        self.plain, self.plain_stream = issued.at[plain], issued.stream[plain]
        self.runs = runs if runs is not None and runs.start.size else None
        self.home = self._home()

    def _home(self) -> np.int64:
        """The stream that the thread launches on by default: outside of `run_batch` the commonest one; where it never
        launches there, one without activities of its own."""
        streams = self.plain_stream
        if self.runs is not None:
            streams = streams[within(self.plain, self.runs) < 0]
        if streams.size == 0:
            return np.int64(self.issued.stream.max(initial=0) + 1)
        return np.int64(np.argmax(np.bincount(streams)))

    def current(self, at: IntArray) -> IntArray:
        """The current stream at each time."""
        last = _before(self.plain, at)
        if self.runs is None:
            return _pick(self.plain_stream, np.where(last < 0, 0, last), NOTHING)
        run = within(at, self.runs)
        within_run = (run >= 0) & (_pick(self.plain, last, _NEVER) >= _pick(self.runs.start, run, _NEVER))
        return np.where(within_run, _pick(self.plain_stream, last, NOTHING), self.home)

    def waits(self) -> StreamWaits:
        """Every wait call of the thread with what its place tells; calls inside NCCL itself are left out."""
        w, issued = self.wait, self.issued
        latest = _before(self.record, w)
        recorded = _pick(self.record, latest, _NEVER)
        since = np.maximum(_pick(w, _before(w, w), _NEVER), _pick(self.launch, _before(self.launch, w), _NEVER))
        paired = (recorded > since) & np.append(self.flagged, False)[latest]
        paired &= np.searchsorted(self.marks, w, side="left") <= np.searchsorted(self.marks, recorded, side="right")
        op = within(w, self.ops)
        op_start, op_end = _pick(self.ops.start, op, _NEVER), _pick(self.ops.end, op, _NEVER)
        following = np.searchsorted(self.launch, np.where(op >= 0, op_start, w), side="left")
        row = _pick(self.launched, following, NOTHING)
        at = _pick(self.launch, following, np.int64(1 << 62))
        launches = (op >= 0) & (at < op_end)
        first = np.searchsorted(w, op_start, side="left") == np.arange(w.size)
        into = launches & first & (w < at)
        if self.ops.start.size == 0:
            # Without ops, what is recorded and waited for right ahead of an NCCL kernel's launch is for its stream.
            into = paired & (row >= 0) & np.append(issued.communication, False)[row]
        out = (op >= 0) & ~launches
        plain = ~into & (op < 0)
        now = self.current(w)
        later = _pick(self.plain_stream, np.searchsorted(self.plain, w, side="left"), NOTHING)
        earlier = _pick(self.plain_stream, _before(self.plain, w), NOTHING)
        pair, lone = plain & paired, plain & ~paired
        target = np.where(into, _pick(issued.stream, row, NOTHING), np.where(pair, later, now))
        back = pair & (now == target)  # the current stream waits for the one that was launched on last
        source = np.where(into, now, np.where(pair, np.where(back, earlier, now), NOTHING))
        activity = np.full(w.size, NOTHING)
        activity[out] = self._awaited(w[out])
        counts = into | out | pair | lone
        found = StreamWaits(
            w, target, source, np.where(into | pair, recorded, _NEVER), activity, lone, np.full(w.size, self.tid)
        )
        return _taken(found, np.flatnonzero(counts))

    def _awaited(self, out: IntArray) -> IntArray:
        """The NCCL kernels that `work.wait()` calls at `out` wait for, -1 where the trace does not tell.

        After a receive or a collective, the waits that follow are for it. Sends are committed in the order in which
        they were sent, each message's gloo part first: its `gloo:send` span ends where its commit returns.
        """
        issued = self.issued
        nccl = self.launched[issued.communication[self.launched]]
        when = issued.at[nccl]
        sends = issued.sends[nccl]
        other, other_at = nccl[~sends], when[~sends]
        sent, sent_at = nccl[sends], when[sends]
        # Receives and collectives, each after the last wait ahead of them: a run of them, then a run of their waits.
        last = _before(other_at, out)
        begun = _before(out, _pick(other_at, last, _NEVER))
        run = np.searchsorted(other_at, _pick(out, begun, _NEVER), side="left")
        nth = np.arange(out.size) - (begun + 1)
        received = np.where((last >= 0) & (run + nth <= last), _pick(other, run + nth, NOTHING), NOTHING)
        by_end = np.argsort(self.gloo.end, kind="stable")
        ends = self.gloo.end[by_end]
        commit = np.searchsorted(ends, out, side="right") - 1
        committed = _pick(ends, commit, _NEVER)
        message = _pick(by_end, commit, NOTHING)
        start = _pick(self.gloo.start, message, _NEVER)
        stop = _pick(self.gloo.start, np.where(message >= 0, message + 1, -1), np.int64(1 << 62))
        nth = np.arange(out.size) - np.searchsorted(out, committed, side="left")
        index = np.searchsorted(sent_at, start, side="left") + nth
        fits = (message >= 0) & (_pick(sent_at, index, np.int64(1 << 62)) < np.minimum(stop, out))
        if self.gloo.start.size == 0:  # of a library that does without, the send before is the best there is
            index = _before(sent_at, out)
            fits = index >= 0
        of_send = np.where(fits, _pick(sent, index, NOTHING), NOTHING)
        committed = np.where(self.gloo.start.size > 0, committed, _pick(sent_at, _before(sent_at, out), _NEVER))
        return np.where(committed > _pick(other_at, last, _NEVER), of_send, received)

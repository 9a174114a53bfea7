"""The measured pieces of a capture: what each stage's host and GPU did in every visit that can be played again, what a
hop costs, and what the server was asked to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import polars as pl

from traceana.errors import ModelError
from traceana.intervals import IntArray
from traceana.matching.visits import visit_of
from traceana.model.graph import STOP_SYNC
from traceana.model.model import Model
from traceana.simulate.kernels import Kernels, measure_kernels
from traceana.simulate.loop import Hops
from traceana.simulate.marks import PIECES, host_pieces

__all__ = ["COLUMNS", "Parts", "StageParts", "measure"]

COLUMNS = (*PIECES, "wake")
# A visit whose host took half as long again as its kind usually does was held by something else: the profiler's own
# flushes, a collection of garbage. Playing it again and again would make it the rule.
_STALLED = 1.5
# Short transfers that did not wait, as a quantile: the median of a direction's kernels may hold waits.
_FLOOR = 0.2


@dataclass(frozen=True, slots=True)
class StageParts:
    """One stage. `host` has a row per visit and a column per name of COLUMNS, ns; `kernels` has the same rows;
    `graphed` says whether a graph launch issued the forward. `receives_first`: results come in before they go out
    (some versions, on odd stages); `copies_last`: their copy to the host is issued after both."""

    rank: int
    host: IntArray
    graphed: np.ndarray
    kernels: Kernels
    receives_first: bool = False
    copies_last: bool = True


@dataclass(frozen=True, slots=True)
class Parts:
    """A capture in pieces. Rows are visits common to all stages, in order: `visits`, `batch` (0: an empty slot),
    `tokens`.

    `slots` has the batch of every slot, `period_ns` the time of a visit under the profiler, `stalled` the visits of
    all stages that were not usual and stand with the median of their kind. Throughputs are the server's own,
    unprofiled, in 1/1000 tokens per second, None where nothing tells: `own` of decoding, `throughput` of what the
    visits do, which is prefill where `decode` is false.
    """

    stages: tuple[StageParts, ...]
    visits: IntArray
    batch: IntArray
    tokens: IntArray
    hops: tuple[Hops, ...]
    depth: int
    one_stream: bool
    slots: tuple[int, ...]
    period_ns: int
    throughput: int | None
    own: int | None
    source: str | None
    decode: bool
    facts: Mapping[str, object] = field(default_factory=dict[str, object])
    stalled: int = 0

    @property
    def rows_of(self) -> dict[int, IntArray]:
        """Rows by batch size, in order; 0 holds the visits of empty slots."""
        return {int(b): np.flatnonzero(self.batch == b) for b in np.unique(self.batch)}

    @property
    def processed(self) -> IntArray:
        """The batch whose result each row's visit processes, that of the slot that is next; its own where that slot is
        empty."""
        slots = np.array(self.slots, dtype=np.int64)
        following: IntArray = slots[(self.visits + 1) % slots.size]
        return np.where(following > 0, following, self.batch)


def measure(model: Model) -> Parts:
    """Cut `model` into pieces. Raises ModelError where it is no pipeline, lacks a stage or scheduler spans, or has no
    whole visit on all stages."""
    trace = model.trace
    if not trace.topology.is_pipeline:
        raise ModelError(
            "there is no pipeline to simulate",
            where=f"{len(trace.ranks)} rank(s), one stage",
            hint="whatif plays SGLang's pipeline loop; a capture of tensor-parallel ranks has no slots and no stages",
        )
    nothing = ModelError(
        "there is no visit to play again",
        where="no whole visit with a batch on every stage",
        hint="profile CPU and GPU activities, for at least a few rounds of all slots",
    )
    heads = model.stage_heads()
    if not trace.visits.height:
        raise nothing
    if len(heads) != trace.topology.pp_size:
        raise ModelError(
            "not every stage is in the capture",
            where=f"{len(heads)} of {trace.topology.pp_size} stages",
            hint="give the traces of all pipeline stages",
        )
    slots = trace.slots or _slots(model)
    if slots is None:
        raise ModelError(
            "the number of slots is unknown",
            where="async depth above 0",
            hint="put the server's server_info.json or server.log beside the traces",
        )
    span = _range(model, heads, slots)
    frames = [host_pieces(model, rank, slots - len(heads), *span) for rank in heads]
    common = set(frames[0].get_column("visit")).intersection(*(f.get_column("visit") for f in frames[1:]))
    frames = [f.filter(pl.col("visit").is_in(list(common))) for f in frames]
    decode = bool(frames[0].get_column("mode").is_in(["decode"]).any())
    if decode:  # predictions are about decoding; prefill in between is left out
        usable = frames[0].filter((pl.col("mode") == "decode") | pl.col("mode").is_null()).get_column("visit")
        frames = [f.filter(pl.col("visit").is_in(usable.implode())) for f in frames]
    lead = frames[0]
    if not lead.height or not lead.get_column("mode").is_not_null().any():
        raise nothing
    visits = lead.get_column("visit").to_numpy()
    batch = lead.get_column("batch_size").fill_null(0).to_numpy().astype(np.int64)
    stages: list[StageParts] = []
    held = np.zeros(visits.size, dtype=np.bool_)
    stalled = 0
    for rank, frame in zip(heads, frames, strict=True):
        kernels = measure_kernels(model, rank, visits)
        usual = _usual(frame, kernels, batch)
        stalled += int((~usual).sum())
        held |= ~usual
        graphed = frame.get_column("graphed").fill_null(False).to_numpy()
        first = bool(frame.get_column("receives_first").any())
        copies = frame.get_column("copies_last").mean()
        stages.append(
            StageParts(
                rank,
                _filled(frame, batch, usual),
                graphed,
                kernels.replaced(batch, usual),
                first,
                copies is None or float(cast("float", copies)) > 0.5,
            )
        )
    tokens = lead.get_column("tokens").fill_null(0).to_numpy().astype(np.int64)
    own, source = _rate(model.facts, "decode", "source")
    throughput = own if decode else _rate(model.facts, "prefill", "prefill_source")[0]
    pattern = _pattern(model, heads[0], slots, decode)
    if decode and not any(pattern):
        raise ModelError(
            "no slot decodes steadily",
            where="most visits of every slot are empty",
            hint="profile while the server is under load",
        )
    return Parts(
        stages=tuple(stages),
        visits=visits,
        batch=batch,
        tokens=tokens,
        hops=tuple(_hops(model, heads, s) for s in range(len(heads))),
        depth=slots - len(heads),
        one_stream=_one_stream(model, heads),
        slots=pattern,
        period_ns=_period(model, heads, slots, decode, visits[held]),
        throughput=throughput,
        own=own,
        source=source,
        decode=decode,
        facts=model.facts,
        stalled=stalled,
    )


def _slots(model: Model) -> int | None:
    top = model.trace.visits.get_column("slot").max()
    return int(top) + 1 if isinstance(top, int) else None


def _range(model: Model, heads: Sequence[int], slots: int) -> tuple[int, int]:
    """The visits to measure: those of the window; where they are fewer than two rounds, on to the last visit that every
    stage has whole. Pieces hold no waits, so it does not matter that the stages have gone out of the common window."""
    window = model.trace.window
    whole = model.trace.visits.filter(pl.col("complete") & pl.col("rank").is_in(heads))
    ends = whole.group_by("rank").agg(pl.col("visit").min().alias("first"), pl.col("visit").max().alias("last"))
    if ends.height < len(heads):
        return 0, -1
    first, last = int(ends.select(pl.col("first").max()).item()), int(ends.select(pl.col("last").min()).item())
    if window.first_visit is None or window.last_visit is None:
        return first, last
    short = window.last_visit - window.first_visit + 1 < 2 * slots
    return window.first_visit, max(window.last_visit, last) if short else window.last_visit


def _kinds(frame: pl.DataFrame, batch: IntArray) -> IntArray:
    """Visits that do the same: of the same batch, with a result to process or without."""
    result: IntArray = frame.get_column("process").is_not_null().to_numpy().astype(np.int64)
    return batch * 2 + result


def _usual(frame: pl.DataFrame, kernels: Kernels, batch: IntArray) -> np.ndarray:
    """Which visits are fit to be played again: messages matched, no stall, all kernels recorded. Where hardly any of a
    kind is, all of that kind are."""
    work = frame.select(pl.sum_horizontal(pl.col(n).fill_null(0) for n in COLUMNS)).to_series().to_numpy()
    usual = frame.get_column("paired").to_numpy().copy()
    kinds = _kinds(frame, batch)
    for kind in np.unique(kinds):
        same = kinds == kind
        fit = usual & same
        fit = fit & (work <= _STALLED * _middle(work[fit if fit.any() else same]))
        if kind > 1:
            fit = fit & (kernels.count >= 0.9 * _middle(kernels.count[same]))
        usual[same] = fit[same] if 3 * int(fit.sum()) >= int(same.sum()) else True
    return usual


def _filled(frame: pl.DataFrame, batch: IntArray, usual: np.ndarray) -> IntArray:
    """The host pieces as a matrix. What a visit did not pass has no time of its own there, and an unusual visit has
    none to go by: they take the median of the usual visits of the same kind, else of the same batch, else of all."""
    host = np.empty((frame.height, len(COLUMNS)), dtype=np.int64)
    kinds = _kinds(frame, batch)
    for column, name in enumerate(COLUMNS):
        series = frame.get_column(name)
        there = series.is_not_null().to_numpy()
        known = there & usual if (there & usual).any() else there
        values = series.fill_null(0).to_numpy().copy()
        if known.any() and not known.all():
            for kind in np.unique(kinds[~known]):
                groups = (known & (kinds == kind), known & (batch == kind // 2), known)
                values[(kinds == kind) & ~known] = _middle(values[next(g for g in groups if g.any())])
        host[:, column] = values
    return host


def _middle(values: IntArray) -> int:
    """The median; of two, the smaller."""
    return int(np.quantile(values, 0.5, method="lower"))


def _pattern(model: Model, rank: int, slots: int, decode: bool) -> tuple[int, ...]:
    """The commonest batch of every slot on the first stage, among all its visits; 0 where it holds none."""
    own = model.trace.visits.filter((pl.col("rank") == rank) & (pl.col("complete") | pl.col("mode").is_not_null()))
    if decode:
        own = own.filter((pl.col("mode") == "decode") | pl.col("mode").is_null())
    seen = own.with_columns((pl.col("visit") % slots).alias("at"), pl.col("batch_size").fill_null(0).alias("b"))
    usual = dict(seen.group_by("at").agg(pl.col("b").mode().max()).iter_rows())
    return tuple(int(usual.get(s, 0)) for s in range(slots))


def _period(model: Model, heads: Sequence[int], slots: int, decode: bool, held: IntArray) -> int:
    """Time of a visit under the profiler: the mean of the rounds of all slots in the window, on all stages, without the
    shortest and the longest tenth (a stage that catches up after the profiler's start, a visit that stalled). Where the
    capture decodes, of the rounds without a prefill, if there are any; of those, where a third is left, of the ones
    without visits that stand with the median of their kind (`held`), as they are played."""
    whole = model.trace.visits.filter(pl.col("complete"))
    if model.trace.window.first_visit is not None:  # before it, later stages were still starting their profilers
        whole = whole.filter(pl.col("visit") >= model.trace.window.first_visit)
    for visits in (model.window_visits(), whole):
        rounds: list[IntArray] = []
        pure: list[IntArray] = []
        free: list[IntArray] = []
        for rank in heads:
            own = visits.filter(pl.col("rank") == rank).sort("visit")
            starts = np.append(own.get_column("ts_ns").to_numpy(), own.get_column("end_ns").tail(1).to_numpy())
            other = (own.get_column("mode").fill_null("decode") != "decode").to_numpy()
            lengths = starts[slots:] - starts[:-slots]
            calm = _none_in(other, slots)
            rounds.append(lengths)
            pure.append(lengths[calm])
            free.append(lengths[calm & _none_in(np.isin(own.get_column("visit").to_numpy(), held), slots)])
        chosen = np.sort(np.concatenate(pure if decode and any(r.size for r in pure) else rounds))
        steady = np.sort(np.concatenate(free))
        if decode and 3 * steady.size >= chosen.size:
            chosen = steady
        if chosen.size:
            cut = max(chosen.size // 10, 1 if chosen.size > 4 else 0)
            inner = chosen[cut : chosen.size - cut]
            return int(inner.sum()) // inner.size // slots
    # Less than a round: the visits there are.
    return int(whole.select((pl.col("end_ns") - pl.col("ts_ns")).median()).item() or 0)


def _none_in(found: np.ndarray, slots: int) -> np.ndarray:
    """Whether none of `slots` visits in a row was found, for each first one."""
    before = np.append(0, np.cumsum(found))
    none: np.ndarray = before[slots:] == before[:-slots]
    return none


def _hops(model: Model, heads: Sequence[int], stage: int) -> Hops:
    trace = model.trace
    src, dst = heads[stage], heads[(stage + 1) % len(heads)]
    pair = (pl.col("src") == src) & (pl.col("dst") == dst)
    controls = trace.controls.filter(pair)
    receiver = trace.visits.filter(pl.col("rank") == dst)
    controls = controls.with_columns(pl.Series("at", visit_of(receiver, controls.get_column("recv_ts_ns").to_numpy())))
    both = pl.max_horizontal(pl.col("send_ts_ns").min(), pl.col("recv_ts_ns").min())
    gloo = controls.group_by("kind", "at").agg((pl.col("recv_end_ns").max() - both).alias("ns"))
    cost = dict(gloo.group_by("kind").agg(pl.col("ns").quantile(0.5, "lower")).iter_rows())
    messages = trace.messages.filter(pair)
    send = (pl.col("send_end_ns") - pl.col("send_ts_ns")).quantile(_FLOOR, "lower").alias("send")
    receive = (
        (pl.col("recv_end_ns") - pl.max_horizontal("send_ts_ns", "recv_ts_ns")).quantile(0.5, "lower").alias("receive")
    )
    # All tensors of a message go one after the other.
    tensors = (pl.len() / pl.col("visit").n_unique()).round().cast(pl.Int64).alias("tensors")
    floors = {
        kind: (max(0, int(s or 0)) * int(n or 1), max(0, int(r or 0)) * int(n or 1))
        for kind, s, r, n in messages.group_by("kind").agg(send, receive, tensors).iter_rows()
    }
    none = (0, 0)
    held = messages.filter((pl.col("kind") == "proxy") & (pl.col("recv_ts_ns") > pl.col("send_ts_ns")))
    blocked = held.filter(pl.col("send_end_ns") > pl.col("recv_ts_ns")).height
    return Hops(
        requests=int(cost.get("requests") or 0),
        proxy=int(cost.get("proxy") or 0),
        output=int(cost.get("output") or 0),
        send_proxy=floors.get("proxy", none)[0],
        recv_proxy=floors.get("proxy", none)[1],
        send_output=floors.get("output", none)[0],
        recv_output=floors.get("output", none)[1],
        copy=_copy(model, dst),
        eager=not held.height or 2 * blocked <= held.height,
    )


def _copy(model: Model, rank: int) -> int:
    """GPU time of the copy of a result to the host: that of the activities that syncs waited for, but for those that
    belong to a forward or a message."""
    graph = model.blame.graph
    position = model.trace.ranks.index(rank)
    rows = np.flatnonzero((graph.stop.thread == graph.main[position]) & (graph.stop.kind == STOP_SYNC))
    ref = graph.stop.ref[rows]
    ref = ref[(graph.activity.forward[ref] < 0) & (graph.activity.send_of[ref] < 0) & (graph.activity.recv_of[ref] < 0)]
    length = graph.activity.end[ref] - graph.activity.start[ref]
    return int(np.median(length)) if length.size else 0


def _one_stream(model: Model, heads: Sequence[int]) -> bool:
    """Whether a rank's messages to both neighbours share one stream."""
    messages = model.trace.messages
    for rank in heads:
        device = next(r.device for r in model.trace.capture.ranks if r.info.rank == rank)
        stream = device.get_column("stream")
        sent = messages.filter(pl.col("src") == rank)
        got = messages.filter(pl.col("dst") == rank)
        if sent.height and got.height and len(heads) > 2:
            out = set(stream.gather(sent.get_column("send_row").to_list()))
            return bool(out & set(stream.gather(got.get_column("recv_row").to_list())))
    return len(heads) == 2


_RATES = 0.001, 1e9  # tokens per second that a server may have; what a damaged file says beyond is no throughput


def _rate(facts: Mapping[str, object], name: str, source: str) -> tuple[int | None, str | None]:
    """One of the server's own throughputs in 1/1000 tokens per second, and where it comes from."""
    said = facts.get("throughput")
    if not isinstance(said, Mapping):
        return None, None
    told = cast("Mapping[str, object]", said)
    rate, where = told.get(name), told.get(source)
    if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not _RATES[0] <= rate <= _RATES[1]:
        return None, None
    return round(rate * 1000), str(where) if where else None

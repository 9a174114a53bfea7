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

__all__ = ["COLUMNS", "Parts", "StageParts", "measure", "medians"]

COLUMNS = (*PIECES, "wake")
# A visit whose host took half as long again as its kind usually does was held by something else: the profiler's own
# flushes, a collection of garbage. Playing it again and again would make it the rule.
_STALLED = 1.5
# Short transfers that did not wait, as a quantile: the median of a direction's kernels may hold waits.
_FLOOR = 0.2


@dataclass(frozen=True, slots=True)
class StageParts:
    """One stage. `host` has a row per visit and a column per name of COLUMNS, ns; `kernels` has the same rows; `graphed`
    says whether a graph launch issued the forward."""

    rank: int
    host: IntArray
    graphed: np.ndarray
    kernels: Kernels


@dataclass(frozen=True, slots=True)
class Parts:
    """A capture in pieces. Rows are visits common to all stages, in order: `visits`, `batch` (0: an empty slot), `mode`.

    `slots` has the batch of every slot as the window shows it, `period_ns` the time of a visit of the first stage,
    `stalled` the visits left out. `throughput` is the server's own, unprofiled, in 1/1000 tokens per second, for
    `tokens` per row; None where nothing tells.
    """

    stages: tuple[StageParts, ...]
    visits: IntArray
    batch: IntArray
    mode: tuple[str | None, ...]
    tokens: IntArray
    hops: tuple[Hops, ...]
    depth: int
    one_stream: bool
    slots: tuple[int, ...]
    period_ns: int
    throughput: int | None
    source: str | None
    decode: bool
    facts: Mapping[str, object] = field(default_factory=dict[str, object])
    stalled: int = 0

    @property
    def rows_of(self) -> dict[int, IntArray]:
        """Rows by batch size, in order; 0 holds the visits of empty slots."""
        return {int(b): np.flatnonzero(self.batch == b) for b in np.unique(self.batch)}


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
    heads = model.stage_heads()
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
    frames = [host_pieces(model, rank, slots - len(heads)) for rank in heads]
    if not all(f.height for f in frames):
        raise ModelError(
            "there is no visit to play again",
            where="no whole visit of the scheduler loop on every stage",
            hint="profile CPU and GPU activities, for at least a few rounds of all slots",
        )
    kept, stalled = _steady(frames)
    decode = bool(kept[0].get_column("mode").is_in(["decode"]).any())
    if decode:  # predictions are about decoding; prefill in between is left out
        usable = kept[0].filter((pl.col("mode") == "decode") | pl.col("mode").is_null()).get_column("visit")
        kept = [f.filter(pl.col("visit").is_in(usable.implode())) for f in kept]
    first = kept[0]
    visits = first.get_column("visit").to_numpy()
    batch = first.get_column("batch_size").fill_null(0).to_numpy().astype(np.int64)
    stages = tuple(
        StageParts(
            rank,
            _filled(frame, batch),
            frame.get_column("graphed").fill_null(False).to_numpy(),
            measure_kernels(model, rank, visits),
        )
        for rank, frame in zip(heads, kept, strict=True)
    )
    tokens = first.get_column("tokens").fill_null(0).to_numpy().astype(np.int64)
    length = (first.get_column("end_ns") - first.get_column("ts_ns")).to_numpy()
    throughput, source = _own_throughput(model.facts, decode)
    return Parts(
        stages=stages,
        visits=visits,
        batch=batch,
        mode=tuple(first.get_column("mode").to_list()),
        tokens=tokens,
        hops=tuple(_hops(model, heads, s) for s in range(len(heads))),
        depth=slots - len(heads),
        one_stream=_one_stream(model, heads),
        slots=_pattern(first, slots),
        period_ns=int(length.sum()) // length.size,
        throughput=throughput,
        source=source,
        decode=decode,
        facts=model.facts,
        stalled=stalled,
    )


def medians(stage: StageParts, rows: IntArray) -> dict[str, int]:
    """The median of each host piece over `rows`."""
    values = np.median(stage.host[rows], axis=0).astype(np.int64) if rows.size else np.zeros(len(COLUMNS), dtype=np.int64)
    return dict(zip(COLUMNS, values.tolist(), strict=True))


def _slots(model: Model) -> int | None:
    top = model.trace.visits.get_column("slot").max()
    return int(top) + 1 if isinstance(top, int) else None


def _steady(frames: Sequence[pl.DataFrame]) -> tuple[list[pl.DataFrame], int]:
    """The visits that every stage has whole, without those that stalled on one."""
    common = set(frames[0].get_column("visit"))
    for frame in frames[1:]:
        common &= set(frame.get_column("visit"))
    kept = set(common)
    for frame in frames:
        own = frame.filter(pl.col("visit").is_in(list(common)))
        work = pl.sum_horizontal(pl.col(n).fill_null(0) for n in COLUMNS)
        usual = work.median().over("mode", "batch_size")
        kept -= set(own.filter(work > _STALLED * usual).get_column("visit"))
    # Where every other visit seems to stall there is no rule to keep.
    if 2 * len(kept) < len(common):
        kept = common
    return [f.filter(pl.col("visit").is_in(list(kept))).sort("visit") for f in frames], len(common) - len(kept)


def _filled(frame: pl.DataFrame, batch: IntArray) -> IntArray:
    """The host pieces as a matrix. What a visit did not pass has no time of its own there: it takes the median of the
    visits of the same batch that did, else of all."""
    host = np.empty((frame.height, len(COLUMNS)), dtype=np.int64)
    for column, name in enumerate(COLUMNS):
        series = frame.get_column(name)
        known = series.is_not_null().to_numpy()
        values = series.fill_null(0).to_numpy().copy()
        if known.any() and not known.all():
            for size in np.unique(batch[~known]):
                same = (batch == size) & known
                usual = values[same] if same.any() else values[known]
                values[(batch == size) & ~known] = int(np.median(usual))
        host[:, column] = values
    return host


def _pattern(first: pl.DataFrame, slots: int) -> tuple[int, ...]:
    """The commonest batch of every slot on the first stage; 0 where it holds none."""
    seen = first.with_columns((pl.col("visit") % slots).alias("at"), pl.col("batch_size").fill_null(0).alias("b"))
    usual = dict(seen.group_by("at").agg(pl.col("b").mode().max()).iter_rows())
    return tuple(int(usual.get(s, 0)) for s in range(slots))


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
    late = pl.max_horizontal("send_ts_ns", "recv_ts_ns")
    receive = (pl.col("recv_end_ns") - late).quantile(0.5, "lower").alias("receive")
    # All tensors of a message go one after the other: their floors add up.
    per_visit = pl.len() / pl.col("visit").n_unique()
    floors = {k: (s, r, n) for k, s, r, n in messages.group_by("kind").agg(send, receive, per_visit.alias("n")).iter_rows()}

    def floor(kind: str, side: int) -> int:
        if kind not in floors:
            return 0
        value, count = floors[kind][side], floors[kind][2]
        return max(0, int(value or 0)) * max(1, round(count or 1))

    held = messages.filter((pl.col("kind") == "proxy") & (pl.col("recv_ts_ns") > pl.col("send_ts_ns")))
    blocked = held.filter(pl.col("send_end_ns") > pl.col("recv_ts_ns")).height
    return Hops(
        requests=int(cost.get("requests") or 0),
        proxy=int(cost.get("proxy") or 0),
        output=int(cost.get("output") or 0),
        send_proxy=floor("proxy", 0),
        recv_proxy=floor("proxy", 1),
        send_output=floor("output", 0),
        recv_output=floor("output", 1),
        copy=_copy(model, dst),
        eager=not held.height or 2 * blocked <= held.height,
    )


def _copy(model: Model, rank: int) -> int:
    """GPU time of the copy of a result to the host, from the later of the result's arrival and the copy's launch."""
    graph = model.blame.graph
    position = model.trace.ranks.index(rank)
    output = model.trace.messages.filter((pl.col("dst") == rank) & (pl.col("kind") == "output"))
    ends = np.sort(output.get_column("recv_end_ns").to_numpy())
    rows = np.flatnonzero((graph.stop.thread == graph.main[position]) & (graph.stop.kind == STOP_SYNC))
    ref = graph.stop.ref[rows]
    done, issued = graph.activity.end[ref], graph.activity.call_end[ref]
    before = np.searchsorted(ends, done, side="right") - 1 if ends.size else np.full(done.size, -1)
    gap = (done - np.maximum(ends[np.maximum(before, 0)], issued))[before >= 0] if ends.size else done[:0]
    gap = gap[gap >= 0]
    return int(np.quantile(gap, _FLOOR, method="lower")) if gap.size else 0


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


def _own_throughput(facts: Mapping[str, object], decode: bool) -> tuple[int | None, str | None]:
    said = facts.get("throughput")
    if not isinstance(said, Mapping):
        return None, None
    told = cast("Mapping[str, object]", said)
    rate, source = (told.get("decode"), told.get("source")) if decode else (told.get("prefill"), told.get("prefill_source"))
    if not isinstance(rate, (int, float)) or isinstance(rate, bool) or rate <= 0:
        return None, None
    return round(rate * 1000), str(source) if source else None

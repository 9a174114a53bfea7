"""`match`: everything that belongs together in a capture, on the ranks' own clocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import polars as pl

from traceana import schema
from traceana.matching.controls import control_endpoints, pair_controls
from traceana.matching.launches import launches
from traceana.matching.marks import visit_offsets
from traceana.matching.p2p import p2p_endpoints, pair_p2p
from traceana.matching.topology import Topology, find_topology
from traceana.matching.visits import find_visits, mark_numbers, number_slots, slots_by_marks
from traceana.sources.losses import loss, losses_frame
from traceana.tables import CaptureTables

__all__ = ["Matched", "match"]

# Two clocks of one host read the same counter; what differs is how each profiler converts it.
_SAME_BASE_SLACK_NS = 5_000


@dataclass(frozen=True, slots=True)
class Matched:
    """Topology, visits and launches per rank, paired messages, and the endpoints left alone."""

    topology: Topology
    visits: Mapping[int, pl.DataFrame]
    launches: Mapping[int, pl.DataFrame]
    messages: pl.DataFrame
    controls: pl.DataFrame
    unmatched: pl.DataFrame
    losses: pl.DataFrame


def _facts_int(capture: CaptureTables, key: str) -> int | None:
    facts = capture.server.facts if capture.server is not None else {}
    value = facts.get(key)
    return value if isinstance(value, int) else None


def match(
    capture: CaptureTables,
    *,
    slack_ns: int | None = _SAME_BASE_SLACK_NS,
    progress: Callable[[str, int, int], None] | None = None,
) -> Matched:
    """Visits, launches and messages of `capture`. `progress` is told what is done, for how many ranks, and of how many.

    `slack_ns` bounds the difference of two ranks' raw clocks (None: nothing known); only traces without scheduler spans
    need it, to align message streams that order alone leaves open.
    """
    slots = _facts_int(capture, "slots")
    visits: dict[int, pl.DataFrame] = {}
    calls: dict[int, pl.DataFrame] = {}
    endpoints: dict[int, pl.DataFrame] = {}
    marked: dict[int, pl.DataFrame] = {}
    for done, r in enumerate(capture.ranks):  # a rank at a time: its tables may have to be read from the store
        if progress is not None:
            progress("match messages", done, len(capture.ranks))
        me = r.info.rank
        visits[me], calls[me] = find_visits(r, slots=slots), launches(r)
        endpoints[me] = p2p_endpoints(r, visits[me], calls[me])
        marked[me] = mark_numbers(r, visits[me])
    offsets, odd = visit_offsets(marked)
    for me, by in offsets.items():
        if by:
            visits[me] = visits[me].with_columns(pl.col("visit") + by)
            endpoints[me] = endpoints[me].with_columns(pl.col("visit") + by)
    edges = pl.concat([e.select("src", "dst", "kind") for e in endpoints.values()]) if endpoints else pl.DataFrame()
    topology = find_topology(
        [r.info for r in capture.ranks], edges,
        pp_size=_facts_int(capture, "pp_size"), tp_size=_facts_int(capture, "tp_size"),
    )  # fmt: skip
    if slots is None and topology.is_pipeline:
        slots = slots_by_marks(visits.values())
        if slots is None and _depth_is_zero(visits, capture):
            # At async depth 0 the loop has one slot a stage; with a depth the trace alone does not tell how many.
            slots = topology.pp_size
        # Marks of less than one turn name some slots, and not how many there are: that is no numbering.
        visits = {r: number_slots(v, slots) for r, v in visits.items()}
    complete = [v.filter(pl.col("complete")).get_column("visit") for v in visits.values() if v.height]
    spans = [(int(c[0]), int(c[-1])) for c in complete if c.len()]
    visit_range = (max(a for a, _ in spans), min(b for _, b in spans)) if spans else None
    p2p = pair_p2p(endpoints, topology, slack_ns=slack_ns, visit_range=visit_range)
    controls, control_losses = pair_controls(
        {r.info.rank: control_endpoints(r, visits[r.info.rank], topology) for r in capture.ranks}, topology
    )
    detail = "the hook's marks do not say which of its visits are those of the first rank: paired by their order"
    lost = losses_frame([loss("marks_disagree", "warning", 1, detail, rank) for rank in odd])
    losses = pl.concat([p2p.losses, control_losses, lost])
    return Matched(topology, visits, calls, p2p.messages, controls, p2p.unmatched, schema.LOSSES.frame(losses))


def _depth_is_zero(visits: Mapping[int, pl.DataFrame], capture: CaptureTables) -> bool:
    """Whether the results are exchanged after the forward (async depth 0) rather than before it, on every stage that
    shows both in a visit."""
    seen = False
    for rank in capture.ranks:
        frame = visits[rank.info.rank].filter(pl.col("run_ts_ns").is_not_null() & pl.col("complete"))
        receives = rank.annotations.filter(pl.col("name") == "recv_res_dict_from_prev_stage").select(
            pl.col("ts_ns").alias("recv_ns")
        )
        if frame.height == 0 or receives.height == 0:
            continue
        both = frame.select("visit", "ts_ns", "end_ns", "run_ts_ns").join_where(
            receives, pl.col("recv_ns") >= pl.col("ts_ns"), pl.col("recv_ns") < pl.col("end_ns")
        )
        if both.filter(pl.col("recv_ns") < pl.col("run_ts_ns")).height:
            return False
        seen = seen or both.height > 0
    return seen

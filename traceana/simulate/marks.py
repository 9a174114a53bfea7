"""Where each visit of a stage spends its host time: pieces between the points of SGLang's loop, its waits taken out.

A visit passes the points of `program` in order. `host_pieces` gives, for each point, the host's own work since the
point before, so that work and waits of a visit add up to its length. Points that a visit does not pass (no batch, no
neighbour, nothing to send) are null, and what lies before them falls to the next one.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from traceana.matching.spans import main_thread
from traceana.matching.visits import visit_of
from traceana.model.forwards import forward_of_activities
from traceana.model.graph import NEVER, STOP_COMMIT, STOP_SYNC
from traceana.model.model import Model
from traceana.tables import RankTables

__all__ = ["EXCHANGE", "PIECES", "host_pieces", "program"]

_BEFORE = ("receive", "ingest", "commit_requests", "send_requests", "schedule", "await_proxy", "receive_proxy")
EXCHANGE = ("commit_output", "send_output", "post_output", "await_result", "receive_result")
_FORWARD = ("commit_proxy", "prepare", "launch", "tail", "after_launch")
_AFTER = ("before_sync", "process", "send_proxy", "post_proxy", "finish")
PIECES = (*_BEFORE, *EXCHANGE, *_FORWARD, *_AFTER)
_WAITING = {
    "ingest": "requests",
    "receive_proxy": "proxy",
    "receive_result": "output",
}  # pieces that begin with a receive
_MODES = ("mode", "batch_size", "tokens")


def program(depth: int, *, receives_first: bool = False) -> tuple[str, ...]:
    """The points of a visit in order. At async depth 0 results are exchanged after the forward is launched, else
    before."""
    exchange = (*EXCHANGE[3:], *EXCHANGE[:3]) if receives_first else EXCHANGE
    middle = (*_FORWARD, *exchange) if depth == 0 else (*exchange, *_FORWARD)
    return (*_BEFORE, *middle, *_AFTER)


def host_pieces(model: Model, rank: int, depth: int, first: int, last: int) -> pl.DataFrame:
    """One row per whole visit of `rank` from `first` to `last`: visit, slot, mode, batch_size, tokens, ts_ns, end_ns,
    `graphed`, a column of nanoseconds per point of `program(depth)`, `wake` (from the end of the GPU work awaited to
    the sync's return) and `wait_ns` (everything the host waited for). Work, wake and waits of a row sum to its
    length. `receives_first`: results come in before they go out; `copies_last`: the copy to the host was issued when
    all of that was done. `paired` is false where the requests that came in were not matched: what the host waited for
    is then not known.
    """
    table = next(r for r in model.trace.capture.ranks if r.info.rank == rank)
    every = model.trace.visits.filter(pl.col("rank") == rank)
    visits = every.filter(pl.col("visit").is_between(first, last) & pl.col("complete")).sort("visit")
    points = _points(model, table, every, visits)
    waits = _held(model, rank, every)
    frame = visits.select("visit", "slot", *_MODES, "ts_ns", "end_ns")
    for part in (*points, waits):
        frame = frame.join(part, on="visit", how="left", maintain_order="left")
    # Which of the two halves of the exchange comes first (docs/concepts/whatif.md); most visits have both.
    ahead = frame.select((pl.col("await_result") < pl.col("commit_output")).mean()).item()
    receives_first = ahead is not None and ahead > 0.5
    if receives_first:  # the commit that waits stands at the start of the exchange, whatever comes next
        frame = frame.rename({"held_commit_output": "held_await_result"})
    order = [name for name in program(depth, receives_first=receives_first) if name in frame.columns]
    frame = frame.with_columns(pl.col("end_ns").alias("finish"), pl.lit(None, dtype=pl.Int64).alias("none"))
    # Column by column: as one expression, each point would hold those of all points before it twice.
    # A point out of its order (a version that places a span elsewhere) adds nothing rather than negative work.
    out = frame.select("visit", "slot", *_MODES, "ts_ns", "end_ns", "graphed", "wake")
    reach = frame.get_column("ts_ns")
    for name in (*order, "finish"):
        since = {"process": "synced", **{n: f"received_{k}" for n, k in _WAITING.items()}}.get(name)
        held = f"held_{name}" if f"held_{name}" in frame.columns else None
        step = frame.select(
            pl.max_horizontal(reach, *([since] if since else [])).alias("since"),
            name,
            pl.col(held or "none").fill_null(0).alias("held"),
        ).with_columns((pl.col(name) - pl.col("since") - pl.col("held")).clip(lower_bound=0).alias("work"))
        out = out.with_columns(step.get_column("work").alias(name))
        reach = step.select(pl.max_horizontal("since", name)).to_series()
    out = out.with_columns(pl.lit(None, dtype=pl.Int64).alias(n) for n in PIECES if n not in out.columns)
    worked = pl.sum_horizontal(pl.col(n).fill_null(0) for n in PIECES) + pl.col("wake").fill_null(0)
    return out.select(
        "visit", "slot", *_MODES, "ts_ns", "end_ns", "graphed", *PIECES, "wake",
        (pl.col("end_ns") - pl.col("ts_ns") - worked).alias("wait_ns"),
        pl.lit(receives_first).alias("receives_first"),
        (frame.get_column("copied") > frame.get_column("post_output")).alias("copies_last"),
        (frame.get_column("receive").is_not_null() | (model.trace.topology.stage.get(rank, 0) == 0)).alias("paired"),
    )  # fmt: skip


def _of_visits(visits: pl.DataFrame, times: pl.Series) -> pl.Series:
    return pl.Series("visit", visit_of(visits, times.to_numpy())).cast(pl.Int64)


def _points(model: Model, table: RankTables, every: pl.DataFrame, visits: pl.DataFrame) -> list[pl.DataFrame]:
    """Frames (visit, point, ...) with the time at which each visit passes each point."""
    rank = table.info.rank
    own = table.annotations.filter(pl.col("tid").eq_missing(main_thread(table))).with_columns(
        pl.col("name").cast(pl.String)
    )
    own = own.with_columns(_of_visits(every, own.get_column("ts_ns")))
    spans = own.group_by("visit", "name").agg(pl.col("ts_ns").min(), pl.col("end_ns").max())

    def span(name: str, column: str, point: str) -> pl.DataFrame:
        return spans.filter(pl.col("name") == name).select("visit", pl.col(column).alias(point))

    runs = visits.select("visit", pl.col("run_ts_ns").alias("commit_proxy"), pl.col("run_end_ns").alias("after_launch"))
    out = [
        span("recv_requests", "end_ns", "ingest"),
        span("send_reqs_to_next_stage", "ts_ns", "commit_requests"),
        span("get_next_batch_to_run", "end_ns", "schedule"),
        span("send_res_dict_to_next_stage", "ts_ns", "commit_output"),
        span("process_batch_result", "end_ns", "process"),
        runs,
    ]
    controls = model.trace.controls
    for kind, point in (("requests", "send_requests"), ("proxy", "send_proxy"), ("output", "send_output")):
        sent = controls.filter((pl.col("src") == rank) & (pl.col("kind") == kind))
        out.append(sent.group_by("visit").agg(pl.col("send_ts_ns").min().alias(point)))
    for kind, point in (("requests", "receive"), ("proxy", "await_proxy"), ("output", "await_result")):
        got = controls.filter((pl.col("dst") == rank) & (pl.col("kind") == kind))
        got = got.with_columns(_of_visits(every, got.get_column("recv_ts_ns")))
        out.append(
            got.group_by("visit").agg(
                pl.col("recv_ts_ns").min().alias(point), pl.col("recv_end_ns").max().alias(f"received_{kind}")
            )
        )
    calls = model.trace.launches[rank].with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    messages = model.trace.messages
    for side, kind, point in (
        ("recv", "proxy", "receive_proxy"),
        ("recv", "output", "receive_result"),
        ("send", "proxy", "post_proxy"),
        ("send", "output", "post_output"),
    ):
        mine = messages.filter((pl.col("dst" if side == "recv" else "src") == rank) & (pl.col("kind") == kind))
        mine = (
            mine.select(pl.col(f"{side}_row").alias("row")).join(calls, on="row", how="inner").drop_nulls("call_end_ns")
        )
        mine = mine.with_columns(_of_visits(every, mine.get_column("call_ts_ns")))
        out.append(mine.group_by("visit").agg(pl.col("call_end_ns").max().alias(point)))
    out += [_launches(table, every, model.trace.launches[rank]), _sync(model, table, every, spans)]
    return out


def _launches(table: RankTables, every: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """visit, `prepare`, `launch`: start and end of the launching of its forward: its graph launches, or all its
    launches where it has none; `tail`: the end of the last launch after them; `graphs`."""
    member = forward_of_activities(table, every, calls)
    frame = calls.with_columns(pl.Series("visit", member)).filter(pl.col("visit") >= 0)
    graph = pl.col("call_name").cast(pl.String).str.contains("GraphLaunch")
    any_graph = graph.any().over("visit")
    main = (
        frame.filter(graph | ~any_graph)
        .group_by("visit")
        .agg(pl.col("call_ts_ns").min().alias("prepare"), pl.col("call_end_ns").max().alias("launch"))
    )
    whole = frame.group_by("visit").agg(pl.col("call_end_ns").max().alias("tail"), graph.any().alias("graphed"))
    end = pl.when(pl.col("tail") > pl.col("launch")).then("tail")
    return main.join(whole, on="visit", how="left").select("visit", "prepare", "launch", end.alias("tail"), "graphed")


def _sync(model: Model, table: RankTables, every: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """visit, `before_sync`, `synced`, `wake`: the sync on the result's copy, the last one ahead of
    process_batch_result."""
    graph = model.blame.graph
    position = model.trace.ranks.index(table.info.rank)
    stop = graph.stop
    calls = table.calls.filter(
        pl.col("tid").eq_missing(main_thread(table)) & pl.col("name").cast(pl.String).str.contains("EventSynchronize")
    )
    calls = calls.select("ts_ns", "end_ns").with_columns(_of_visits(every, calls.get_column("ts_ns")))
    process = spans.filter(pl.col("name") == "process_batch_result").select(
        "visit", pl.col("ts_ns").alias("process_ts")
    )
    last = (
        calls.join(process, on="visit", how="inner")
        .filter(pl.col("end_ns") <= pl.col("process_ts"))
        .sort("ts_ns")
        .group_by("visit")
        .agg(pl.col("ts_ns").last().alias("before_sync"), pl.col("end_ns").last().alias("synced"))
    )
    rows = np.flatnonzero((stop.thread == graph.main[position]) & (stop.kind == STOP_SYNC))
    awaited = pl.DataFrame(
        {
            "before_sync": stop.start[rows],
            "awaited": graph.activity.end[stop.ref[rows]],
            "copied": graph.activity.call_start[stop.ref[rows]],
        },
        schema={"before_sync": pl.Int64, "awaited": pl.Int64, "copied": pl.Int64},
    ).unique("before_sync")
    # Where nothing was found that the call waited for, it is a short call: all of it is the host's.
    done = pl.col("awaited").fill_null(pl.col("before_sync"))
    return last.join(awaited, on="before_sync", how="left").select(
        "visit",
        "before_sync",
        "synced",
        "copied",
        (pl.col("synced") - pl.max_horizontal(done, "before_sync")).alias("wake"),
    )


def _held(model: Model, rank: int, every: pl.DataFrame) -> pl.DataFrame:
    """visit, and per point that begins with the commit of a send how long the commit was held by the peer."""
    graph = model.blame.graph
    position = model.trace.ranks.index(rank)
    stop = graph.stop
    rows = np.flatnonzero((stop.thread == graph.main[position]) & (stop.kind == STOP_COMMIT))
    end, ref, before = stop.end[rows], stop.ref[rows], stop.before[rows]
    posted = graph.control_recv[ref]
    wait = np.where((posted > before) & (posted < end) & (before != NEVER), end - before, 0)
    kinds = (
        model.trace.controls.get_column("kind").cast(pl.String).to_numpy()[ref]
        if ref.size
        else np.zeros(0, dtype=object)
    )
    frame = pl.DataFrame(
        {"visit": visit_of(every, end - 1), "kind": kinds.tolist(), "wait": wait},
        schema={"visit": pl.Int64, "kind": pl.String, "wait": pl.Int64},
    )
    out = every.select("visit")
    for kind, point in (("requests", "commit_requests"), ("proxy", "commit_proxy"), ("output", "commit_output")):
        held = frame.filter(pl.col("kind") == kind).group_by("visit").agg(pl.col("wait").sum().alias(f"held_{point}"))
        out = out.join(held, on="visit", how="left", maintain_order="left")
    return out

"""P2P: waiting, transfer and bandwidth of every link and direction, by kind of message."""

from __future__ import annotations

import polars as pl

from traceana.model.model import Model, quantiles_ns
from traceana.model.transfers import message_parts
from traceana.result import Result

__all__ = ["NAME", "run"]

NAME = "p2p"


def run(model: Model) -> Result:
    """Fact `p2p`: one object per (src, dst, kind, dtype, bytes) with messages sent in the window.

    `latency_ns` is receive end minus the later of the two kernels' starts; `transfer_ns` and `wait_ns` split the
    receive kernel; `send_wait_ns` is what the send kernel waited; `gbps_p50` is gigabits a second at the median
    transfer. `unmatched` counts kernels of that link and kind without a partner in the window's visits.
    """
    trace = model.trace
    inside = trace.messages.filter(
        pl.col("send_ts_ns").is_between(trace.window.start_ns, trace.window.end_ns, closed="left")
    )
    parts = message_parts(trace.messages, trace.uncertainty_ns)
    moved = parts.select(pl.col("rank").alias("dst"), pl.col("row").alias("recv_row"), "transfer_ns")
    sent = parts.select(
        pl.col("rank").alias("src"), pl.col("row").alias("send_row"), pl.col("transfer_ns").alias("sending_ns")
    )
    messages = (
        inside.join(moved, on=["dst", "recv_row"], how="left")
        .join(sent, on=["src", "send_row"], how="left")
        .with_columns(
            (pl.col("recv_end_ns") - pl.max_horizontal("send_ts_ns", "recv_ts_ns")).alias("latency_ns"),
            (pl.col("recv_end_ns") - pl.col("recv_ts_ns") - pl.col("transfer_ns")).alias("wait_ns"),
            (pl.col("send_end_ns") - pl.col("send_ts_ns") - pl.col("sending_ns")).alias("send_wait_ns"),
        )
        .sort("src", "dst", "kind", "ordinal")
    )
    keys = ["src", "dst", "kind", "dtype", "bytes"]
    alone = _unmatched(model)
    links: list[dict[str, object]] = []
    for key, group in messages.group_by(keys, maintain_order=True):
        about = dict(zip(keys, key, strict=True))
        transfer = quantiles_ns(group.get_column("transfer_ns"))
        size, median = about["bytes"], transfer["p50_ns"]
        link: dict[str, object] = {
            **about,
            "count": group.height,
            "unmatched": alone.get((about["src"], about["dst"], about["kind"]), 0),
            "latency_ns": quantiles_ns(group.get_column("latency_ns")),
            "transfer_ns": transfer,
            "wait_ns": quantiles_ns(group.get_column("wait_ns")),
            "send_wait_ns": quantiles_ns(group.get_column("send_wait_ns")),
            "gbps_p50": 8 * size / median if isinstance(size, int) and median else None,
        }
        links.append(link)
    return Result(NAME, {"messages": messages}, {"p2p": links})


def _unmatched(model: Model) -> dict[tuple[object, ...], int]:
    frame = model.trace.unmatched
    if frame.height == 0:
        return {}
    w = model.trace.window
    rows = frame.filter((pl.col("ts_ns") >= w.start_ns) & (pl.col("end_ns") <= w.end_ns))
    if w.first_visit is not None and w.last_visit is not None:
        # A message whose partner's visit lies outside the traces is lost at their edge, not missing.
        rows = rows.filter(pl.col("visit").is_between(w.first_visit + 1, w.last_visit - 1))
    counts = rows.group_by("src", "dst", "kind").len()
    return {(s, d, k): int(n) for s, d, k, n in counts.iter_rows()}

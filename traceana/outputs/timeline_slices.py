"""Slices of the merged timeline whose names and order need more than one column: states, micro-batches, streams."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from traceana.outputs.perfetto_packets import PacketSequence
from traceana.outputs.perfetto_text import Texts

__all__ = [
    "bubble_names",
    "bubbles",
    "device_runs",
    "micro_batch_slices",
    "slice_spans",
    "stream_purposes",
]


def slice_spans(states: pl.DataFrame, attribution: pl.DataFrame) -> pl.DataFrame:
    """ts_ns, end_ns and gap of the top-level slices of the Attribution track of one rank, in order of their start: runs of
    busy and transfer, and bubbles."""
    device = device_runs(states).filter(pl.col("state") != "bubble").select("ts_ns", "end_ns")
    idle = bubbles(states, attribution).select("ts_ns", "end_ns", "gap")
    return pl.concat([device, idle], how="diagonal").sort("ts_ns", maintain_order=True)


def device_runs(states: pl.DataFrame) -> pl.DataFrame:
    """STATES of one rank with neighbours of the same state as one: ts_ns, end_ns, state, visit (of the first)."""
    rows = states if states.get_column("ts_ns").is_sorted() else states.sort("ts_ns")
    new = (pl.col("state") != pl.col("state").shift(1)) | (pl.col("ts_ns") != pl.col("end_ns").shift(1))
    first = np.flatnonzero(rows.select(new.fill_null(True)).to_series().to_numpy())
    last = np.append(first[1:], rows.height)[: first.size] - 1
    return rows[first].select("ts_ns", "state", "visit").with_columns(rows.get_column("end_ns").gather(last))


def bubbles(states: pl.DataFrame, attribution: pl.DataFrame) -> pl.DataFrame:
    """ATTRIBUTION of one rank; where it has no row, the bubbles of the rank's STATES stand for themselves."""
    if attribution.height:
        return attribution
    alone = device_runs(states).filter(pl.col("state") == "bubble").select("ts_ns", "end_ns", "visit")
    return pl.concat([attribution, alone], how="diagonal")


def bubble_names(rows: pl.DataFrame, cause: Texts, detail: Texts, name: Mapping[int, str], prefix: str = "") -> Texts:
    """What each of the rows of `bubbles` is called: `upstream_compute ← stage 1 · serial` after `prefix`, or `bubble`
    without a cause. `cause` and `detail` are the columns of that name, `name` is how a rank is called."""
    root = rows.get_column("root_rank").fill_null(-1).to_numpy().astype(np.int64)
    rank = rows.get_column("rank").fill_null(-1).to_numpy().astype(np.int64)

    def tell(row: list[int]) -> str:
        why, because, of, here = row
        if why < 0:
            return "bubble"
        remote = f" ← {name[of]}" if of != here and of in name else ""
        return prefix + cause.texts[why] + remote + (f" · {detail.texts[because]}" if because >= 0 else "")

    return Texts.told(tell, cause.places, detail.places, root, rank)


def micro_batch_slices(packets: PacketSequence, forwards: pl.DataFrame) -> pl.DataFrame:
    """Slices of FORWARDS, one a row in the same order, named and coloured by micro-batch; without arrows."""
    mode = pl.col("mode").fill_null("forward").str.to_lowercase()
    tokens = pl.when(pl.col("tokens") != pl.col("batch_size")).then(pl.format(" tokens={}", "tokens")).fill_null("")
    name = (
        pl.format("mb {}", "visit")
        + pl.format(" · slot {}", "slot").fill_null("")
        + pl.lit(" · ")
        + mode
        + pl.format(" bs={}", "batch_size").fill_null("")
        + tokens.fill_null("")
    )
    ids = packets.names.column(forwards.select(name.alias("name")).get_column("name"))
    return forwards.select(
        "ts_ns", "end_ns", ids, pl.lit(packets.categories.id("micro-batch"), pl.Int64).alias("category"),
        (pl.col("visit") + 1).alias("correlation"),
        pl.col("visit").alias("int:micro_batch"), pl.col("slot").cast(pl.Int64).alias("int:slot"),
        pl.col("batch_size").cast(pl.Int64).alias("int:batch_size"), pl.col("tokens").alias("int:tokens"),
        pl.col("busy_ns").alias("int:busy_ns"), pl.col("launch_ns").alias("int:launch_ns"),
        pl.col("graphs").cast(pl.Int64).alias("int:graphs"), pl.col("kernels").cast(pl.Int64).alias("int:kernels"),
    )  # fmt: skip


def stream_purposes(device: pl.DataFrame, spans: pl.DataFrame) -> list[tuple[int | None, int, str]]:
    """(gpu, stream, what it carries), the one with the most computation first, communication and copies last."""
    collective = pl.col("collective").cast(pl.String)
    p2p, gathered = collective.is_in(["send", "recv"]), collective.is_not_null()
    kernel, spent = pl.col("kind").cast(pl.String) == "kernel", pl.col("end_ns") - pl.col("ts_ns")
    used = device.group_by("device", "stream").agg(
        spent.filter(kernel & collective.is_null()).sum().alias("compute"),
        p2p.any().fill_null(False).alias("p2p"),
        gathered.any().alias("gathered"),
        kernel.any().alias("kernels"),
    )
    rows = pl.concat([used, spans.select("device", "stream").unique()], how="diagonal").unique(
        ["device", "stream"], keep="first", maintain_order=True
    )
    what = (
        pl.when(pl.col("compute") > 0)
        .then(pl.lit("compute"))
        .when(pl.col("p2p"))
        .then(pl.lit("send and receive"))
        .when(pl.col("gathered"))
        .then(pl.lit("collectives"))
        .when(pl.col("kernels"))
        .then(pl.lit("kernels"))
        .otherwise(pl.lit("copies"))
    )
    named = rows.with_columns(what.alias("what"), pl.col("compute").fill_null(0))
    ordered = named.sort("compute", "device", "stream", descending=[True, False, False])
    return [(gpu, stream, text) for gpu, stream, text in ordered.select("device", "stream", "what").iter_rows()]

"""What the timeline of the HTML report is drawn from: every stretch of every stage, compact.

A lane is one rank: stretches that tile the window, each with a code (see `CODES`), the micro-batch step that runs or
is awaited, and for idle ones the evidence. Nothing is dropped while it fits; above that, runs of short stretches are
gathered into one `mixed` stretch that keeps their nanoseconds by code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from traceana.errors import OutputError
from traceana.outputs.html_pack import Pack
from traceana.outputs.words import CAUSES, CLASSES, TRANSFER, integer, mapping, plain_text, rows

__all__ = ["CODES", "MIXED", "gather", "lanes", "pack_timeline"]

CODES: tuple[str, ...] = tuple(k.name for k in (*CLASSES, TRANSFER, *CAUSES))
"""Names of the codes, in order: kernel classes, transfer, causes. A stretch of several has the code MIXED."""
MIXED = 255
_TRANSFER = len(CLASSES)
_MAX_STRETCHES = 500_000
_MAX_TEXT = 4_000_000
_LINKS = {"rank": pl.Int32, "gap": pl.Int64, "chain": pl.Int64, "what": pl.String}
_EVIDENCE = ("root_rank", "detail", "crossed_token_return", "what")


def lanes(
    tables: Mapping[str, pl.DataFrame], start_ns: int, worst_gaps: Sequence[Mapping[str, object]] = ()
) -> pl.DataFrame:
    """All stretches in order of rank and time: rank, ts_ns and end_ns from the window's start, code, visit, gap,
    chain, root_rank, detail, crossed_token_return, what. Raises OutputError where they do not tile.

    `what` is the event in words: from the table `links` (rank, gap, chain, what), else from the chains of the report's
    `worst_gaps`, else from the attribution's own first and last event.
    """
    code = {name: i for i, name in enumerate(CODES)}
    states = (
        tables["states"]
        .filter(pl.col("state") != "bubble")
        .select(
            "rank",
            "ts_ns",
            "end_ns",
            "visit",
            pl.coalesce(
                pl.when(pl.col("state") == "transfer").then(pl.lit(_TRANSFER)),
                pl.col("kernel_class")
                .cast(pl.String)
                .replace_strict(code, default=code["other"], return_dtype=pl.Int32),
                pl.lit(code["other"]),
            )
            .cast(pl.Int32)
            .alias("code"),
        )
    )
    attribution = tables["attribution"].with_columns(
        pl.col("cause")
        .cast(pl.String)
        .replace_strict(code, default=code["unknown"], return_dtype=pl.Int32)
        .alias("code")
    )
    links = tables.get("links", pl.DataFrame(schema=_LINKS)).select(*_LINKS)
    between = pl.concat_str(pl.lit("from "), "first_event", pl.lit(" to "), "last_event")
    idle = attribution.join(links, on=["rank", "gap", "chain"], how="left").join(
        _told(worst_gaps), on=["rank", "ts_ns"], how="left"
    )
    idle = idle.with_columns(pl.coalesce("what", "told", between).alias("what")).select(
        *states.columns, "gap", "chain", *_EVIDENCE
    )
    out = (
        pl.concat([states, idle], how="diagonal")
        .sort("rank", "ts_ns")
        .with_columns(pl.col("ts_ns") - start_ns, pl.col("end_ns") - start_ns)
    )
    broken = out.filter((pl.col("end_ns") != pl.col("ts_ns").shift(-1).over("rank")).fill_null(False))
    if broken.height:
        row = broken.row(0, named=True)
        raise OutputError(
            "the stretches of a stage do not tile its window",
            where=f"rank {row['rank']}, {row['end_ns']} ns from the window's start",
            hint="report this with the capture",
        )
    return out


def _told(worst_gaps: Sequence[Mapping[str, object]]) -> pl.DataFrame:
    """rank, ts_ns, told: the words that the document has for the links of its worst gaps."""
    found = {
        (integer(gap.get("rank")), integer(link.get("ts_ns"))): str(link["what"])
        for gap in worst_gaps
        for link in rows(gap.get("chain"))
        if link.get("what")
    }
    told = [{"rank": rank, "ts_ns": ts, "told": what} for (rank, ts), what in found.items()]
    return pl.DataFrame(told, schema={"rank": pl.Int32, "ts_ns": pl.Int64, "told": pl.String})


def gather(stretches: pl.DataFrame, shorter_than_ns: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Runs of two or more stretches below a length, on one rank and of one step, become one of code MIXED.

    Returns (stretches, parts): parts are the nanoseconds by code of each mixed one (mixed, code, ns, stretches),
    `mixed` counting them from 0 in order.
    """
    parts = {"mixed": pl.Int64, "code": pl.Int32, "ns": pl.Int64, "stretches": pl.Int64}
    if shorter_than_ns <= 0 or stretches.height == 0:
        return stretches, pl.DataFrame(schema=parts)
    short = (pl.col("end_ns") - pl.col("ts_ns")) < shorter_than_ns
    key = pl.struct("rank", short.alias("short"))
    marked = stretches.with_columns(short.alias("short"), key.rle_id().alias("run"))
    marked = marked.with_columns((pl.col("short") & (pl.len().over("run") > 1)).alias("gathered"))
    some = marked.filter("gathered").with_columns((pl.col("run").rle_id()).cast(pl.Int64).alias("mixed"))
    composition = (
        some.group_by("mixed", "code")
        .agg((pl.col("end_ns") - pl.col("ts_ns")).sum().alias("ns"), pl.len().cast(pl.Int64).alias("stretches"))
        .sort("mixed", "code")
    )
    runs = (
        some.group_by("mixed", maintain_order=True)
        .agg(
            pl.col("rank").first(),
            pl.col("ts_ns").first(),
            pl.col("end_ns").last(),
            pl.col("visit").drop_nulls().mode().sort().first(),
            pl.lit(MIXED, dtype=pl.Int32).alias("code"),
        )
        .drop("mixed")
    )
    kept = marked.filter(~pl.col("gathered")).select(stretches.columns)
    out = pl.concat([kept, runs], how="diagonal").sort("rank", "ts_ns")
    return out, composition.select(list(parts))


def pack_timeline(document: Mapping[str, object], tables: Mapping[str, pl.DataFrame]) -> str | None:
    """The text that the page's script unpacks; None where the document has no window or no stretch lies in it."""
    window = mapping(document.get("window"))
    start, length = integer(window.get("start_ns")), integer(window.get("duration_ns"))
    if start is None or not length or "states" not in tables or "attribution" not in tables:
        return None
    stretches = lanes(tables, start, rows(document.get("worst_gaps")))
    if stretches.height == 0:
        return None
    shorter = 0
    while True:
        drawn, parts = gather(stretches, shorter)
        if drawn.height <= _MAX_STRETCHES:
            text = _pack(drawn, parts, tables, start, length, shorter)
            if len(text) <= _MAX_TEXT or shorter > length:
                return text
        shorter = max(1_000, shorter * 2)


def _pack(
    drawn: pl.DataFrame, parts: pl.DataFrame, tables: Mapping[str, pl.DataFrame], start: int, length: int, shorter: int
) -> str:
    pack = Pack()
    evidence = drawn.select(_EVIDENCE).unique(maintain_order=True)
    strings = (
        pl.concat([evidence.get_column("detail"), evidence.get_column("what")]).drop_nulls().unique(maintain_order=True)
    )
    at = {text: i for i, text in enumerate(strings)}
    number = evidence.with_row_index("evidence").with_columns(pl.col("evidence").cast(pl.Int64))
    coded = drawn.join(number, on=_EVIDENCE, how="left", nulls_equal=True, maintain_order="left")
    pack.fact("window_ns", length)
    pack.fact("gathered_below_ns", shorter)
    pack.fact("codes", list(CODES))
    pack.fact("classes", len(CLASSES))
    pack.fact("strings", [plain_text(s) for s in strings])
    ranks: list[int] = []
    for (rank,), mine in coded.group_by("rank", maintain_order=True):
        ranks.append(int(str(rank)))
        pack.add(f"length{rank}", mine.get_column("end_ns") - mine.get_column("ts_ns"))
        pack.add(f"code{rank}", mine.get_column("code"))
        pack.add(f"visit{rank}", mine.get_column("visit"), delta=True)
        pack.add(f"gap{rank}", mine.get_column("gap").forward_fill().fill_null(-1), delta=True)
        pack.add(f"evidence{rank}", mine.get_column("evidence"))
        pack.add(f"start{rank}", mine.get_column("ts_ns").head(1))
    pack.fact("ranks", ranks)
    for name in ("detail", "what"):
        pack.add(name, evidence.get_column(name).replace_strict(at, default=None, return_dtype=pl.Int64))
    pack.add("root", evidence.get_column("root_rank"))
    pack.add("crossed", evidence.get_column("crossed_token_return").cast(pl.Int64))
    for name in ("mixed", "code", "ns", "stretches"):
        pack.add(f"part_{name}", parts.get_column(name))
    _forwards(pack, tables, start, length)
    _messages(pack, tables, start, length)
    _counters(pack, tables, start, length)
    return pack.text()


def _inside(frame: pl.DataFrame, first: str, last: str, start: int, length: int) -> pl.DataFrame:
    return frame.filter((pl.col(last) > start) & (pl.col(first) < start + length))


def _forwards(pack: Pack, tables: Mapping[str, pl.DataFrame], start: int, length: int) -> None:
    """Forwards that touch the window, with their whole extent: rank, visit, slot, mode, sizes, launches."""
    columns = ("rank", "visit", "slot", "batch_size", "tokens", "busy_ns", "launch_ns", "graphs", "kernels")
    if "forwards" not in tables:
        return
    mine = _inside(tables["forwards"], "ts_ns", "end_ns", start, length).sort("rank", "ts_ns")
    modes = mine.get_column("mode").cast(pl.String)
    names = modes.drop_nulls().unique(maintain_order=True).to_list()
    pack.fact("modes", [plain_text(n) for n in names])
    pack.add("f_start", mine.get_column("ts_ns") - start, delta=True)
    pack.add("f_length", mine.get_column("end_ns") - mine.get_column("ts_ns"))
    pack.add("f_mode", modes.replace_strict({n: i for i, n in enumerate(names)}, default=None, return_dtype=pl.Int64))
    for name in columns:
        pack.add(f"f_{name}", mine.get_column(name))


def _messages(pack: Pack, tables: Mapping[str, pl.DataFrame], start: int, length: int) -> None:
    """Messages that touch the window: who, what, when."""
    if "messages" not in tables or tables["messages"].height == 0:
        return
    mine = _inside(tables["messages"], "send_ts_ns", "recv_end_ns", start, length).sort("send_ts_ns")
    kinds = mine.get_column("kind").cast(pl.String)
    names = kinds.unique(maintain_order=True).to_list()
    pack.fact("kinds", [plain_text(n) for n in names])
    pack.add("m_kind", kinds.replace_strict({n: i for i, n in enumerate(names)}, return_dtype=pl.Int64))
    for name in ("send_ts_ns", "send_end_ns", "recv_ts_ns", "recv_end_ns"):
        pack.add(f"m_{name}", mine.get_column(name) - start, delta=True)
    for name in ("src", "dst", "visit", "bytes"):
        pack.add(f"m_{name}", mine.get_column(name))


def _counters(pack: Pack, tables: Mapping[str, pl.DataFrame], start: int, length: int) -> None:
    """Micro-batches in flight in the window; GPU samples of the whole recording (power in mW, shares in 1/1000)."""
    if "in_flight" in tables and tables["in_flight"].height > 1:
        steps = _inside(tables["in_flight"], "ts_ns", "end_ns", start, length).sort("ts_ns")
        pack.add("in_flight_start", steps.get_column("ts_ns") - start, delta=True)
        pack.add("in_flight_count", steps.get_column("count"))
    if "gpu_samples" in tables and tables["gpu_samples"].height:
        samples = tables["gpu_samples"].sort("ts_ns")
        pack.add("g_ts", samples.get_column("ts_ns") - start, delta=True)
        pack.add("g_rank", samples.get_column("rank"))
        pack.add("g_gpu", samples.get_column("gpu"))
        for name, column, scale in (
            ("g_power", "power_w", 1000),
            ("g_limit", "power_limit_w", 1000),
            ("g_utilisation", "utilisation", 1000),
            ("g_clock", "sm_clock_mhz", 1),
        ):
            pack.add(name, (samples.get_column(column) * scale).round())

"""SGLang's server log: one frame per kind of line. Columns only: some logs have a line per step and stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from traceana.sources.losses import Loss, loss
from traceana.sources.sidecar import Sidecar

__all__ = ["ServerLog", "read_log"]

# `[2026-11-29 16:29:43.123 DP0 PP1 TP0] message`, wherever a progress bar or a container runtime put it in the line.
# Years that nanoseconds in 64 bits can hold, ranks that 32 can: anything else is no line of the scheduler.
_PREFIX = r"\[(2[01]\d\d-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?((?: [A-Z][A-Z_]*\d{1,6})*)\] ?(.*)$"
_ANSI = r"\x1b\[[0-9;]*m"
_ACCESS = r'^INFO: +\S+ - "([A-Z]+) (\S+) HTTP/[\d.]+" (\d{3})'
_PROFILE = (
    r"^(Profiling starts|Stop profiling|Profiling done)(?:(?: for |-)(\w+))?[. ]?"
    r"(?:.*?saved to: (.*?))?(?: \(with profile id: (\S+?)\)| Merged trace: .*)?\.*$"
)
_FLOAT = r"([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)"

_SHARED = {
    "iteration": (r"^\w+ batch \[(\d+)\]", pl.Int64()),
    "running": (r"#running-req: (\d+)", pl.Int64()),
    "queue": (r"#queue-req: (\d+)", pl.Int64()),
    "token_usage": (rf"\b(?:full )?token usage: {_FLOAT}", pl.Float64()),
}
_DECODE = _SHARED | {
    "tokens": (r"#(?:full )?token: (\d+)", pl.Int64()),
    "accept_length": (rf"accept len: {_FLOAT}", pl.Float64()),
    "gen_throughput": (rf"gen throughput \(token/s\): {_FLOAT}", pl.Float64()),
    "fwd_occupancy": (rf"fwd occupancy: {_FLOAT}%", pl.Float64()),
}
_PREFILL = _SHARED | {
    "new_seqs": (r"#new-seq: (\d+)", pl.Int64()),
    "new_tokens": (r"#new-token: (\d+)", pl.Int64()),
    "cached_tokens": (r"#cached-token: (\d+)", pl.Int64()),
    "pending_tokens": (r"#pending-token: (\d+)", pl.Int64()),
    "input_throughput": (rf"input throughput \(token/s\): {_FLOAT}", pl.Float64()),
}
# Facts of one stage: name -> pattern with one group over the messages of that stage. The last line that has it counts.
_STAGE_FACTS: Mapping[str, tuple[str, pl.DataType]] = {
    "weight_gb": (rf"^Load weight end\..*\bmem usage={_FLOAT} GB", pl.Float64()),
    "kv_tokens": (r"^KV Cache is allocated\..*#tokens: (\d+)", pl.Int64()),
    "k_gb": (rf"^KV Cache is allocated\..*\bK size: {_FLOAT} GB", pl.Float64()),
    "v_gb": (rf"^KV Cache is allocated\..*\bV size: {_FLOAT} GB", pl.Float64()),
    "kv_gb": (rf"^KV Cache is allocated\..*\bKV size: {_FLOAT} GB", pl.Float64()),
    "graph_gb": (rf"^Capture target decode CUDA graph end\..*\bmem usage={_FLOAT} GB", pl.Float64()),
    "available_gb": (rf"^max_total_num_tokens=.*\bavailable_gpu_mem={_FLOAT} GB", pl.Float64()),
    "capacity": (r"^max_total_num_tokens=(\d+)", pl.Int64()),
    "max_running_requests": (r"^max_total_num_tokens=.*\bmax_running_requests=(\d+)", pl.Int64()),
    "chunked_prefill_size": (r"^max_total_num_tokens=.*\bchunked_prefill_size=(-?\d+)", pl.Int64()),
    "context_len": (r"^max_total_num_tokens=.*\bcontext_len=(\d+)", pl.Int64()),
    "decode_graph_backend": (r"^Capture target decode CUDA graph begin\..*\bbackend=(\w+)", pl.String()),
    "decode_graph_sizes": (
        r"^Capture (?:target decode CUDA graph begin\..*\bbs=|cuda graph bs )\[([\d, ]*)\]",
        pl.String(),
    ),
    "prefill_graph_backend": (r"^Capture target prefill CUDA graph begin\..*\bbackend=(\w+)", pl.String()),
    "nccl": (r"^sglang is using nccl==([\w.]+)", pl.String()),
    "architecture": (r"^Load weight end\..*\btype=(\w+)", pl.String()),
    "experts": (r"^Using default MoE kernel config.*/E=(\d+),N=\d+", pl.Int64()),
    "gpu_name": (r"^Using default MoE kernel config.*device_name=([\w ]+?)(?:_down)?[.,]", pl.String()),
}


@dataclass(frozen=True, slots=True)
class ServerLog:
    """One log. `printed_ns` is the printed time read as UTC; `line` the line's place in the file.

    decode, prefill: line, printed_ns, pp_rank, tp_rank, dp_rank, cuda_graph and the columns of _DECODE, _PREFILL
    profile: line, printed_ns, pp_rank, tp_rank, dp_rank, event, stage, folder, id
    access: line, printed_ns, method, path, status
    stages: pp_rank, tp_rank, dp_rank and the columns of _STAGE_FACTS; one row per stage, null where it does not say
    """

    file: str
    decode: pl.DataFrame
    prefill: pl.DataFrame
    profile: pl.DataFrame
    access: pl.DataFrame
    stages: pl.DataFrame
    server_args: str | None
    resolution_ns: int


def read_log(sidecar: Sidecar) -> tuple[ServerLog, list[Loss]]:
    """The lines of `sidecar` by kind, and how many were not understood."""
    raw = pl.DataFrame({"raw": sidecar.text.replace("\r\n", "\n").replace("\r", "\n").split("\n")})
    raw = raw.with_row_index("line").filter(pl.col("raw").str.contains(r"\S"))
    if "\x1b" in sidecar.text:
        raw = raw.with_columns(pl.col("raw").str.replace_all(_ANSI, ""))
    lines = (
        raw.with_columns(pl.col("raw").str.extract_groups(_PREFIX).alias("g"))
        .select(
            "line",
            (
                pl.col("g")
                .struct["1"]
                .str.to_datetime("%Y-%m-%d %H:%M:%S", strict=False, time_unit="ns")
                .dt.epoch("ns")
                + pl.col("g").struct["2"].fill_null("0").str.pad_end(9, "0").cast(pl.Int64(), strict=False).fill_null(0)
            ).alias("printed_ns"),
            pl.col("g").struct["2"].str.len_bytes().alias("digits"),
            *(
                pl.col("g")
                .struct["3"]
                .str.extract(rf" {tag}(\d+)")
                .cast(pl.Int32(), strict=False)
                .alias(f"{tag.lower()}_rank")
                for tag in ("PP", "TP", "DP")
            ),
            pl.col("g").struct["4"].alias("message"),
        )
        .drop_nulls("printed_ns")
    )
    message = pl.col("message")
    batches = lines.filter(message.str.starts_with("Decode batch") | message.str.starts_with("Prefill batch"))
    rest = lines.join(batches.select("line"), on="line", how="anti", maintain_order="left")
    decode = _batches(batches.filter(message.str.starts_with("Decode")), _DECODE)
    prefill = _batches(batches.filter(message.str.starts_with("Prefill")), _PREFILL)
    access = _groups(rest, _ACCESS, {"method": pl.String(), "path": pl.String(), "status": pl.Int32()})
    profile = _groups(rest, _PROFILE, dict.fromkeys(("event", "stage", "folder", "id"), pl.String()))
    stages, used = _stages(rest)
    server_args = rest.filter(message.str.starts_with("server_args=")).get_column("message")
    good_decode = decode.drop_nulls(["running", "gen_throughput"]).filter(pl.col("gen_throughput").is_finite())
    good_prefill = prefill.drop_nulls(["new_seqs", "new_tokens"])
    malformed = batches.height - good_decode.height - good_prefill.height
    parsed = batches.height - malformed + access.height + profile.height + used + min(len(server_args), 1)
    losses: list[Loss] = []
    if malformed:
        losses.append(
            loss(
                "log_batch_line_malformed",
                "warning",
                malformed,
                f"{sidecar.path.name}: batch lines without their figures",
            )
        )
    if raw.height > parsed + malformed:
        untimed = raw.height - lines.height
        losses.append(
            loss(
                "log_line_unparsed",
                "info",
                raw.height - parsed - malformed,
                f"{sidecar.path.name}: {untimed} lines without a time (progress bars, warnings of libraries), the rest "
                "messages that hold no figure traceana uses",
            )
        )
    finest = lines.get_column("digits").max()
    log = ServerLog(
        file=sidecar.path.name,
        decode=good_decode,
        prefill=good_prefill,
        profile=profile,
        access=access,
        stages=stages,
        server_args=str(server_args[0]) if len(server_args) else None,
        resolution_ns=10 ** (9 - finest) if isinstance(finest, int) else 10**9,
    )
    return log, losses


def _batches(lines: pl.DataFrame, fields: Mapping[str, tuple[str, pl.DataType]]) -> pl.DataFrame:
    message = pl.col("message")
    graph = message.str.extract(r"cuda graph: (True|False)")
    return lines.select(
        "line",
        "printed_ns",
        pl.col("pp_rank").fill_null(0),
        pl.col("tp_rank").fill_null(0),
        "dp_rank",
        (graph == "True").alias("cuda_graph"),
        *(message.str.extract(p).cast(dtype, strict=False).alias(name) for name, (p, dtype) in fields.items()),
    )


def _groups(lines: pl.DataFrame, pattern: str, columns: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """The lines that match `pattern`, its groups as `columns`."""
    groups = lines.with_columns(pl.col("message").str.extract_groups(pattern).alias("g"))
    first = next(iter(columns))
    return groups.select(
        "line",
        "printed_ns",
        pl.col("pp_rank").fill_null(0),
        pl.col("tp_rank").fill_null(0),
        "dp_rank",
        *(
            pl.col("g").struct[str(i)].cast(dtype, strict=False).alias(name)
            for i, (name, dtype) in enumerate(columns.items(), 1)
        ),
    ).drop_nulls(first)


def _stages(lines: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """One row per (pp, tp, dp) with what its lines say of it, and the number of lines that said something."""
    # Few lines are left to look at: what a server prints once per stage while it starts.
    lines = lines.filter(
        pl.col("message").str.contains(
            r"^(?:Load weight|KV Cache|Capture |max_total_num|sglang is using|Using default MoE)"
        )
    )
    message = pl.col("message")
    found = lines.select(
        pl.col("pp_rank").fill_null(0),
        pl.col("tp_rank").fill_null(0),
        pl.col("dp_rank").fill_null(0),
        *(message.str.extract(p).cast(dtype, strict=False).alias(name) for name, (p, dtype) in _STAGE_FACTS.items()),
    )
    used = found.filter(pl.any_horizontal(pl.col(list(_STAGE_FACTS)).is_not_null())).height
    keys = ["pp_rank", "tp_rank", "dp_rank"]
    return found.group_by(keys).agg(pl.col(list(_STAGE_FACTS)).drop_nulls().last()).sort(keys), used

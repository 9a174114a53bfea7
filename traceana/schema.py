"""Every table traceana makes: column, type, unit, meaning. `docs/reference/tables.md` is generated from this file.

Times are integer nanoseconds. Before the clock is applied they are epoch nanoseconds on the rank's own clock; after it
they are epoch nanoseconds on trace time (the reference rank's clock). Intervals are half-open `[ts_ns, end_ns)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from traceana.errors import SchemaError

__all__ = ["TABLES", "Column", "Table"]

I64 = pl.Int64()
I32 = pl.Int32()
STR = pl.String()
CAT = pl.Categorical()
BOOL = pl.Boolean()
F64 = pl.Float64()


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its polars type, whether it may be null, its unit (empty where it has none), and what it means."""

    name: str
    dtype: pl.DataType
    doc: str
    unit: str = ""
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table's name, what one row is, and its columns in order."""

    name: str
    row: str
    columns: tuple[Column, ...]

    @property
    def polars_schema(self) -> pl.Schema:
        """The columns and types, in order."""
        return pl.Schema({c.name: c.dtype for c in self.columns})

    def empty(self) -> pl.DataFrame:
        """A frame of this table without rows."""
        return pl.DataFrame(schema=self.polars_schema)

    def frame(self, data: Mapping[str, object] | Sequence[Mapping[str, object]] | pl.DataFrame) -> pl.DataFrame:
        """`data` as a frame of this table: missing nullable columns become null, types are cast strictly, extra
        columns are dropped. Raises SchemaError for a missing column or a null where none is allowed."""
        raw = data if isinstance(data, pl.DataFrame) else pl.DataFrame(data, strict=False)
        if raw.height == 0 and not raw.columns:
            return self.empty()
        out: list[pl.Series] = []
        for column in self.columns:
            if column.name not in raw.columns:
                if not column.nullable:
                    raise SchemaError(f"table {self.name} lacks the column {column.name}", hint="report this as a bug")
                out.append(pl.Series(column.name, [], dtype=column.dtype).clear(raw.height))
                continue
            series = raw.get_column(column.name)
            if series.dtype != column.dtype:
                series = series.cast(column.dtype, strict=True)
            if not column.nullable and series.null_count():
                raise SchemaError(f"table {self.name} has nulls in {column.name}", hint="report this as a bug")
            out.append(series)
        return pl.DataFrame(out)


def _interval(what: str) -> tuple[Column, Column]:
    return (
        Column("ts_ns", I64, f"start of the {what}", "ns"),
        Column("end_ns", I64, f"end of the {what}, exclusive", "ns"),
    )


_COMMUNICATION = (
    Column("collective", CAT, "`Collective name` of an NCCL kernel: send, recv, allreduce, ...", nullable=True),
    Column("src_rank", I32, "global rank that sends (receives only carry it)", nullable=True),
    Column("dst_rank", I32, "global rank that receives (sends only carry it)", nullable=True),
    Column("in_elements", I64, "elements in the input message", "elements", nullable=True),
    Column("out_elements", I64, "elements in the output message", "elements", nullable=True),
    Column("dtype", CAT, "element type as torch names it: BFloat16, Int, ...", nullable=True),
    Column("group", CAT, "process group name", nullable=True),
    Column("group_desc", CAT, "process group description, for instance `pp:device`", nullable=True),
    Column("group_size", I32, "ranks in the process group", nullable=True),
    Column("seq", I64, "`Seq`: the group's collective counter; does not count P2P messages", nullable=True),
)

DEVICE = Table(
    "device",
    "one activity of a GPU: a kernel, a copy or a fill",
    (
        *_interval("activity"),
        Column("kind", CAT, "kernel, memcpy or memset"),
        Column("name", CAT, "kernel name as CUPTI gives it"),
        Column("device", I32, "GPU index", nullable=True),
        Column("stream", I64, "CUDA stream"),
        Column("correlation", I64, "id shared with the call that launched it", nullable=True),
        Column("external_id", I64, "id shared with the op that was open at the launch", nullable=True),
        Column("bytes", I64, "size of a copy or fill", "bytes", nullable=True),
        *_COMMUNICATION,
    ),
)
CALLS = Table(
    "calls",
    "one CUDA runtime or driver call",
    (
        *_interval("call"),
        Column("name", CAT, "function, for instance cudaGraphLaunch"),
        Column("pid", I64, "process id"),
        Column("tid", I64, "thread id"),
        Column("correlation", I64, "id shared with the activities it launched", nullable=True),
        Column("external_id", I64, "id shared with the op that was open", nullable=True),
    ),
)
ANNOTATIONS = Table(
    "annotations",
    "one user annotation (record_function) on a CPU thread",
    (
        *_interval("span"),
        Column("name", CAT, "as written, for instance `step[DECODE bs=8]`"),
        Column("pid", I64, "process id"),
        Column("tid", I64, "thread id"),
        Column("external_id", I64, "id shared with what it launched", nullable=True),
        Column("finished", BOOL, "false where the profiler stopped inside the span"),
    ),
)
OPS = Table(
    "ops",
    "one PyTorch op on a CPU thread",
    (
        *_interval("op"),
        Column("name", CAT, "for instance aten::mm or c10d::send"),
        Column("pid", I64, "process id"),
        Column("tid", I64, "thread id"),
        Column("external_id", I64, "id shared with what it launched", nullable=True),
    ),
)
GPU_ANNOTATIONS = Table(
    "gpu_annotations",
    "one user annotation projected on a stream by the profiler",
    (
        *_interval("span"),
        Column("name", CAT, "as written, for instance `nccl:send 0->1`"),
        Column("device", I32, "GPU index", nullable=True),
        Column("stream", I64, "CUDA stream"),
        Column("external_id", I64, "id of the annotation", nullable=True),
    ),
)
OVERHEADS = Table(
    "overheads",
    "one piece of work the profiler says it did itself",
    (*_interval("work"), Column("name", CAT, "for instance `Buffer Flush`")),
)
LOSSES = Table(
    "losses",
    "something lost, left out or not knowable",
    (
        Column("name", STR, "stable identifier, for instance event_negative_duration"),
        Column("severity", STR, "info, warning or error; --strict exits 3 from warning up"),
        Column("rank", I32, "rank concerned; null where it concerns the capture", nullable=True),
        Column("count", I64, "events, files or facts concerned"),
        Column("detail", STR, "where and what, in words"),
    ),
)
GPU_SAMPLES = Table(
    "gpu_samples",
    "one NVML sample of one GPU",
    (
        Column("ts_ns", I64, "when, on the host's wall clock", "ns"),
        Column("rank", I32, "rank that uses the GPU; null where unknown", nullable=True),
        Column("gpu", I32, "NVML index"),
        Column("power_w", F64, "power drawn", "W", nullable=True),
        Column("power_limit_w", F64, "power limit, as read", "W", nullable=True),
        Column("utilisation", F64, "NVML utilisation, 0 to 1", nullable=True),
        Column("sm_clock_mhz", F64, "SM clock", "MHz", nullable=True),
        Column("memory_bytes", I64, "memory in use", "bytes", nullable=True),
        Column("temperature_c", F64, "temperature", "C", nullable=True),
    ),
)
_SCHEDULER_LINE = (
    Column(
        "ts_ns",
        I64,
        "when the line was written, as the log's clock says (see `log_clock` for zone and resolution)",
        "ns",
    ),
    Column("pp_rank", I32, "stage that wrote it"),
    Column("tp_rank", I32, "tensor-parallel rank that wrote it"),
    Column("dp_rank", I32, "data-parallel rank that wrote it", nullable=True),
    Column("iteration", I64, "forward counter, where the server prints it", nullable=True),
    Column(
        "running",
        I64,
        "`#running-req`: requests of ONE micro-batch, never the server's total",
        "requests",
        nullable=True,
    ),
    Column("queue", I64, "`#queue-req`: requests that wait", "requests", nullable=True),
    Column("token_usage", F64, "share of the KV pool in use, 0 to 1", nullable=True),
    Column("cuda_graph", BOOL, "the batch ran as a CUDA graph", nullable=True),
    Column("phase", STR, "before, profile or after: where the line stands to the profiler's runs"),
)
DECODE_LOG = Table(
    "decode_log",
    "one `Decode batch` line of the scheduler's log",
    (
        *_SCHEDULER_LINE,
        Column("tokens", I64, "`#token`: tokens in the stage's whole KV pool", "tokens", nullable=True),
        Column("gen_throughput", F64, "`gen throughput`: of all micro-batches since the line before", "tokens/s"),
        Column("accept_length", F64, "speculative decoding: tokens accepted per step", nullable=True),
        Column(
            "fwd_occupancy", F64, "share of time in forwards, in percent, where the server measures it", nullable=True
        ),
        Column("pure", BOOL, "the stage's line before is a decode line too, and no profiler started or ended between"),
    ),
)
PREFILL_LOG = Table(
    "prefill_log",
    "one `Prefill batch` line of the scheduler's log",
    (
        *_SCHEDULER_LINE,
        Column("new_seqs", I64, "requests that start", "requests"),
        Column("new_tokens", I64, "tokens to compute", "tokens"),
        Column("cached_tokens", I64, "tokens taken from the prefix cache", "tokens", nullable=True),
        Column("pending_tokens", I64, "tokens that wait", "tokens", nullable=True),
        Column("input_throughput", F64, "`input throughput` as printed", "tokens/s", nullable=True),
    ),
)
REQUESTS = Table(
    "requests",
    "one request as a client saw it",
    (
        Column("start_ns", I64, "when it was sent, on the client's clock", "ns"),
        Column("end_ns", I64, "when its last byte arrived", "ns"),
        Column("ok", BOOL, "it was answered without an error"),
        Column("input_tokens", I64, "prompt length", "tokens", nullable=True),
        Column("output_tokens", I64, "tokens generated", "tokens", nullable=True),
    ),
)
METRICS = Table(
    "metrics",
    "one sample of one /metrics dump",
    (
        Column("when", I32, "dump, counted from the oldest"),
        Column("name", STR, "metric, for instance sglang:realtime_tokens_total"),
        Column("labels", STR, 'labels as printed, for instance `mode="decode",pp_rank="0"`'),
        Column("value", F64, "value"),
        Column("file", STR, "name of the dump's file"),
    ),
)
VISITS = Table(
    "visits",
    "one pass of a stage over a slot, from one recv_requests start to the next",
    (
        Column("rank", I32, "rank"),
        Column("visit", I64, "ordinal since the profiler's start; the same on every stage"),
        Column("slot", I32, "visit modulo the number of slots, where that is known", nullable=True),
        *_interval("visit"),
        Column("complete", BOOL, "both ends lie inside the trace"),
        Column("step", STR, "annotation of its forward, for instance `step[DECODE bs=8]`", nullable=True),
        Column("mode", STR, "decode, extend, mixed, ...; null for an empty slot", nullable=True),
        Column("batch_size", I32, "requests in the micro-batch", nullable=True),
        Column("tokens", I64, "tokens of the forward", nullable=True),
        Column("run_ts_ns", I64, "start of run_batch on the CPU", "ns", nullable=True),
        Column("run_end_ns", I64, "end of run_batch on the CPU", "ns", nullable=True),
    ),
)
FORWARDS = Table(
    "forwards",
    "one forward of a micro-batch on a stage's GPU",
    (
        Column("rank", I32, "rank"),
        Column("visit", I64, "the visit that issued it"),
        Column("slot", I32, "slot", nullable=True),
        *_interval("forward: first to last device activity issued inside run_batch, communication kernels left out"),
        Column("mode", STR, "decode, extend, mixed, ...", nullable=True),
        Column("batch_size", I32, "requests", nullable=True),
        Column("tokens", I64, "tokens", nullable=True),
        Column("busy_ns", I64, "time within it in which a compute kernel, copy or fill runs", "ns"),
        Column("launch_ns", I64, "host time inside launch calls of the forward", "ns", nullable=True),
        Column("graphs", I32, "CUDA graph launches in it"),
        Column("kernels", I32, "device activities in it"),
    ),
)
MESSAGES = Table(
    "messages",
    "one NCCL point-to-point message between stages, its two kernels paired",
    (
        Column("src", I32, "sending rank"),
        Column("dst", I32, "receiving rank"),
        Column("kind", STR, "proxy (activations), output (token ids) or other"),
        Column("ordinal", I64, "position in the stream of its (src, dst, kind)"),
        Column("visit", I64, "visit of the sender that issued it", nullable=True),
        Column("send_ts_ns", I64, "start of the send kernel", "ns"),
        Column("send_end_ns", I64, "end of the send kernel", "ns"),
        Column("recv_ts_ns", I64, "start of the receive kernel", "ns"),
        Column("recv_end_ns", I64, "end of the receive kernel", "ns"),
        Column("send_row", I64, "row of the send kernel in the sender's device table"),
        Column("recv_row", I64, "row of the receive kernel in the receiver's device table"),
        Column("bytes", I64, "message size", "bytes", nullable=True),
        Column("dtype", STR, "element type", nullable=True),
    ),
)
CONTROLS = Table(
    "controls",
    "one gloo message between stages (requests, metadata, objects), its two calls paired",
    (
        Column("src", I32, "sending rank"),
        Column("dst", I32, "receiving rank"),
        Column("kind", STR, "requests, proxy or output: the span it was sent in"),
        Column("ordinal", I64, "position in the stream of its (src, dst, kind)"),
        Column("visit", I64, "visit of the sender that issued it", nullable=True),
        Column("send_ts_ns", I64, "start of the send call", "ns"),
        Column("send_end_ns", I64, "end of the `gloo:send` span, which outlives the call", "ns"),
        Column("recv_ts_ns", I64, "start of the blocking receive", "ns"),
        Column("recv_end_ns", I64, "end of the blocking receive", "ns"),
        Column(
            "committed",
            BOOL,
            "false where the profiler stopped before the send was committed: its end is unknown",
            nullable=True,
        ),
    ),
)
COLLECTIVES = Table(
    "collectives",
    "one rank's kernel of a collective that was matched over its ranks",
    (
        Column("group", STR, "process group"),
        Column("instance", I64, "ordinal of the collective in its group"),
        Column("rank", I32, "rank"),
        Column("collective", STR, "allreduce, _allgather_base, ..."),
        *_interval("kernel"),
        Column("row", I64, "row of the kernel in the rank's device table"),
        Column("bytes", I64, "input size", "bytes", nullable=True),
    ),
)
CLOCK_BOUNDS = Table(
    "clock_bounds",
    "one fact that bounds the difference of two clocks: theta_b - theta_a <= upper_ns at the time at_ns",
    (
        Column(
            "a",
            I32,
            "clock: 2 x rank for the CPU of a rank, 2 x rank + 1 for its GPU, -1 - n for the wall clock of host n",
        ),
        Column("b", I32, "the other clock, numbered likewise"),
        Column("upper_ns", I64, "bound on theta_b - theta_a (clock b's reading minus clock a's, of one instant)", "ns"),
        Column("at_ns", I64, "when it holds, read on clock a; 0 for what holds at any time", "ns"),
        Column("source", STR, "p2p, p2p_blocked, collective, gloo, launch, sync, same_host, probe or prior"),
        Column("message", STR, "what a person needs to find the message again"),
    ),
)
CLOCK_RANKS = Table(
    "clock_ranks",
    "the clock of one rank against trace time",
    (
        Column("rank", I32, "rank"),
        Column("offset_ns", I64, "its local time minus the reference's, at mid-window, as applied", "ns"),
        Column("drift_ppm", F64, "rate of its clock against the reference's", "ppm"),
        Column("uncertainty_ns", I64, "half width of the feasible interval; null where unbounded", "ns", nullable=True),
        Column("method", STR, "what bounds it, in words"),
    ),
)
CLOCK_PAIRS = Table(
    "clock_pairs",
    "the feasible interval of the offset between two ranks' GPU clocks: theta_b - theta_a",
    (
        Column("a", I32, "rank"),
        Column("b", I32, "rank"),
        Column("low_ns", I64, "lower end; null where unbounded", "ns", nullable=True),
        Column("high_ns", I64, "upper end; null where unbounded", "ns", nullable=True),
    ),
)
STATES = Table(
    "states",
    "one stretch of a stage's window in one device state; the rows of a rank tile the window",
    (
        Column("rank", I32, "rank"),
        *_interval("stretch"),
        Column("state", STR, "busy, transfer or bubble"),
        Column("kernel_class", STR, "class of a busy stretch: moe, attention, ...", nullable=True),
        Column("visit", I64, "micro-batch (visit) that runs or is awaited", nullable=True),
    ),
)
ATTRIBUTION = Table(
    "attribution",
    "one stretch of a bubble with one cause; the rows of a rank tile its bubble",
    (
        Column("rank", I32, "the stage that idles"),
        *_interval("stretch"),
        Column("cause", STR, "see docs/concepts/attribution.md"),
        Column("root_rank", I32, "stage that caused it; null for ambiguous and unknown", nullable=True),
        Column("detail", STR, "the span, slot state or reason", nullable=True),
        Column("crossed_token_return", BOOL, "the chain crossed the token return: no other micro-batch was there"),
        Column("visit", I64, "micro-batch that is awaited", nullable=True),
        Column("gap", I64, "ordinal of the bubble of the rank"),
        Column("chain", I64, "link of the chain, 0 at the gap's end, growing backwards"),
        Column("first_event", STR, "the event that starts the stretch, in words", nullable=True),
        Column("last_event", STR, "the event that ends the stretch, in words", nullable=True),
    ),
)

TABLES: Mapping[str, Table] = {
    t.name: t
    for t in (
        DEVICE, CALLS, ANNOTATIONS, OPS, GPU_ANNOTATIONS, OVERHEADS, LOSSES, GPU_SAMPLES, DECODE_LOG, PREFILL_LOG,
        REQUESTS, METRICS, VISITS, FORWARDS, MESSAGES,
        CONTROLS, COLLECTIVES, CLOCK_BOUNDS, CLOCK_RANKS, CLOCK_PAIRS, STATES, ATTRIBUTION,
    )
}  # fmt: skip

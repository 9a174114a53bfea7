"""Facts as text that people read: durations, shares, names of causes; the same words in the terminal and in HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "CAUSES",
    "CLASSES",
    "TRANSFER",
    "UNKNOWN",
    "Kind",
    "apportion",
    "bytes_text",
    "count",
    "decimal",
    "duration",
    "exact_ms",
    "gain",
    "integer",
    "label",
    "mapping",
    "number",
    "plain_lines",
    "plain_text",
    "rank_name",
    "rows",
    "share",
    "stage_names",
    "text",
]

UNKNOWN = "–"
"""What stands where a fact is null."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kernel class, the transfer, or a cause: its name in the tables, its label, and what it says."""

    name: str
    label: str
    meaning: str


CLASSES: tuple[Kind, ...] = (
    Kind("moe", "MoE", "experts, routing and what aligns tokens for them"),
    Kind("attention", "attention", "attention kernels, KV cache included"),
    Kind("gemm", "GEMM", "matrix multiplications outside the experts"),
    Kind("norm", "norm", "normalisation"),
    Kind("sampling", "sampling", "choosing the next tokens"),
    Kind("collective", "collective", "transfer part of collectives inside a stage (TP, EP)"),
    Kind("memory", "memory", "copies and fills"),
    Kind("other", "other", "kernels that no rule knows"),
)
TRANSFER = Kind("transfer", "transfer", "a P2P kernel moves data between stages and nothing computes")
CAUSES: tuple[Kind, ...] = (
    Kind("no_work", "no work", "the slot whose turn it is holds no batch"),
    Kind("upstream_compute", "upstream compute", "the awaited micro-batch is being computed on another stage"),
    Kind("downstream_backpressure", "downstream back-pressure", "a send has not been taken yet by the next stage"),
    Kind("p2p_transfer_wait", "P2P transfer", "the awaited data is on the wire"),
    Kind("control_message", "control message", "a gloo message (requests, metadata) is in flight"),
    Kind("host_schedule", "host: schedule", "a CPU is in the scheduler: requests, batch, results, glue"),
    Kind("host_launch", "host: launch", "a CPU is issuing the forward: inputs, kernel or graph launches"),
    Kind("host_sync", "host: sync", "a CPU woke up late after the GPU work it waited for"),
    Kind("launch_latency", "launch latency", "launched already, not yet started; gaps inside a CUDA graph"),
    Kind("stream_dependency", "stream dependency", "another stream of the same GPU holds it"),
    Kind("collective_late", "late peer", "a rank of the same stage arrives late at a collective"),
    Kind("profiler", "profiler", "the profiler's own overhead"),
    Kind("ambiguous", "ambiguous", "the clocks cannot decide between two causes"),
    Kind("unknown", "unknown", "the trace does not tell"),
)
_LABELS = {k.name: k.label for k in (*CLASSES, TRANSFER, *CAUSES)}


def label(name: str) -> str:
    """The label of a class or cause; a name that is not known is shown as it is."""
    return _LABELS.get(name, name.replace("_", " "))


# Facts come from JSON: these say what type is wanted, and give None (or nothing) for anything else.


def gain(finding: Mapping[str, object]) -> str:
    """What a finding's action would save, of the time of a token; at most that where nothing was predicted."""
    saved = number(finding.get("recoverable_fraction"))
    if saved is None:
        return ""
    if saved < 0.005:
        return "no gain predicted"
    most = "" if finding.get("predicted") else "at most "
    return f"{most}{share(saved, 0)} of a token's time to gain"


def mapping(value: object) -> Mapping[str, object]:
    """`value` as an object; empty where it is none."""
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}


def rows(value: object) -> list[Mapping[str, object]]:
    """`value` as a list of objects; empty where it is none."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return []
    return [mapping(v) for v in value if isinstance(v, Mapping)]


def number(value: object) -> float | None:
    """`value` as a number; None where it is none."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def integer(value: object) -> int | None:
    """`value` as an integer; None where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text(value: object) -> str:
    """`value` as text; UNKNOWN for None."""
    if value is None:
        return UNKNOWN
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def plain_text(value: str) -> str:
    """`value` without what a terminal would act on: control characters become `\\x1b` and the like; the characters
    that reorder text, which can hide what a name says, become `\\u202e` and the like."""
    return "".join(c if _harmless(c) else c.encode("unicode_escape", "replace").decode("ascii") for c in value)


def plain_lines(value: str) -> str:
    """`plain_text` of a text of several lines, which stay lines."""
    return "\n".join(map(plain_text, value.split("\n")))


def _harmless(c: str) -> bool:
    point = ord(c)
    control = point < 0x20 or 0x7F <= point < 0xA0
    reordering = 0x200B <= point <= 0x200F or 0x2028 <= point <= 0x202E or 0x2060 <= point <= 0x2069
    return not (control or reordering or 0xD800 <= point < 0xE000 or point == 0xFEFF)


def count(value: object) -> str:
    """A whole number with thousands marked."""
    n = integer(value)
    return UNKNOWN if n is None else f"{n:,}"


def decimal(value: object, digits: int = 1) -> str:
    """A number with so many decimals and thousands marked."""
    n = number(value)
    return UNKNOWN if n is None else f"{n:,.{digits}f}"


def share(value: object, digits: int = 1) -> str:
    """A share of 0 to 1 in percent."""
    n = number(value)
    return UNKNOWN if n is None else f"{100 * n:.{digits}f} %"


def duration(value: object) -> str:
    """Nanoseconds in the unit that fits, three significant digits or more: `416 ns`, `39.7 us`, `5.85 ms`, `1.26 s`."""
    ns = integer(value)
    if ns is None:
        return UNKNOWN
    size = abs(ns)
    for unit, name in ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")):
        if size >= unit - unit // 2000:
            digits = max(0, 2 - (len(str(size // unit)) - 1))
            return f"{ns / unit:,.{digits}f} {name}"
    return f"{ns} ns"


def exact_ms(value: object) -> str:
    """Nanoseconds in milliseconds with all six decimals: no digit is lost, so columns add up as they stand."""
    ns = integer(value)
    if ns is None:
        return UNKNOWN
    whole, rest = divmod(abs(ns), 1_000_000)
    return f"{'-' if ns < 0 else ''}{whole:,}.{rest:06d}"


def bytes_text(value: object) -> str:
    """Bytes in binary units."""
    n = integer(value)
    if n is None:
        return UNKNOWN
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n >= 1 << power:
            scaled = n / (1 << power)
            return f"{scaled:.0f} {name}" if scaled == int(scaled) else f"{scaled:.1f} {name}"
    return f"{n} B"


def apportion(parts: Sequence[int], total: int, into: int) -> list[int]:
    """`parts` of `total` in units of which `total` is `into`, rounded so that parts that sum to `total` still do.

    The largest remainders are rounded up, ties to the earlier part; no part is off by a whole unit.
    """
    if total <= 0:
        return [0 for _ in parts]
    floors = [p * into // total for p in parts]
    missing = (sum(parts) * into) // total - sum(floors)
    order = sorted(range(len(parts)), key=lambda i: (-(parts[i] * into % total), i))
    up = set(order[:missing])
    return [f + (i in up) for i, f in enumerate(floors)]


def rank_name(names: Mapping[int, str], value: object, otherwise: str = UNKNOWN) -> str:
    """What the rank `value` is called (see `stage_names`); `otherwise` where it is no rank."""
    rank = integer(value)
    return otherwise if rank is None else names.get(rank, f"rank {rank}")


def stage_names(document: Mapping[str, object]) -> dict[int, str]:
    """What each rank is called: `stage 1` where a stage has one rank, else `stage 1, rank 3`; `rank 1` without a
    pipeline."""
    found = [(integer(s.get("rank")), integer(s.get("pp_rank"))) for s in rows(document.get("stages"))]
    ranks = [(r, p) for r, p in found if r is not None]
    size = integer(mapping(document.get("pipeline")).get("pp_size"))
    stages = [p for _, p in ranks]
    if (size is not None and size < 2) or len(ranks) < 2 or None in stages or len(set(stages)) < 2:
        return {r: f"rank {r}" for r, _ in ranks}
    return {r: f"stage {p}" if stages.count(p) == 1 else f"stage {p}, rank {r}" for r, p in ranks}

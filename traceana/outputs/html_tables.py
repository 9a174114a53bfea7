"""What runs in the pipeline, in tables of the HTML report: micro-batches, messages, MoE, CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping

from traceana.outputs.html_parts import Cell, Column, Markup, bar, element, fold, join, paragraph, table
from traceana.outputs.kernel_names import short_kernel_name
from traceana.outputs.words import (
    bytes_text,
    count,
    decimal,
    duration,
    integer,
    mapping,
    rank_name,
    rows,
    share,
    stage_names,
    text,
)

__all__ = ["cuda_graph", "micro_batches", "moe", "p2p"]

Document = Mapping[str, object]
_GRADES = ("memory", "norm", "attention", "gemm", "moe", "sampling")


def micro_batches(document: Document) -> Markup | None:
    """In flight, stages at work at once, batch sizes by slot, and whether stages merge micro-batches."""
    facts = mapping(document.get("micro_batches"))
    if not facts:
        return None
    merged, size = facts.get("merged_between_stages"), mapping(facts.get("batch_size"))
    compared = count(facts.get("compared"))
    words = "Whether stages merge micro-batches cannot be seen in this capture."
    if merged is True:
        words = f"Some of {compared} steps compared hold another batch on another stage: merged, or paired wrongly."
    elif merged is False:
        words = f"No stage merged waiting micro-batches: all {compared} steps hold one batch on all stages."
    slots = rows(facts.get("by_slot"))
    flight, overlap = mapping(facts.get("in_flight")), mapping(facts.get("overlap"))
    return join(
        paragraph(
            f"{count(facts.get('slots'))} slot{'s' * (facts.get('slots') != 1)}; batches of {_sizes(size)}. {words}"
        ),
        _histogram("micro-batches in flight", flight.get("histogram"), flight.get("mean")),
        _histogram("stages at work at once", overlap.get("histogram_ns"), overlap.get("mean_stages_busy")),
        _slots(slots)
        if slots
        else paragraph("Batch sizes by slot are not known: the capture has no scheduler spans.", class_="hint"),
    )


def _sizes(size: Mapping[str, object]) -> str:
    low, high = count(size.get("min")), count(size.get("max"))
    if integer(size.get("min")) is None:
        return "unknown size"
    if low == high:
        return f"{low} request{'s' * (low != '1')}"
    return f"{low} to {high} requests, median {count(size.get('p50'))}"


def _histogram(what: str, value: object, mean: object) -> Markup:
    """How long a count held, as one bar and in words; nothing where it is not known."""
    pairs = (
        [(integer(p[0]), integer(p[1])) for p in value if isinstance(p, list | tuple) and len(p) == 2]
        if isinstance(value, list | tuple)
        else []
    )
    found = [(k, ns) for k, ns in pairs if k is not None and ns is not None]
    whole = sum(ns for _, ns in found)
    if not whole:
        return Markup("")
    top = max(k for k, _ in found)
    parts = [
        (
            "no_work" if k == 0 else _GRADES[min(len(_GRADES) - 1, k * (len(_GRADES) - 1) // max(1, top))],
            ns,
            f"{k}: {share(ns / whole, 0)}",
            f"{k}: {duration(ns)}, {share(ns / whole)}",
        )
        for k, ns in found
    ]
    said = ", ".join(f"{k}: {share(ns / whole)}" for k, ns in found)
    return element(
        "div",
        element("div", element("b", what), element("small", f"mean {decimal(mean, 2)}"), class_="name"),
        bar(parts, whole, f"{what}: {said}", height=22),
        class_="stage held",
    )


def _slots(slots: list[Mapping[str, object]]) -> Markup:
    body: list[list[Cell]] = []
    for s in slots:
        modes = ", ".join(f"{m} {count(n)}" for m, n in mapping(s.get("modes")).items())
        body.append(
            [
                f"slot {text(s.get('slot'))}",
                count(s.get("visits")),
                count(s.get("filled")),
                count(s.get("batch_size_min")),
                count(s.get("batch_size_p50")),
                count(s.get("batch_size_max")),
                duration(s.get("forward_ns_p50")),
                modes or text(None),
            ]
        )
    columns: list[Column | str] = [
        Column("slot"),
        "visits",
        Column("with a batch", title="visits in which the slot held a batch"),
        "smallest",
        "median",
        "largest",
        Column("forward, median", title="on the first stage"),
        Column("modes", numeric=False),
    ]
    return table("Batch sizes by slot, on the first stage", columns, body)


def p2p(document: Document) -> Markup | None:
    """Every link and direction: waiting, transfer, bandwidth."""
    found = rows(document.get("p2p"))
    if not found:
        return paragraph("No message between stages was seen in the window.", class_="hint")
    names = stage_names(document)
    body: list[list[Cell]] = []
    for link in found:
        wait, move, late, send = (
            mapping(link.get(k)) for k in ("wait_ns", "transfer_ns", "latency_ns", "send_wait_ns")
        )
        head = join(
            f"{rank_name(names, link.get('src'))} → {rank_name(names, link.get('dst'))}",
            element("small", text(link.get("kind"))),
        )
        body.append(
            [
                head,
                join(bytes_text(link.get("bytes")), element("small", text(link.get("dtype")))),
                count(link.get("count")),
                count(link.get("unmatched")),
                _spread(wait),
                _spread(move),
                _spread(send),
                _spread(late),
                decimal(link.get("gbps_p50"), 2),
            ]
        )
    columns: list[Column | str] = [
        Column("link"),
        Column("size"),
        Column("messages"),
        Column("unmatched", title="kernels without a partner"),
        Column("receiver waits", title="median; 99th percentile and maximum beneath"),
        Column("transfer", title="median; 99th percentile and maximum beneath"),
        Column("sender waits", title="median; 99th percentile and maximum beneath"),
        Column("latency", title="receive end less the later of both starts"),
        Column("Gbit/s", title="at the median transfer"),
    ]
    return join(
        paragraph(
            "proxy: activations to the next stage; output: token ids, last stage to first and on. Medians, with 99th "
            "percentile and maximum beneath."
        ),
        table("Messages between stages, by link, kind and size", columns, body),
    )


def _spread(q: Mapping[str, object]) -> Markup:
    return join(
        duration(q.get("p50_ns")), element("small", f"{duration(q.get('p99_ns'))} · {duration(q.get('max_ns'))}")
    )


def moe(document: Document) -> Markup | None:
    """MoE time by stage and kernel, and how it spreads over micro-batches."""
    found = [m for m in rows(document.get("moe")) if integer(m.get("total_ns")) or rows(m.get("kernels"))]
    if not found:
        return paragraph("No MoE kernel was seen in the window.", class_="hint")
    names = stage_names(document)
    body: list[list[Cell]] = []
    for m in found:
        per = mapping(m.get("per_forward_ns"))
        body.append(
            [
                rank_name(names, m.get("rank")),
                count(m.get("total_ns")),
                share(m.get("share_of_busy")),
                count(per.get("count")),
                duration(per.get("p50_ns")),
                duration(per.get("p90_ns")),
                duration(per.get("p99_ns")),
                duration(per.get("max_ns")),
            ]
        )
    columns: list[Column | str] = [
        Column("MoE"),
        "ns in the window",
        "share of busy",
        Column("forwards"),
        "a forward, median",
        "90 %",
        "99 %",
        "longest",
    ]
    kernels: list[list[Cell]] = [
        [
            _kernel(k.get("name")),
            rank_name(names, m.get("rank")),
            count(k.get("count")),
            count(k.get("total_ns")),
            duration(k.get("p50_ns")),
            duration(k.get("p99_ns")),
        ]
        for m in found
        for k in rows(m.get("kernels"))
    ]
    heads: list[Column | str] = [Column("kernel"), Column("stage", numeric=False), "calls", "ns", "median", "99 %"]
    return join(
        table("MoE by stage", columns, body),
        fold(f"MoE kernels ({len(kernels)})", table("MoE kernels", heads, kernels, hide_caption=True), print_=True),
    )


def _kernel(name: object) -> Markup:
    whole = text(name)
    return element("code", short_kernel_name(whole), title=whole)


def cuda_graph(document: Document) -> Markup | None:
    """Which forwards were graph launches, and what launching costs the host."""
    found = rows(document.get("cuda_graph"))
    if not found:
        return None
    names = stage_names(document)
    body: list[list[Cell]] = []
    for g in found:
        modes = rows(g.get("by_mode")) or [g]
        for m in modes:
            body.append(
                [
                    rank_name(names, g.get("rank")),
                    text(m.get("mode")),
                    count(m.get("forwards")),
                    count(m.get("graphed")),
                    duration(m.get("launch_ns_p50")),
                    count(m.get("kernels_p50")),
                ]
            )
    sizes = found[0].get("captured_sizes")
    listed = ", ".join(text(s) for s in sizes) if isinstance(sizes, list | tuple) else None
    columns: list[Column | str] = [
        Column("stage"),
        Column("mode", numeric=False),
        "forwards",
        Column("as CUDA graphs"),
        Column("in launch calls", title="host time, median of a forward"),
        Column("activities", title="kernels, copies and fills of a forward, median"),
    ]
    return join(
        table("Forwards in the window", columns, body),
        paragraph(
            f"Captured batch sizes: {listed}." if listed else "The captured batch sizes are not known.", class_="hint"
        ),
    )

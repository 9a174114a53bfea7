"""What it runs on, in tables of the HTML report: host work, GPUs, the server, clocks, and what was lost."""

from __future__ import annotations

from collections.abc import Mapping

from traceana.outputs.html_parts import Cell, Column, Markup, element, fold, join, paragraph, table
from traceana.outputs.words import (
    bytes_text,
    count,
    decimal,
    duration,
    integer,
    mapping,
    number,
    rank_name,
    rows,
    share,
    stage_names,
    text,
)

__all__ = ["clock", "gpu", "host", "losses", "server"]

Document = Mapping[str, object]


def host(document: Document) -> Markup | None:
    """Host time of a visit by scheduler span and stage, waits taken out."""
    found = rows(document.get("host_spans"))
    if not found:
        return None
    names = stage_names(document)
    by_span: dict[str, dict[int, Mapping[str, object]]] = {}
    for row in found:
        by_span.setdefault(text(row.get("span")), {})[integer(row.get("rank")) or 0] = row
    body: list[list[Cell]] = [
        [element("code", span), *(_span(on.get(rank)) for rank in names)] for span, on in by_span.items()
    ]
    return join(
        paragraph(
            "CPU time of the scheduler in a visit, gloo receives and GPU waits taken out: mean, with median and visits "
            "beneath. Profiling makes it longer."
        ),
        table("Host time of a visit by span and stage", [Column("span"), *names.values()], body),
    )


def _span(row: Mapping[str, object] | None) -> Cell:
    if row is None:
        return text(None)
    return join(
        duration(row.get("mean_ns")), element("small", f"{duration(row.get('p50_ns'))} · {count(row.get('count'))}×")
    )


def gpu(document: Document) -> Markup | None:
    """Power against its limit as read, utilisation as the driver counts it, clocks and memory."""
    found = rows(document.get("gpu"))
    if not any(integer(g.get("samples")) for g in found):
        return paragraph("No GPU samples were recorded with this capture.", class_="hint")
    names = stage_names(document)
    body: list[list[Cell]] = []
    for g in found:
        power, use, clock_, heat = (
            mapping(g.get(k)) for k in ("power_w", "utilisation", "clocks_mhz", "temperature_c")
        )
        limit, mean = number(power.get("limit")), number(power.get("mean"))
        part = (
            f"{share(mean / limit, 0)} of it" if limit and mean is not None else "not recorded" if limit is None else ""
        )
        body.append(
            [
                rank_name(names, g.get("rank")),
                f"{decimal(mean, 0)} W",
                join(f"{decimal(power.get('max'), 0)} W"),
                join(f"{decimal(limit, 0)} W" if limit is not None else text(None), element("small", part)),
                share(use.get("mean"), 0),
                f"{decimal(clock_.get('min'), 0)}–{decimal(clock_.get('max'), 0)} MHz",
                bytes_text(g.get("memory_bytes")),
                f"{decimal(heat.get('max'), 0)} °C",
                count(g.get("samples")),
            ]
        )
    columns: list[Column | str] = [
        Column("GPU"),
        "power, mean",
        "highest",
        "limit",
        "utilisation",
        "SM clock",
        "memory",
        "hottest",
        "samples",
    ]
    window = next((text(g.get("window")) for g in found if g.get("window")), "the capture")
    return table(f"NVML samples of {window}", columns, body)


def server(document: Document) -> Markup | None:
    """What the server was told and what it says of itself."""
    facts = mapping(document.get("server"))
    if not facts:
        return paragraph(
            "Nothing in the capture tells what the server was told: no log, server_info or metrics.", class_="hint"
        )
    running, queue, kv = (mapping(facts.get(k)) for k in ("running_per_slot", "queue", "kv"))
    clients, throughput = mapping(facts.get("clients")), mapping(facts.get("throughput"))
    pairs: list[tuple[str, Cell]] = [
        (
            "stages and asynchronous depth",
            f"{count(facts.get('pp_size'))} + {count(facts.get('async_depth'))} = {count(facts.get('slots'))} slots",
        ),
        ("requests that may run", count(facts.get("max_running_requests"))),
        (
            "cap of one micro-batch",
            join(count(facts.get("micro_batch_cap")), element("small", text(facts.get("cap_source")))),
        ),
        (
            "requests running in a slot",
            join(
                _between(running),
                element("small", "one micro-batch's, not the server's"),
            ),
        ),
        ("requests queued", _between(queue)),
        ("KV pool", f"{count(kv.get('tokens'))} of {count(kv.get('capacity'))} tokens"),
        ("clients at once", count(clients.get("concurrency"))),
        (
            "request latency",
            f"{duration(clients.get('latency_ns_p50'))} median, {duration(clients.get('latency_ns_p99'))} 99 %",
        ),
        (
            "decode throughput",
            join(f"{decimal(throughput.get('decode'), 0)} tokens/s", element("small", text(throughput.get("source")))),
        ),
        (
            "prefill throughput",
            join(
                f"{decimal(throughput.get('prefill'), 0)} tokens/s",
                element("small", text(throughput.get("prefill_source"))),
            ),
        ),
        ("decode while profiled", f"{decimal(throughput.get('decode_profiled'), 0)} tokens/s"),
    ]
    layers = facts.get("layers_by_rank")
    if isinstance(layers, list | tuple):
        pairs.append(("layers by stage", ", ".join(text(n) for n in layers)))
    body: list[list[Cell]] = [[a, b] for a, b in pairs]
    command = facts.get("launch_command")
    return join(
        table("The server", [Column("what"), Column("value", numeric=False)], body, class_="pairs", hide_caption=True),
        fold("launch command", element("pre", text(command))) if command else "",
        fold("settings", _settings(mapping(facts.get("arguments")))) if facts.get("arguments") else "",
    )


def _between(fact: Mapping[str, object]) -> str:
    low, high = count(fact.get("min")), count(fact.get("max"))
    return low if low == high else f"{low} to {high}"


def _settings(arguments: Mapping[str, object]) -> Markup:
    body: list[list[Cell]] = [[element("code", k), text(v)] for k, v in arguments.items()]
    return table(
        "The server's settings",
        [Column("setting"), Column("value", numeric=False)],
        body,
        class_="pairs",
        hide_caption=True,
    )


def clock(document: Document) -> Markup | None:
    """How far the ranks' clocks can be trusted, and what was cut from the window."""
    facts, window = mapping(document.get("clock")), mapping(document.get("window"))
    names = stage_names(document)
    body: list[list[Cell]] = [
        [
            rank_name(names, c.get("rank")),
            count(c.get("offset_ns")),
            decimal(c.get("drift_ppm"), 3),
            _bounded(c.get("uncertainty_ns")),
            text(c.get("method")),
        ]
        for c in rows(facts.get("ranks"))
    ]
    pairs: list[list[Cell]] = [
        [
            f"{rank_name(names, p.get('b'))} − {rank_name(names, p.get('a'))}",
            _bounded(p.get("low_ns")),
            _bounded(p.get("high_ns")),
        ]
        for p in rows(facts.get("pairs"))
    ]
    cut: list[list[Cell]] = [
        [
            rank_name(names, t.get("rank")) if t.get("rank") is not None else "all",
            text(t.get("side")),
            count(t.get("ns")),
            text(t.get("why")),
        ]
        for t in rows(window.get("trimmed"))
    ]
    known = facts.get("identifiable")
    words = (
        ""
        if known is None
        else "All ranks can be put on one clock. "
        if known is True
        else "Not every rank can be put on one clock: see the bounds. "
    )
    violations = facts.get("violations")
    number_of = len(violations) if isinstance(violations, list | tuple) else integer(violations)
    return join(
        paragraph(
            f"{words}Reference: {rank_name(names, facts.get('reference_rank'))}; contradictions: {count(number_of)}."
        ),
        _statements(facts.get("statements")),
        table(
            "Clocks of the ranks",
            [Column("clock"), "offset, ns", "drift, ppm", "± ns", Column("bounded by", numeric=False)],
            body,
        ),
        fold(
            f"pairs ({len(pairs)})",
            table("Bounds of pairs", [Column("offset of"), "from, ns", "to, ns"], pairs, hide_caption=True),
        )
        if pairs
        else "",
        table(
            "Cut from the window",
            [Column("cut from"), Column("side", numeric=False), "ns", Column("why", numeric=False)],
            cut,
        )
        if cut
        else "",
    )


def _statements(value: object) -> Markup | None:
    said = [text(s) for s in value] if isinstance(value, list | tuple) else []
    return element("ul", *(element("li", s) for s in said), class_="said") if said else None


def _bounded(value: object) -> str:
    return "unbounded" if value is None else count(value)


def losses(document: Document) -> Markup | None:
    """What was lost, left out or cannot be known, worst first; and analyses that could not run."""
    found = rows(document.get("losses"))
    names = stage_names(document)
    body: list[list[Cell]] = [
        [
            element("code", text(r.get("name"))),
            element("span", text(r.get("severity")), class_=f"severity {text(r.get('severity'))}"),
            rank_name(names, r.get("rank")) if r.get("rank") is not None else "capture",
            count(r.get("count")),
            text(r.get("detail")),
        ]
        for r in found
    ]
    skipped = mapping(document.get("skipped"))
    said = [paragraph(f"Analysis not run: {name} ({text(why)}).", class_="hint") for name, why in skipped.items()]
    columns: list[Column | str] = [
        Column("what"),
        Column("severity", numeric=False),
        Column("where", numeric=False),
        "count",
        Column("detail", numeric=False),
    ]
    listed = (
        table("Lost, left out, or not knowable", columns, body, class_="listing", hide_caption=True)
        if body
        else paragraph("Nothing was lost.", class_="hint")
    )
    return join(listed, *said)

"""The top of the HTML report: what was captured, the answers in words, and the findings."""

from __future__ import annotations

from collections.abc import Mapping

from traceana.outputs.html_parts import Markup, element, fold, join, paragraph
from traceana.outputs.words import (
    UNKNOWN,
    count,
    decimal,
    duration,
    gain,
    integer,
    mapping,
    number,
    rows,
    share,
    stage_names,
    text,
)

__all__ = ["answers", "findings", "header"]

Document = Mapping[str, object]


def header(document: Document) -> Markup:
    """Title, what ran, and the few figures that everything else explains."""
    server, window = mapping(document.get("server")), mapping(document.get("window"))
    model = mapping(server.get("model"))
    what = [str(model[k]) for k in ("architecture",) if model.get(k)]
    sizes = [
        f"{n.upper()}{s}" for n in ("pp", "tp", "dp") if (s := integer(server.get(f"{n}_size"))) is not None and s > 1
    ]
    gpu = server.get("gpu_name")
    stages = rows(document.get("stages"))
    what += [" × ".join(sizes)] if sizes else []
    what += [f"{len(stages)} × {str(gpu).replace('_', ' ')}"] if gpu and stages else []
    versions = mapping(server.get("versions"))
    what += [f"SGLang {versions['sglang']}"] if versions.get("sglang") else []
    return element(
        "header",
        element("h1", "Where the pipeline spends its time"),
        paragraph(" · ".join(what), class_="what") if what else "",
        element("dl", *_figures(document, stages), class_="figures"),
        paragraph(
            f"Window of {duration(window.get('duration_ns'))} common to {len(stages)} rank{'s' * (len(stages) != 1)}",
            f", traceana {text(document.get('traceana_version'))}.",
            class_="hint",
        ),
        class_="top",
    )


def _figures(document: Document, stages: list[Mapping[str, object]]) -> list[Markup]:
    server, bound = mapping(document.get("server")), mapping(document.get("model"))
    throughput = mapping(server.get("throughput"))
    flight = mapping(mapping(document.get("micro_batches")).get("in_flight"))
    useful = [u for s in stages if (u := number(s.get("utilisation"))) is not None]
    seen = [u for s in stages if (u := number(s.get("reported_utilisation"))) is not None]
    out: list[tuple[str, str, str]] = []
    if throughput.get("decode") is not None:
        source = text(throughput.get("source")).replace("log: ", "")
        out.append(("decode throughput", f"{decimal(throughput['decode'], 0)} tokens/s", source))
    if useful:
        out.append(("useful utilisation", _range(useful), f"the driver's kind of counting says {_range(seen)}"))
    if bound.get("measured_period_ns") is not None:
        term = text(bound.get("binding_term")).replace("_", " ")
        out.append(("a micro-batch step every", duration(bound["measured_period_ns"]), f"bound by: {term}"))
    if flight.get("mean") is not None:
        size = integer(mapping(document.get("pipeline")).get("pp_size"))
        out.append(("micro-batches in flight", decimal(flight["mean"], 2), f"mean, in {count(size)} stages"))
    return [element("div", element("dt", a), element("dd", b, element("small", c))) for a, b, c in out]


def _range(values: list[float]) -> str:
    low, high = share(min(values), 0), share(max(values), 0)
    return low if low == high else f"{low.removesuffix(' %')}–{high}"


def answers(document: Document) -> Markup | None:
    """The questions of every report, answered in words; None where the document has no answers."""
    found = rows(document.get("answers"))
    if not found:
        return None
    items = [
        element(
            "li",
            element("h3", text(a.get("question"))),
            *(paragraph(p) for p in text(a.get("answer")).split("\n") if p),
        )
        for a in found
    ]
    return element("ol", *items, class_="answers")


def findings(document: Document) -> Markup:
    """What to change, the largest recoverable time first, as the document has it; none at all is an answer too."""
    found = rows(document.get("findings"))
    if not found:
        return paragraph("No finding: nothing in this capture gives evidence for a change.", class_="hint")
    window = integer(mapping(document.get("window")).get("duration_ns"))
    baseline = number(mapping(mapping(document.get("server")).get("throughput")).get("decode"))
    tops = [number(mapping(f.get("predicted")).get("high")) for f in found]
    scale = max([baseline or 0.0, *(t for t in tops if t is not None)])
    names = stage_names(document)
    return element("ol", *(_finding(f, window, baseline, scale, names) for f in found), class_="findings")


def _finding(
    finding: Mapping[str, object], window: int | None, baseline: float | None, scale: float, names: Mapping[int, str]
) -> Markup:
    rank, lost = integer(finding.get("rank")), integer(finding.get("lost_ns"))
    facts: list[str] = []
    if rank is not None:
        facts.append(names.get(rank, f"rank {rank}"))
    if lost is not None:
        facts.append(f"{duration(lost)} lost" + (", all stages together" if rank is None else _part(lost, window)))
    if saved := gain(finding):
        facts.append(saved)
    action = finding.get("action")
    evidence = [text(e) for e in found] if isinstance(found := finding.get("evidence"), list | tuple) else []
    return element(
        "li",
        element("h3", text(finding.get("title"))),
        paragraph(" · ".join(facts), class_="hint") if facts else "",
        paragraph(element("span", "do", class_="term"), element("code", text(action))) if action else "",
        _prediction(mapping(finding.get("predicted")), baseline, scale),
        fold(f"evidence ({len(evidence)})", element("ul", *(element("li", e) for e in evidence)), print_=True)
        if evidence
        else "",
        id_=f"finding-{text(finding.get('id'))}",
    )


def _part(lost: int, window: int | None) -> str:
    return f" ({share(lost / window)} of the window)" if window else ""


def _prediction(predicted: Mapping[str, object], baseline: float | None, scale: float) -> Markup:
    """The predicted throughput beside today's, to one scale, with its range."""
    value = number(predicted.get("throughput_tokens_per_s"))
    if value is None or scale <= 0:
        return Markup("")
    low, high = number(predicted.get("low")), number(predicted.get("high"))
    words = f"{decimal(value, 0)} tokens/s"
    if low is not None and high is not None:
        words += f" ({decimal(low, 0)} to {decimal(high, 0)})"
    gain = f", {'+' if value >= baseline else ''}{share(value / baseline - 1, 0)}" if baseline else ""
    full = scale * 1.02
    shapes = f'<rect class="predicted" y="4" height="10" width="{100 * value / full:.3f}%"/>'
    if low is not None and high is not None:
        a, b = 100 * low / full, 100 * high / full
        shapes += "".join(f'<line class="{c}" x1="{a:.3f}%" x2="{b:.3f}%" y1="9" y2="9"/>' for c in ("halo", "range"))
    if baseline:
        x = 100 * baseline / full
        shapes += f'<line class="now" x1="{x:.3f}%" x2="{x:.3f}%" y1="0" y2="18"/>'
    label = f"predicted {words}{gain}; now {decimal(baseline, 0) if baseline else UNKNOWN}"
    svg = element("svg", Markup(shapes), class_="forecast", width="100%", height="18", role="img", aria_label=label)
    now = f"now {decimal(baseline, 0)}" if baseline else ""
    return element(
        "div",
        join(element("span", "predicted", class_="term"), words, gain, element("small", f" {now}"), svg),
        class_="prediction",
    )

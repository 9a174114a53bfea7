"""The seven questions every report answers in words, from templates filled with this capture's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from traceana.findings.facts import Facts, Row, held, ints, ms, number, percent
from traceana.findings.finding import Finding

__all__ = ["QUESTIONS", "answer"]

QUESTIONS = (
    "Is the pipe fed?",
    "Where did each stage's time go?",
    "Who holds whom up?",
    "Are CUDA graphs on?",
    "Does a busy stage merge waiting micro-batches?",
    "What do P2P and MoE cost?",
    "What to change?",
)

# What a stage waits for: {} is whose it is.
_WORDS = {
    "no_work": "a batch for {} slot", "upstream_compute": "{} computing", "downstream_backpressure": "{} to take its input",
    "p2p_transfer_wait": "data on the wire from {}", "control_message": "gloo messages from {}",
    "host_schedule": "{} scheduler", "host_launch": "{} CPU to issue the forward", "host_sync": "{} CPU to wake up",
    "launch_latency": "{} GPU to start what was launched", "stream_dependency": "another stream of {} GPU",
    "collective_late": "{} to come to a collective", "profiler": "the profiler on {} host",
    "ambiguous": "what the clocks cannot tell", "unknown": "unknown causes",
}  # fmt: skip
_POSSESSIVE = (
    "no_work",
    "host_schedule",
    "host_launch",
    "host_sync",
    "launch_latency",
    "stream_dependency",
    "profiler",
)


_SHOWN = {"moe": "MoE", "gemm": "GEMM"}
_SEE_MORE = "Profile CPU and GPU activities together, for a few rounds of all slots, while the server decodes."

_Answer = tuple[bool, list[str]]


def answer(document: Mapping[str, object], findings: Sequence[Finding]) -> list[dict[str, object]]:
    """`answers` of the JSON document: question, answer (words), and `known` (false where the capture cannot tell)."""
    facts = Facts(document)
    texts = (
        _fed(facts), _time(facts), _who(facts), _graphs(facts), _merge(facts), _costs(facts), _change(facts, findings),
    )  # fmt: skip
    return [
        {"question": q, "answer": _capital(" ".join(t for t in text if t)), "known": known}
        for q, (known, text) in zip(QUESTIONS, texts, strict=True)
    ]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _list(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1] if parts else ""


def _fed(facts: Facts) -> _Answer:
    if not facts.is_pipeline:
        return (True, ["There is no pipeline here: one stage, nothing to feed one stage from another."])
    batches = facts.part("micro_batches")
    flight = batches.get("in_flight")
    overlap = cast("Row", batches.get("overlap") or {})
    pp = number(facts.part("pipeline"), "pp_size")
    if not isinstance(flight, Mapping):
        return (
            False,
            [f"Unknown: without the scheduler's spans the micro-batches of the {pp} stages cannot be told apart."],
        )
    sizes = facts.slot_sizes()
    largest = max(sizes, default=0)
    useful = sum(2 * s >= largest for s in sizes) if largest else 0
    filled = sum(s > 0 for s in sizes)
    mean = float(cast("float", flight["mean"]))
    busy = float(cast("float", overlap.get("mean_stages_busy") or 0.0))
    if not sizes and mean < busy:
        return (
            False,
            ["Unknown: the window is too short to see a micro-batch come round.", _why_not_more(facts, sizes)],
        )
    text = f"On average {mean:.1f} micro-batches are in flight (at most {flight['max']}) for {pp} stages, and {busy:.2f} stages compute at a time."
    why = ""
    if sizes:
        why = f"The loop has {len(sizes)} slots; {filled} hold requests ({held(sizes)})."
        if useful < len(sizes) and filled:
            why += f" The pipe holds {'one useful micro-batch' if useful == 1 else f'{useful} useful micro-batches'}."
    return (True, [text, why, _why_not_more(facts, sizes)])


def _why_not_more(facts: Facts, sizes: Sequence[int]) -> str:
    waiting, cap = facts.waiting(), facts.server_int("micro_batch_cap")
    if waiting is None:
        return "Why not more cannot be told: the capture holds no server log or metrics."
    if waiting > 0 and cap is not None and sizes and max(sizes) >= cap:
        source = facts.server("cap_source")
        return f"{waiting} more requests wait because each slot is at its cap of {cap} ({source})."
    if waiting > 0:
        usage = facts.server("kv", "token_usage")
        return f"{waiting} more requests wait below the cap (KV usage {usage})."
    return "No request waits: all that were sent are running."


def _time(facts: Facts) -> _Answer:
    parts: list[str] = []
    for stage in facts.stages:
        window = number(stage, "window_ns")
        classes = cast("Row", stage["busy_by_class_ns"])
        top = max(classes, key=lambda c: number(classes, c))
        name = facts.name(stage["rank"])
        parts.append(
            f"{name}: {percent(number(stage, 'busy_ns') / window)} busy ({_SHOWN.get(top, top)} {percent(number(classes, top) / window)}),"
            f" {percent(number(stage, 'transfer_ns') / window)} transfer, {percent(number(stage, 'bubble_ns') / window)} idle"
            f" (a utilisation counter would say {percent(float(cast('float', stage['reported_utilisation'])))} busy)"
        )
    shown = parts if len(parts) <= 4 else [*parts[:4], f"and {len(parts) - 4} more"]
    return (True, ["; ".join(shown) + ".", _power(facts), _profiled(facts)])


def _profiled(facts: Facts) -> str:
    """What recording cost, where the capture measured it; no time in the report is corrected for it."""
    share = facts.server("throughput", "profile_cost", "disturbance")
    if not isinstance(share, int | float) or share <= 0:
        return ""
    return f"While it was recorded, decode ran at {percent(share)} of its pace; these times are as recorded."


def _power(facts: Facts) -> str:
    words: list[str] = []
    for gpu in facts.rows("gpu"):
        power = cast("Row", gpu["power_w"])
        if isinstance(power.get("mean"), int | float):
            limit = power.get("limit")
            of = f" of {limit:.0f} W" if isinstance(limit, int | float) else ""
            words.append(f"{power['mean']:.0f} W{of} on {facts.name(gpu['rank'])}")
    if not words:
        return ""
    unknown = "" if any(" of " in w for w in words) else "; the power limit was not recorded"
    return f"Power before the profile: {_list(words)}{unknown}."


def _who(facts: Facts) -> _Answer:
    total = sum(number(s, "bubble_ns") for s in facts.stages)
    if not total:
        return (True, ["No stage is ever idle in the window.", ""])
    rows: dict[tuple[object, object, object], int] = {}
    for row in facts.rows("blame"):
        key = (row["rank"], row["root_rank"], row["cause"])
        rows[key] = rows.get(key, 0) + number(row, "ns")
    top = sorted(rows.items(), key=lambda x: (-x[1], str(x[0])))[:4]
    words: list[str] = []
    for (rank, root, cause), ns in top:
        if ns * 200 < total:
            continue
        whose = "" if root is None else facts.name(root)
        if cause in _POSSESSIVE:
            whose = "its own" if root == rank else f"{whose}'s"
        length = f"{ms(ns / facts.steps)} a step" if facts.period_ns else ms(ns)
        words.append(f"{facts.name(rank)} waits {length} for {_WORDS[str(cause)].format(whose)}")
    doubt = facts.cause_ns(None, "unknown", "ambiguous") / total
    coverage = (
        f"{percent(1 - doubt)} of the idle time is explained."
        if doubt >= 0.0005
        else "All of the idle time is explained."
    )
    return (facts.cause_ns(None, "unknown") < total // 2, ["; ".join(words) + ". " + coverage, _formula(facts)])


def _formula(facts: Facts) -> str:
    bound = facts.part("model")
    if not facts.period_ns or bound.get("tau_ns") is None:
        return ""
    names = {"compute": "the slowest stage's compute", "host": "a host's serial work", "ring": "the round trip of a micro-batch",
             "last_stage_serial": "the last stage, which waits for its own forward before its host goes on"}  # fmt: skip
    stage = bound.get("binding_stage")
    where = f" (stage {stage})" if isinstance(stage, int) else ""
    terms = bound.get("terms_ns")
    least = "" if isinstance(terms, dict) and "ring" in terms else ", for the stages that are here alone,"
    text = (
        f"A step takes {ms(facts.period_ns)}; the formula gives{least} {ms(number(bound, 'tau_ns'))}, "
        f"bound by {names[str(bound['binding_term'])]}{where}."
    )
    text += _above(facts, bound)
    needed, have = bound.get("needed_in_flight"), bound.get("in_flight")
    if isinstance(needed, int) and isinstance(have, int) and needed > have:
        text += f" {needed} micro-batches in flight would be needed; there are {have}."
    return text


def _above(facts: Facts, bound: Row) -> str:
    """Why the formula gives more than was measured, where it does by more than a little."""
    tau, period, steps = number(bound, "tau_ns"), facts.period_ns or 0, number(bound, "steps")
    if tau * 100 <= period * 103:
        return ""
    text = f" That is more than was measured: the {steps} steps are not the same time on every stage"
    stage = bound.get("binding_stage")
    rows = facts.rows_of_bound()
    if bound["binding_term"] == "host" and isinstance(stage, int) and stage < len(rows):
        usual, most = number(rows[stage], "k_ns_p50"), number(rows[stage], "k_ns_max")
        text += f", and one of them took stage {stage}'s host {ms(most)} (median {ms(usual)})"
    return text + "."


def _graphs(facts: Facts) -> _Answer:
    ranks = [r for r in facts.rows("cuda_graph") if number(r, "forwards")]
    if not ranks:
        return _graphs_without_forwards(facts)
    words: list[str] = []
    modes: dict[str, list[Row]] = {}
    for rank in ranks:
        for row in cast("list[Row]", rank.get("by_mode") or []):
            modes.setdefault(str(row["mode"] or ""), []).append(row)
    for mode, rows in sorted(modes.items()):
        forwards, graphed = sum(number(r, "forwards") for r in rows), sum(number(r, "graphed") for r in rows)
        launch = max(number(r, "launch_ns_p50") for r in rows)
        kernels = max(number(r, "kernels_p50") for r in rows)
        how = (
            "all are graph launches"
            if graphed == forwards
            else "none is a graph launch"
            if graphed == 0
            else f"{graphed} are graph launches"
        )
        words.append(
            f"of {forwards} {f'{mode} ' if mode else ''}forwards {how}; launching costs the host {ms(launch)} for {kernels} kernels (median, profiled)"
        )
    enabled = facts.server("cuda_graph", "enabled")
    flag = {True: "CUDA graphs are on: ", False: "CUDA graphs are off: "}.get(cast("bool", enabled), "")
    if enabled is True and "decode" not in modes:
        flag = "CUDA graphs are on for decoding, and only prefill is in the window: "
    text = "; ".join(words)
    return (True, [(flag + text if flag else text[:1].upper() + text[1:]) + "."])


def _merge(facts: Facts) -> _Answer:
    batches = facts.part("micro_batches")
    if not facts.is_pipeline:
        return (True, ["There is no pipeline, so no stage has micro-batches of others to merge.", ""])
    merged, compared = batches.get("merged_between_stages"), number(batches, "compared")
    if merged is None:
        return (False, ["Unknown: no micro-batch was seen whole on two stages.", ""])
    size = cast("Row", batches["batch_size"])
    seen = sorted({s for s in facts.slot_sizes() if s}, reverse=True)
    if size["min"] == size["max"]:
        sizes = f"{size['p50']} request{'' if size['p50'] == 1 else 's'}"
    else:
        sizes = f"{size['min']} to {size['max']} requests"
        sizes = (
            f"{ints(seen)} requests" if len(seen) > 1 and {size["min"], size["max"]} == {seen[0], seen[-1]} else sizes
        )
    if merged:
        return (
            True,
            [
                f"Yes, or the traces are paired wrongly: {len(cast('list[object]', batches['mismatched_visits']))} of {compared} micro-batches differ in size between stages.",
                "",
            ],
        )
    text = f"No: all {compared} micro-batches compared keep their size on every stage ({sizes}). SGLang never merges them; a request stays in its slot for life."
    waits = facts.blamed_ns(cause="downstream_backpressure") + facts.blamed_ns(cause="control_message")
    return (
        True,
        [
            text,
            f"Waiting at a busy stage costs {ms(waits / facts.steps)} a step, all stages together."
            if facts.period_ns
            else "",
        ],
    )


def _graphs_without_forwards(facts: Facts) -> _Answer:
    """What launches tell where the trace does not tell forwards."""
    rows = facts.rows("cuda_graph")
    launched, by_graphs = (sum(number(r, key) for r in rows) for key in ("launched", "by_graphs"))
    if launched:
        share = percent(by_graphs / launched) if by_graphs else "none"
        text = f"CUDA graphs launch {share} of the {launched:,} GPU activities whose launch is in the trace; forwards cannot be"
        return (True, [f"{text} told apart in it."])
    enabled = facts.server("cuda_graph", "enabled")
    said = {True: "; the server says they are on", False: "; the server says they are off"}.get(
        cast("bool", enabled), ""
    )
    why = "no forward lies wholly inside the window, or the trace lacks the spans that tell forwards"
    return False, [f"Unknown: {why}{said}."]


def _costs(facts: Facts) -> _Answer:
    words: list[str] = []
    for link in facts.rows("p2p"):
        if link.get("kind") != "proxy":
            continue
        wait, moved = cast("Row", link["wait_ns"]), cast("Row", link["transfer_ns"])
        size = "unknown size" if link.get("bytes") is None else f"{number(link, 'bytes'):,} bytes"
        words.append(
            f"{link['src']} to {link['dst']}: {link['count']} activation messages of {size}, transfer"
            f" {number(moved, 'p50_ns') / 1000:.1f} us, wait {number(wait, 'p50_ns') / 1000:.1f} us (medians)"
        )
    shown = words if len(words) <= 3 else [*words[:3], f"and {len(words) - 3} more links"]
    p2p = "; ".join(shown) + "." if shown else (
        "No activation message was paired." if facts.is_pipeline else "No pipeline messages."
    )  # fmt: skip
    moe: list[str] = []
    for row in facts.rows("moe"):
        share = row.get("share_of_busy")
        spread = cast("Row", row.get("per_forward_ns") or {})
        if isinstance(share, int | float) and number(row, "total_ns"):
            per = (
                f", {ms(number(spread, 'p50_ns'))} a forward (p99 {ms(number(spread, 'p99_ns'))})"
                if number(spread, "count")
                else ""
            )
            moe.append(f"{percent(float(share))} of the busy time of {facts.name(row['rank'])}{per}")
    text = f"MoE takes {_list(moe[:4])}." if moe else "No MoE kernels were recognised."
    return (bool(shown) or not facts.is_pipeline, [p2p, text])


def _change(facts: Facts, findings: Sequence[Finding]) -> _Answer:
    if not findings:
        bubble = sum(number(s, "bubble_ns") for s in facts.stages)
        if facts.is_pipeline and not facts.period_ns:
            blind = "no micro-batch step is seen whole in this capture"
        elif facts.cause_ns(None, "unknown") * 2 > bubble:
            blind = "most of the idle time is unexplained"
        else:
            return (True, ["Nothing in this capture asks for a change."])
        return (False, [f"Unknown: {blind}. {_SEE_MORE}"])
    words: list[str] = []
    for n, finding in enumerate(findings[:3], start=1):
        text = f"{n}. {finding.title}: {finding.action}"
        predicted, base = finding.predicted, facts.throughput()
        rate = predicted.get("throughput_tokens_per_s") if predicted is not None else None
        if predicted is not None and isinstance(rate, int | float) and base:
            low, high = predicted.get("low"), predicted.get("high")
            span = (
                f" ({low:,.0f} to {high:,.0f})"
                if isinstance(low, int | float) and isinstance(high, int | float)
                else ""
            )
            text += f"; predicted {rate:,.0f} tokens/s{span} against {base:,.0f} now"
        words.append(text)
    return (True, [". ".join(words) + "."])

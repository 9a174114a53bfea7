"""Rules about hosts: time that one stage spends where the others do not, slow hosts, and hosts that bound the period."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from traceana.findings.facts import Facts, Row, ms, number, percent
from traceana.findings.finding import FLOOR, Draft

__all__ = ["RULES", "held_up", "host_bound", "slow_host", "slow_span"]

# Spans whose work differs by role: the first stage hears clients where others hear their neighbour, the last samples.
_BY_ROLE = ("between spans", "recv_requests", "process_input_requests", "run_batch", "graph launch")
# Code that is the same on all stages.
_SAME = (
    "get_next_batch_to_run", "process_batch_result", "recv_res_dict_from_prev_stage", "send_res_dict_to_next_stage",
)  # fmt: skip
_HOST = ("host_schedule", "host_launch", "host_sync")
_SLOW_HOST = 1.6  # stages differ by up to 1.43 in the same code, profiled
_FASTER_HOST = "larger micro-batches, so that each host pass serves more tokens; faster host cores"
_WHERE = {
    "await_proxy": "between get_next_batch_to_run and the receive of activations",
    "receive_proxy": "in the receive of activations", "commit_proxy": "ahead of run_batch",
    "commit_output": "ahead of send_res_dict_to_next_stage", "before_sync": "ahead of process_batch_result",
    "finish": "at the end of the loop", "wake": "in waking up after the GPU", "tail": "in run_batch, behind the layers",
}  # fmt: skip


def held_up(facts: Facts) -> list[Draft]:
    """Host time of one stage, in every visit, that the same code takes nowhere else: a sleep, a spin, a lock."""
    out: list[Draft] = []
    for work in facts.rows("stage_work"):
        rank = number(work, "rank")
        stage = facts.document_stage(rank)
        for held in cast("list[Row]", work.get("held") or []):
            ns, span = number(held, "ns"), str(held["span"])
            if not facts.period_ns or ns < FLOOR * facts.period_ns:
                continue
            where = _WHERE.get(str(held["piece"]), f"in {span}")
            seen = {number(r, "rank"): number(r, "mean_ns") for r in facts.rows("host_spans") if r["span"] == span}
            evidence = [f"{ms(ns)} in every visit of stage {stage} beyond what the same code takes elsewhere"]
            if rank in seen and len(seen) > 1:
                others = max(v for r, v in seen.items() if r != rank)
                evidence.append(
                    f"{span}: {ms(seen[rank])} a visit on stage {stage}, {ms(others)} on the others (profiled)"
                )
            lost = sum(facts.blamed_ns(root=rank, cause=c, detail=span) for c in _HOST)
            if span == "run_batch":
                lost = facts.blamed_ns(root=rank, cause="host_launch")
            lost = min(lost, int(ns * facts.steps * len(facts.stages)))
            evidence.append(f"stages idle {ms(lost / facts.steps)} a step for it; what hides costs nothing")
            out.append(
                Draft(
                    "host_span",
                    f"The scheduler of stage {stage} is held up for {ms(ns)} a visit {where}",
                    rank,
                    lost,
                    tuple(evidence),
                    f"find what stage {stage} does {where}: py-spy dump --pid {_pid(facts, rank)}",
                    (f"host {stage}=-{ns / 1e6:.3f}ms",),
                    ceiling=min(ns / facts.period_ns, lost / facts.window_ns),
                    fallback=f"nothing to gain now from what holds up stage {stage} {where}: it hides behind other waits",
                )
            )
    return out


def slow_host(facts: Facts) -> list[Draft]:
    """All that is the same on every stage takes one stage's host far longer."""
    ratio = _host_ratios(facts)
    bound = {number(r, "rank"): number(r, "k_ns") for r in facts.rows_of_bound()}
    out: list[Draft] = []
    for rank, times in ratio.items():
        if times < _SLOW_HOST or not facts.period_ns:
            continue
        stage = facts.document_stage(rank)
        more = int(bound.get(rank, 0) * (1 - 1 / times))
        lost = sum(facts.blamed_ns(root=rank, cause=c) for c in _HOST)
        out.append(
            Draft(
                "slow_host",
                f"The host of stage {stage} is slow: {times:.1f} times as long as the others for the same code",
                rank,
                lost,
                (
                    f"{', '.join(_SAME)}: each takes it longer (profiled)",
                    f"stages idle {ms(lost / facts.steps)} a step for the host of stage {stage}",
                ),
                f"check the cores of stage {stage}'s process (taskset -p {_pid(facts, rank)}; other load, frequency, NUMA)",
                (f"host {stage}=-{more / 1e6:.3f}ms",) if more else (),
                ceiling=min(more / facts.period_ns, lost / facts.window_ns),
                fallback=f"nothing to gain now from a faster host of stage {stage}: it hides behind other waits",
            )
        )
    return out


def _host_ratios(facts: Facts) -> dict[int, float]:
    """Per rank its time in the code that all share over the median of the others', each piece longer by itself."""
    by_rank: dict[int, dict[str, int]] = {}
    for row in facts.rows("host_spans"):
        if row["span"] in _SAME:
            by_rank.setdefault(number(row, "rank"), {})[str(row["span"])] = number(row, "p50_ns")
    shared = set(_SAME).intersection(*by_rank.values()) if len(by_rank) > 1 else set[str]()
    out: dict[int, float] = {}
    for rank, mine in by_rank.items():
        ratios: list[float] = []
        for span in shared:
            others = sorted(v[span] for r, v in by_rank.items() if r != rank)
            ratios.append(mine[span] / max(1, others[len(others) // 2]))
        if len(ratios) >= 3:
            out[rank] = min(ratios)
    return out


def slow_span(facts: Facts) -> list[Draft]:
    """One stage's scheduler spends far longer in a span than the other stages' do, not in every visit alike, and GPUs
    wait for it."""
    slow = {r for r, ratio in _host_ratios(facts).items() if ratio >= _SLOW_HOST}
    known = {
        (number(w, "rank"), str(h["span"])) for w in facts.rows("stage_work") for h in cast("list[Row]", w.get("held") or [])
    }  # fmt: skip
    by_span: dict[str, list[Row]] = {}
    for row in facts.rows("host_spans"):
        by_span.setdefault(str(row["span"]), []).append(row)
    best: Draft | None = None
    for span, rows in by_span.items():
        if len(rows) < 2:
            continue
        rows = sorted(rows, key=lambda r: -number(r, "mean_ns"))
        top, rest = rows[0], rows[1:]
        rank = number(top, "rank")
        usual = sorted(number(r, "mean_ns") for r in rest)[len(rest) // 2]
        excess = number(top, "mean_ns") - usual
        lost = facts.blamed_ns(root=rank, cause="host_schedule", detail=span)
        if rank in slow or (rank, span) in known or not facts.period_ns or lost < FLOOR * facts.window_ns:
            continue
        if excess < FLOOR * facts.period_ns or number(top, "mean_ns") < 2 * usual:
            continue
        if (span in _BY_ROLE or "_dict_" in span or span.startswith("send_")) and excess < max(
            4 * usual, 0.15 * facts.period_ns
        ):
            continue
        stage = facts.document_stage(rank)
        draft = Draft(
            "host_span",
            f"The scheduler of stage {stage} is slow in {span}: {ms(number(top, 'mean_ns'))} a visit, {ms(usual)} elsewhere",
            rank,
            lost,
            (
                f"{span}: {ms(number(top, 'mean_ns'))} a visit on stage {stage}, {ms(usual)} on the others (profiled)",
                f"stages idle {ms(lost / facts.steps)} a step for it; what hides behind other waits costs nothing",
            ),
            f"find what stage {stage} does in {span}: py-spy dump --pid {_pid(facts, rank)}",
            (f"host {stage}=-{excess / 1e6:.3f}ms",),
            ceiling=min(excess / facts.period_ns, lost / facts.window_ns),
        )
        if best is None or draft.ceiling > best.ceiling:
            best = draft
    return [] if best is None else [best]


def _pid(facts: Facts, rank: int) -> str:
    pids = facts.server("pid_by_rank")
    for row in pids if isinstance(pids, list) else []:
        if isinstance(row, Mapping) and row.get("rank") == rank:
            return str(row.get("pid"))
    return "PID"


def host_bound(facts: Facts) -> list[Draft]:
    """The hosts, not the GPUs, bound the period, on every stage alike; and which part of their work the GPUs wait for."""
    bound = facts.part("model")
    terms = bound.get("terms_ns")
    if not isinstance(terms, Mapping) or not facts.period_ns:
        return []
    host = max(number(terms, "host"), number(terms, "last_stage_serial"))
    extra = host - number(terms, "compute")
    if extra < 0.1 * facts.period_ns:
        return []
    lost = facts.cause_ns(None, *_HOST)
    if lost < FLOOR * facts.window_ns * len(facts.stages):
        return []
    depth = facts.server_int("async_depth")
    serial = number(terms, "last_stage_serial") >= number(terms, "host")
    evidence = (
        f"a step needs {ms(number(terms, 'compute'))} of GPU time and {ms(host)} of serial host time"
        + (" (the last stage waits for its own forward before it goes on)" if serial else ""),
        f"stages idle {ms(lost / facts.steps)} a step, all stages together, while a host schedules or launches (profiled)",
        f"of it {_parts(facts)}",
    )
    fallback = _FASTER_HOST
    chunk = facts.server_int("chunked_prefill_size")
    if facts.prefills() and chunk is not None:
        fallback = f"--chunked-prefill-size above {chunk}, so that each launch serves more tokens; faster host cores"
    changes: tuple[str, ...] = ()
    action = fallback
    if serial and depth == 0 and not facts.prefills():
        cap = facts.server_int("micro_batch_cap")
        total = facts.running() + (facts.waiting() or 0)
        wanted = max(1, -(-total // (number(facts.part("pipeline"), "pp_size") + 1)))
        wanted = min(wanted, cap or wanted)
        changes = ("pp_async_batch_depth=1", f"pp_max_micro_batch_size={wanted}")
        action = f"--pp-async-batch-depth 1 --pp-max-micro-batch-size {wanted}"
    faster = ("scale cause:host_schedule=0.8", "scale cause:host_launch=0.8", "scale cause:host_sync=0.8")
    return [Draft(
        "host_bound", "The hosts bound the period, not the GPUs", None, lost, evidence, action, changes,
        ceiling=0.0 if not changes else extra / facts.period_ns, fallback=fallback,
        probes=(("all host work took a fifth less", faster),),
    )]  # fmt: skip


def _parts(facts: Facts) -> str:
    """Where hosts spend what GPUs wait for, largest first."""
    words = {"host_launch": "issuing forwards", "host_sync": "waking up after the GPU"}
    spans = {"between spans": "between its spans"}
    parts: dict[str, int] = {}
    for row in facts.rows("blame"):
        if row["cause"] in _HOST:
            name = words.get(str(row["cause"])) or spans.get(str(row["detail"]), str(row["detail"]))
            parts[name] = parts.get(name, 0) + number(row, "ns")
    total = sum(parts.values())
    top = sorted(parts.items(), key=lambda x: (-x[1], x[0]))[:4]
    return ", ".join(f"{name} {ms(ns / facts.steps)} ({percent(ns / total)})" for name, ns in top)


RULES = (held_up, slow_host, slow_span, host_bound)

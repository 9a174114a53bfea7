"""Run the rules, price them with predictions, and sort by what they would give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from traceana.findings.facts import Facts
from traceana.findings.finding import Draft, Finding
from traceana.findings.rules_host import RULES as HOST
from traceana.findings.rules_machine import RULES as MACHINE
from traceana.findings.rules_pipe import RULES as PIPE
from traceana.findings.rules_stage import RULES as STAGE

__all__ = ["Predict", "find"]

Predict = Callable[[Sequence[Sequence[str]]], Sequence[Mapping[str, object] | None]]
"""For each list of changes (words of `traceana whatif`) {throughput_tokens_per_s, low, high}, or None if it cannot say."""


_NOTHING = 1.005  # less than that is no gain


def find(document: Mapping[str, object], predict: Predict | None = None) -> list[Finding]:
    """The findings of a report's document, largest predicted gain first. None at all is a possible answer.

    Without `predict`, or where it cannot say, the recoverable fraction is the rule's own ceiling, and `predicted` is
    None.
    """
    facts = Facts(document)
    drafts = [d for rule in (*PIPE, *STAGE, *MACHINE, *HOST) for d in rule(facts)]
    asked: list[tuple[Draft, str, tuple[str, ...]]] = []
    for draft in drafts:
        if draft.changes:
            asked.append((draft, draft.action, draft.changes))
        asked += [(draft, action, changes) for action, changes in (*draft.alternatives, *draft.probes)]
    answers = (
        list(predict([changes for _, _, changes in asked])) if predict is not None and asked else [None] * len(asked)
    )
    base = facts.throughput()
    findings: list[Finding] = []
    for draft in drafts:
        best: tuple[str, Mapping[str, object]] | None = None
        notes: list[str] = []
        for (owner, action, _), answer in zip(asked, answers, strict=True):
            if owner is not draft or answer is None:
                continue
            if any(action == probe for probe, _ in draft.probes):
                notes.append(f"predicted if {action}: {_words(answer, base)}")
                continue
            if owner.alternatives:
                notes.append(f"predicted for {action}: {_words(answer, base)}")
            if best is None or _rate(answer) > _rate(best[1]):
                best = (action, answer)
        fraction, action = draft.ceiling, draft.action
        if best is not None and base and _rate(best[1]) <= base * _NOTHING:
            if draft.fallback is None:
                continue
            notes.append(f"{best[0]} would not help: predicted {_words(best[1], base)}")
            best, fraction, action = None, 0.0, draft.fallback
        if best is not None and base:
            fraction = max(0.0, 1 - base / _rate(best[1])) if _rate(best[1]) else 0.0
        findings.append(
            Finding(
                draft.id,
                draft.title,
                draft.rank,
                draft.lost_ns,
                fraction,
                (*draft.evidence, *notes),
                best[0] if best is not None else action,
                best[1] if best is not None else None,
            )
        )
    return _merged(sorted(findings, key=lambda f: (-f.recoverable_fraction, -f.lost_ns, f.id)))


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that ask for the same are one: the first, with the others among its evidence."""
    out: list[Finding] = []
    for finding in findings:
        same = next((n for n, f in enumerate(out) if f.action == finding.action), None)
        if same is None:
            out.append(finding)
        else:
            more = (f"the same would help here: {finding.title}", *finding.evidence)
            out[same] = replace(out[same], evidence=(*out[same].evidence, *more))
    return out


def _rate(answer: Mapping[str, object]) -> float:
    value = answer.get("throughput_tokens_per_s")
    return float(value) if isinstance(value, int | float) else 0.0


def _words(answer: Mapping[str, object], base: float | None) -> str:
    gain = f", {(_rate(answer) / base - 1) * 100:+.0f} %" if base else ""
    return f"{_rate(answer):,.0f} tokens/s ({answer.get('low'):,.0f} to {answer.get('high'):,.0f}{gain})"

"""`traceana diff`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from traceana.cli import GateError
from traceana.cli.common import progress
from traceana.compare import Comparison, compare
from traceana.compare.side import Side, measure_side
from traceana.errors import TraceanaError
from traceana.outputs.jsonfile import to_json
from traceana.pipeline import Options, Progress, analyse

__all__ = ["command"]

_GATE = re.compile(r"^\s*([a-z_0-9]+)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*%\s*$")


@click.command("diff")
@click.argument("baseline", metavar="BASELINE", type=str)
@click.argument("candidate", metavar="CANDIDATE", type=str)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option(
    "--fail-on", "gates", multiple=True, metavar="GATE", help="Exit 3 if it holds, for instance 'throughput<-3%'."
)
@click.option("--no-cache", is_flag=True, help="Parse the traces again, and keep no parsed tables.")
@click.option("-v", "--verbose", count=True, help="Say what is being done.")
def command(baseline: str, candidate: str, as_json: bool, gates: tuple[str, ...], no_cache: bool, verbose: int) -> None:
    """Compare two captures: the change in time per decode token, decomposed so that it adds up.

    BASELINE and CANDIDATE are capture folders; several of one configuration may be given with commas between, and then
    their spread says what is noise. Gates compare a metric's relative change: throughput, latency_p50, latency_p99,
    utilisation, bubble or period.
    """
    wanted = [_gate(g) for g in gates]
    with progress(verbose) as say:
        found = compare(_sides(baseline, no_cache, say), _sides(candidate, no_cache, say))
    click.echo(to_json(found.as_json()) if as_json else _text(found), nl=as_json)
    for text, name, less, limit in wanted:
        change = found.metrics[name][2]
        if change is None:
            raise GateError(f"{text}: {name} is not known on both sides")
        if (change < limit) if less else (change > limit):
            raise GateError(f"{text}: {name} changed by {change:+.1%}")


def _gate(text: str) -> tuple[str, str, bool, float]:
    found = _GATE.match(text)
    names = ("throughput", "latency_p50", "latency_p99", "utilisation", "bubble", "period")
    if found is None or found[1] not in names:
        raise click.BadParameter(
            f"{text!r}: write METRIC<PERCENT% or METRIC>PERCENT%, METRIC one of {', '.join(names)}"
        )
    return text, found[1], found[2] == "<", float(found[3]) / 100


def _sides(text: str, no_cache: bool, say: Progress) -> list[Side]:
    paths = [Path(text)] if Path(text).exists() else [Path(part) for part in text.split(",") if part]
    sides: list[Side] = []
    for path in paths:
        if not path.exists():
            raise TraceanaError("no such capture", where=str(path), hint="give a capture folder")
        say(f"analyse {path}")
        report = analyse(path, Options(cache=not no_cache))
        sides.append(measure_side(path.resolve().name, report.model, report.document))
    return sides


def _text(c: Comparison) -> str:
    a, b = c.baseline.token_ns, c.candidate.token_ns
    lines = [
        f"baseline   {c.baseline.name}",
        f"candidate  {c.candidate.name}",
        f"Time per decode token {a:,} -> {b:,} ns ({b / a - 1:+.1%}), throughput {1e9 / a:,.0f} -> {1e9 / b:,.0f} tokens/s.",
        f"Beyond run-to-run noise of {c.spread:.1%}: {'yes' if c.significant else 'no'}. Source: {c.baseline.source}"
        + ("." if c.baseline.source == c.candidate.source else f"; {c.candidate.source}."),
        f"Parts are those of the rank that computes most (rank {c.baseline.rank}; rank {c.candidate.rank}), profiled.",
        "",
        f"{'ns per decode token':<32}{'baseline':>14}{'candidate':>14}{'change':>14}",
    ]
    for name, left, right in c.parts:
        lines.append(f"{name.replace('_', ' '):<32}{left:>14,}{right:>14,}{right - left:>+14,}")
    lines.append(f"{'sum = time per token':<32}{a:>14,}{b:>14,}{b - a:>+14,}")
    lines += ["", f"{'':<32}{'baseline':>14}{'candidate':>14}{'change':>14}"]
    for name, (x, y, change) in c.metrics.items():
        cells = "".join(f"{'unknown' if v is None else f'{v:,.3f}' if v < 10 else f'{v:,.0f}':>14}" for v in (x, y))
        lines.append(f"{name:<32}{cells}{'unknown' if change is None else f'{change:+.1%}':>14}")
    for title, side in (("baseline", c.baseline), ("candidate", c.candidate)):
        lines += ["", f"What to change in the {title}:", *(f"- {f}" for f in side.findings or ("nothing found",))]
    return "\n".join(lines) + "\n"

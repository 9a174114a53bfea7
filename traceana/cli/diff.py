"""`traceana diff`."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import cast

import click

from traceana.cli import GateError
from traceana.cli.common import limits_option, make_options, progress
from traceana.compare import Comparison, compare
from traceana.compare.side import Side, measure_side
from traceana.errors import TraceanaError
from traceana.outputs.jsonfile import to_json, write_json
from traceana.outputs.words import plain_lines
from traceana.pipeline import Progress, analyse

__all__ = ["command"]

KERNELS = 8
FINDINGS = 3

_GATE = re.compile(r"^\s*([a-z_0-9]+)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*%\s*$")


@click.command("diff")
@click.argument("baseline", metavar="BASELINE", type=str)
@click.argument("candidate", metavar="CANDIDATE", type=str)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option(
    "--fail-on", "gates", multiple=True, metavar="GATE", help="Exit 3 if it holds, for instance 'throughput<-3%'."
)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the JSON document to this file too.")
@limits_option
@click.option("--no-cache", is_flag=True, help="Compute everything again, and keep nothing of it.")
@click.option("-v", "--verbose", count=True, help="Say what is being done.")
def command(
    baseline: str,
    candidate: str,
    as_json: bool,
    gates: tuple[str, ...],
    out: Path | None,
    no_cache: bool,
    verbose: int,
) -> None:
    """Compare two captures: the change in time per decode token, decomposed so that it adds up.

    BASELINE and CANDIDATE are capture folders; several of one configuration may be given with commas between, and then
    their spread says what is noise. Gates compare a metric's relative change: throughput, latency_p50, latency_p99,
    utilisation, bubble or period.
    """
    wanted = [_gate(g) for g in gates]
    with progress(verbose) as say:
        found = compare(_sides(baseline, no_cache, say), _sides(candidate, no_cache, say))
    if out is not None:
        write_json(out, found.as_json())
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
    # A folder may have a comma in its name; an empty word would be the current folder.
    paths = [Path(text)] if text and Path(text).exists() else [Path(part) for part in text.split(",") if part.strip()]
    if not paths:
        raise click.BadParameter(f"{text!r} names no capture; give a folder, or several with commas between")
    sides: list[Side] = []
    for path in paths:
        if not path.exists():
            raise TraceanaError("no such capture", where=str(path), hint="give a capture folder")
        say(f"analyse {path}")
        report = analyse(path, make_options(None, None, None, no_cache, None))
        sides.append(measure_side(path.resolve().name, report.model, report.document))
    return sides


def _text(c: Comparison) -> str:
    before, after = c.token_ns
    heads = f"{'baseline':>14}{'candidate':>14}{'change':>14}"
    verdict = "beyond" if c.significant else "within"
    lines = [
        f"baseline   {c.baseline.name}",
        f"candidate  {c.candidate.name}",
        "",
        f"Throughput {1e9 / before:,.0f} -> {1e9 / after:,.0f} tokens/s ({before / after - 1:+.1%}); source:",
        f"{c.source}.",
        f"A token takes {before:,} -> {after:,} ns ({after / before - 1:+.1%}): {verdict} noise of {c.noise:.1%}.",
        *_spread(c),
        "",
        f"{'Why, in ns per token':<66}{'change':>14}",
    ]
    left, right = (c.metrics["tokens_per_forward"][i] or 0.0 for i in (0, 1))
    words = (
        ("batch_size", f"tokens in a forward ({left:.1f} -> {right:.1f}), same time of a forward"),
        ("forward_time", "time from forward to forward, as profiled"),
        ("profiler", "profiling taken off"),
    )
    lines += [f"{text:<66}{c.split[key]:>+14,}" for key, text in words]
    lines += [f"{'sum':<66}{after - before:>+14,}", ""]
    lines.append(f"{f'Rank {c.baseline.rank}; rank {c.candidate.rank}: ns per token':<38}{heads}")
    lines += [_row(name.replace("_", " "), x, y) for name, x, y in c.parts]
    lines += [_row("sum = time per token", before, after), "", f"{'Kernels that changed most':<38}{heads}"]
    lines += [_row(_short(name), x, y) for name, x, y in c.kernels[:KERNELS] if x != y]
    lines += ["", f"{'':<38}{heads}"]
    for name, (x, y, change) in c.metrics.items():
        cells = "".join(f"{_cell(name, value):>14}" for value in (x, y))
        lines.append(f"{name.replace('_', ' '):<38}{cells}{'unknown' if change is None else f'{change:+.1%}':>14}")
    for title, side in (("baseline", c.baseline), ("candidate", c.candidate)):
        lines += ["", f"What to change in the {title}:"]
        for text in side.findings[:FINDINGS] or ("nothing found",):
            lines += textwrap.wrap(text, 80, initial_indent="- ", subsequent_indent="  ")
    return plain_lines("\n".join(lines)) + "\n"


def _spread(c: Comparison) -> list[str]:
    if c.spread is None:
        return []
    lines = ["", *textwrap.wrap(f"{c.spread['title']}.", 80)]
    for text in cast("list[str]", c.spread["evidence"]):
        lines += textwrap.wrap(text, 80, initial_indent="- ", subsequent_indent="  ")
    return lines


def _row(name: str, before: int, after: int) -> str:
    return f"{name:<38}{before:>14,}{after:>14,}{after - before:>+14,}"


def _short(name: str) -> str:
    """A kernel's name in 37 columns: its ends, for the middle of a C++ name says least."""
    name = name.removeprefix("void ")
    return name if len(name) <= 37 else f"{name[:26]}...{name[-8:]}"


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "unknown"
    if name in ("latency_p50", "latency_p99", "period"):
        return f"{value / 1e6:,.1f} ms"
    if name in ("utilisation", "bubble"):
        return f"{value:.1%}"
    return f"{value:,.1f}"

"""The page docs/benchmarks.md from the figures."""

from __future__ import annotations

from collections.abc import Mapping

from measure import Cost

__all__ = ["page"]

_LABELS = {
    "rep8 cold": "report, 8 ranks x 54 MB, cold",
    "rep8 no cache": "the same with `--no-cache`",
    "rep8 warm": "the same, warm (the kept answer)",
    "merge cold": "merge of them, cold",
    "big200 cold": "report, one rank of 192 MB, cold",
    "big200 no cache": "the same with `--no-cache`",
    "big200 warm": "the same, warm (the kept answer)",
    "help": "`traceana --help`",
}
_TARGETS = {
    "rep8 cold": "2.2 s, 4.5 s CPU, 450 MB",
    "rep8 warm": "0.6 s",
    "merge cold": "3 s, 400 MB",
    "big200 cold": "1.6 s",
    "help": "0.15 s",
    "huge-64x64": "2000 MB",
    "huge-4x1024": "2000 MB",
}
_SERIES = (("events", "the same four ranks, longer"), ("ranks", "8, 32 and 128 ranks, pipelines of eight stages"))


def page(figures: Mapping[str, Cost], large: Mapping[str, tuple[Cost, str]], facts: Mapping[str, str]) -> str:
    """Markdown: what was measured, beside what is wanted and beside the references taken in the same run."""
    parts = [
        "# Benchmarks\n\n<!-- Written by benchmarks/run.py; do not edit. -->\n\n"
        f"Commit {facts['commit']}, {facts['date']}, {facts['machine']}. The fastest of five\n"
        "rounds (growth: of three), in which all that is compared takes turns; large captures once.\n\n"
        "```text\npython benchmarks/run.py --huge --hta-python PATH\n```\n\n"
        "makes the sets, measures, and writes this page. PATH is a python with `HolisticTraceAnalysis>=0.5` and\n"
        "`pandas<3`; `--huge` takes the sets of 4 GB too. Broken off, it goes on where it was. Byte code is compiled\n"
        "before, as pip does. CPU is of all threads; the peak is the kernel's resident maximum.\n",
        _main(figures),
        _linear(figures),
        _large(large),
    ]
    return "\n".join(parts)


def _cells(cost: Cost | None) -> str:
    if cost is None:
        return "not taken | | "
    if cost.status:
        return f"failed ({cost.status}) | | "
    return f"{cost.wall_s:.2f} | {cost.cpu_s:.2f} | {cost.peak_mb:.0f}"


def _times(reference: Cost | None, cost: Cost) -> str:
    """How many times as long the reference takes."""
    return f"{reference.wall_s / cost.wall_s:.1f}" if reference and not (reference.status or cost.status) else ""


def _main(figures: Mapping[str, Cost]) -> str:
    out = [
        "## Against other readers\n\nThe last columns say how many times as long a reference takes: HolisticTraceAnalysis\n"
        "(load, temporal, idle, overlap and kernel breakdowns), `json.load`, and a bare parse of the needed columns by\n"
        "pyarrow without any analysis. What is wanted was said for another machine. There HolisticTraceAnalysis\n"
        "takes 6.5 times as long as the report wanted of the eight ranks, json.load 2.4 and the bare parse 0.9 times;\n"
        "json.load 1.7 times as long as their merge; json.load 2.1 and the bare parse 0.8 times as long as the report of\n"
        "the one rank.\n",
        "| what | wall s | CPU s | peak MB | wanted | HTA | json.load | bare parse |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, label in _LABELS.items():
        cost = figures.get(name)
        kind = "rep8" if name == "merge cold" else name.split()[0]
        ratios = [_times(figures.get(f"{kind} {r}"), cost) if cost else "" for r in ("hta", "json", "arrow")]
        out.append(f"| {label} | {_cells(cost)} | {_TARGETS.get(name, '')} | {' | '.join(ratios)} |")
    for kind, what in (("rep8", "8 ranks"), ("big200", "one rank")):
        for name, label in (("hta", "HolisticTraceAnalysis"), ("json", "json.load"), ("arrow", "bare parse")):
            if f"{kind} {name}" in figures:
                out.append(f"| {label}, {what} | {_cells(figures[f'{kind} {name}'])} | | | | |")
    return "\n".join(out) + "\n"


def _linear(figures: Mapping[str, Cost]) -> str:
    out = [
        "## Growth\n\nCPU seconds of `report --json --no-cache` at 1x, 4x and 16x the work; the last column is the cost of each\n"
        "added unit between 4x and 16x beside that between 1x and 4x: 1.0 is linear.\n",
        "| what grows | 1x | 4x | 16x | peak MB at 16x | slope |",
        "|---|---|---|---|---|---|",
    ]
    for name, label in _SERIES:
        found = [figures.get(f"{name}-{n}x") for n in (1, 4, 16)]
        costs = [c for c in found if c is not None and not c.status]
        if len(costs) < 3:
            continue
        cpu = [c.cpu_s for c in costs]
        slope = ((cpu[2] - cpu[1]) / 12) / max((cpu[1] - cpu[0]) / 3, 1e-9)
        numbers = " | ".join(f"{c:.2f}" for c in cpu)
        out.append(f"| {name}: {label} | {numbers} | {costs[2].peak_mb:.0f} | {slope:.2f} |")
    return "\n".join(out) + "\n"


def _large(figures: Mapping[str, tuple[Cost, str]]) -> str:
    labels = {
        "huge-64x64": "64 ranks x 64 MB of JSON",
        "huge-4x1024": "4 ranks x 1 GB of JSON",
        "ranks-1024": "1,024 ranks x 1.7 MB of JSON",
    }
    out = [
        "## Large captures\n\n`report --json --no-cache`.\n",
        "| what | wall s | CPU s | peak MB | wanted | taken at |",
        "|---|---|---|---|---|---|",
    ]
    for name, label in labels.items():
        cost, commit = figures.get(name, (None, ""))
        out.append(f"| {label} | {_cells(cost)} | {_TARGETS.get(name, '')} | {commit} |")
    both = [figures[name][0] if name in figures else None for name in ("huge-64x64", "ranks-1024")]
    costs = [c for c in both if c is not None and not c.status]
    if len(costs) == 2:
        big, many = costs
        rank_s, event_s = many.cpu_s / 1024, big.cpu_s / 64
        total = 1024 * event_s
        out.append(
            f"\nProjection: a rank of 64 MB costs {event_s:.1f} s of CPU, and a small one {rank_s:.2f} s. 1,024 ranks of "
            f"64 MB (66 GB) take about {total / 60:.0f} minutes of CPU in all, {total / 60 / 2:.0f} on these two cores."
        )
    return "\n".join(out) + "\n"

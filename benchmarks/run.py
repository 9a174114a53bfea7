"""Measures everything and writes docs/benchmarks.md: `python benchmarks/run.py [--help]`.

Sets are made once and every figure is kept in the work folder as it is taken, under the commit it is of: a run that is
broken off goes on where it was. Those of large captures, which take minutes each, are kept over commits: the page names
the commit of each, and `--large-only` takes them again. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

from measure import Cost, measure
from table import page

SMALL = ("rep8", "big200")
LINEAR = ("events-1x", "events-4x", "events-16x", "ranks-1x", "ranks-4x", "ranks-16x")
HUGE = ("huge-64x64", "huge-4x1024")
LARGE = (*HUGE, "ranks-1024")
RUNS = 5


@dataclass(frozen=True, slots=True)
class Job:
    """A command to measure, after `before`."""

    command: list[str]
    env: Mapping[str, str] | None = None
    before: Callable[[], None] | None = None


class Bench:
    """Takes figures once each: `figures` is what is known so far, by name."""

    def __init__(self, work: Path, again: bool) -> None:
        self.work = work
        self.env = {"TRACEANA_CACHE_DIR": str(work / "cache"), "PYTHONPATH": str(ROOT)}
        commit = _git("rev-parse", "--short=12", "HEAD") + ("+" if _git("status", "--porcelain", "traceana") else "")
        self.commit = commit
        self._file = work / f"figures-{commit}.json"
        self.figures: dict[str, Cost] = {}
        if self._file.exists() and not again:
            self.figures = {name: Cost(**cost) for name, cost in json.loads(self._file.read_text()).items()}
        self._large = work / "figures-large.json"
        self.large: dict[str, tuple[Cost, str]] = {}
        """Figures of large captures, and the commit of each."""
        if self._large.exists():
            kept = json.loads(self._large.read_text())
            self.large = {name: (Cost(**cost), of) for name, (cost, of) in kept.items()}

    def take(self, jobs: Mapping[str, Job], *, runs: int = RUNS) -> None:
        """The fastest by wall time of `runs` runs of each of `jobs`, which take turns: what else goes on in a shared
        machine only adds, and a minute in which it is slower is so for all of them."""
        left = {name: job for name, job in jobs.items() if name not in self.figures}
        costs: dict[str, list[Cost]] = {name: [] for name in left}
        for _ in range(runs):
            for name, job in left.items():
                if job.before is not None:
                    job.before()
                costs[name].append(measure(job.command, job.env))
        for name, taken in costs.items():
            failed = [cost for cost in taken if cost.status]
            cost = failed[0] if failed else min(taken, key=lambda c: c.wall_s)
            print(f"{name:28s} {cost.wall_s:8.2f} s {cost.cpu_s:8.2f} s CPU {cost.peak_mb:7.0f} MB", flush=True)
            if cost.status:
                print(f"    failed with {cost.status}: {cost.said}", flush=True)
            self.figures[name] = cost
        self._file.write_text(json.dumps({n: asdict(c) for n, c in self.figures.items()}, indent=1))

    def take_large(self, name: str, command: list[str], *, again: bool) -> None:
        """One run, kept over commits."""
        if name in self.large and not again:
            return
        cost = measure(command, self.env)
        print(f"{name:28s} {cost.wall_s:8.2f} s {cost.cpu_s:8.2f} s CPU {cost.peak_mb:7.0f} MB {cost.said}", flush=True)
        self.large[name] = (cost, self.commit)
        self._large.write_text(json.dumps({n: (asdict(c), of) for n, (c, of) in self.large.items()}, indent=1))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(os.environ.get("TMPDIR", "/tmp")) / "traceana-bench")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks.md", help="the page to write")
    parser.add_argument("--hta-python", type=Path, help="a python that has HolisticTraceAnalysis>=0.5 and pandas<3")
    parser.add_argument("--huge", action="store_true", help="the two sets of 4 GB too (1 GB of disk, ten minutes)")
    parser.add_argument("--large-only", nargs="+", choices=LARGE, metavar="SET", help="take these again; write no page")
    parser.add_argument("--again", action="store_true", help="forget the figures of this commit")
    asked = parser.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    bench = Bench(asked.work, asked.again)
    sets = asked.large_only or [*SMALL, *LINEAR, "ranks-1024", *(HUGE if asked.huge else ())]
    subprocess.run(
        [sys.executable, str(HERE / "sets.py"), str(asked.work), *sets], check=True, stdout=subprocess.DEVNULL
    )
    # As pip leaves an installed package; a checkout may be run where Python writes none.
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(ROOT / "traceana")], check=False)
    take_large(bench, sets, again=bool(asked.large_only))
    if asked.large_only:
        return
    take_all(bench, asked.hta_python or _own_hta())
    asked.out.write_text(page(bench.figures, bench.large, _facts(bench, asked.work, sets)))
    print(f"Wrote {asked.out} after {time.perf_counter() - start:.0f} s")


def take_large(bench: Bench, sets: list[str], *, again: bool) -> None:
    """The figures of the large ones of `sets`."""
    for name in sets:
        if name in LARGE:
            command = [sys.executable, "-m", "traceana", "report", "--json", "--no-cache", str(bench.work / name)]
            bench.take_large(name, command, again=again)


def take_all(bench: Bench, hta: Path | None) -> None:
    """Every figure, the references of a set in turn with its own."""
    traceana = [sys.executable, "-m", "traceana"]
    env = bench.env

    def forget() -> None:
        shutil.rmtree(env["TRACEANA_CACHE_DIR"], ignore_errors=True)

    def report(name: str) -> list[str]:
        return [*traceana, "report", "--json", str(bench.work / name)]

    def reference(what: str, files: list[str], python: str = sys.executable) -> Job:
        return Job([python, str(HERE / "references.py"), what, *files])

    bench.take({"help": Job([*traceana, "--help"], env)})
    merged = bench.work / "merged.pftrace"
    for name in SMALL:
        files = sorted(map(str, (bench.work / name).glob("*.json.gz")))
        jobs = {
            f"{name} cold": Job(report(name), env, forget),
            f"{name} warm": Job(report(name), env),  # right after the cold one
            f"{name} no cache": Job([*report(name), "--no-cache"], env),
            f"{name} arrow": reference("arrow", files),
            f"{name} json": reference("json", files),
        }
        if name == "rep8":
            jobs["merge cold"] = Job([*traceana, "merge", str(bench.work / name), "-o", str(merged)], env, forget)
        if hta is not None:
            jobs[f"{name} hta"] = reference("hta", files, str(hta))
        bench.take(jobs)
    bench.take({name: Job([*report(name), "--no-cache"], env) for name in LINEAR}, runs=3)
    forget()
    merged.unlink(missing_ok=True)


def _own_hta() -> Path | None:
    """This python, where it has HolisticTraceAnalysis."""
    done = subprocess.run([sys.executable, "-c", "import hta.trace_analysis"], capture_output=True, check=False)
    return Path(sys.executable) if done.returncode == 0 else None


def _facts(bench: Bench, work: Path, sets: list[str]) -> dict[str, str]:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    sizes = {name: sum(f.stat().st_size for f in (work / name).rglob("*.gz")) for name in sets}
    return {
        "commit": bench.commit,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": f"{len(os.sched_getaffinity(0))} cores of {cpu}, Python {platform.python_version()}",
        **{f"gz {name}": f"{size / 1e6:.0f} MB" for name, size in sizes.items()},
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    main()

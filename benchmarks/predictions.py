"""What-if against hardware: predictions from one real capture, compared with what the changed server was measured at.

    python benchmarks/predictions.py [FOLDER WITH THE CAPTURES]

Prints the error tables of docs/concepts/whatif.md: how well the model gives the profiled period of every pipeline
capture, and for each change the error of three predictors: no change at all, the closed formula of
docs/concepts/attribution.md calibrated on the capture, and the slot simulator. Measured figures are pure decode
tokens per second of unprofiled servers (PP0's `gen throughput` lines before the profile, no prefill between).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from traceana.analyses.bound import run as bound
from traceana.model.model import Model
from traceana.pipeline import Options, load_model
from traceana.simulate.changes import parse_words
from traceana.simulate.growth import MIDDLE, scaled_to_batch
from traceana.simulate.predict import Predictor

REAL = Path(__file__).resolve().parent.parent.parent / "shared" / "traces" / "real"
# H is the mean of six runs of one configuration (H, H2, I, J, O, U), the others are single runs.
MEASURED = {"A": 984.0, "B": 1906.0, "D": 170.6, "H": 1767.0, "M": 198.0, "Q": 1631.0}
WIDER = "pp_max_micro_batch_size=16,max_running_requests=32"
NARROWER = "pp_max_micro_batch_size=8,max_running_requests=16"
WIDEST = "max_running_requests=64,pp_max_micro_batch_size=32"


@dataclass(frozen=True, slots=True)
class Case:
    """Capture `start` under `changes` is the server of capture `end`; `asked`: the issue sets a limit for it,
    percent."""

    start: str
    end: str
    changes: tuple[str, ...]
    asked: int | None = None


CASES = (
    Case("H", "Q", ("host 0=+3ms",), 5),
    Case("H2", "Q", ("host 0=+3ms",)),
    Case("I", "Q", ("host 0=+3ms",)),
    Case("Q", "H", ("host 0=-3ms",), 8),
    Case("A", "H", (WIDER,), 10),
    Case("A", "B", (WIDEST,), 10),
    Case("H", "A", (NARROWER,), 10),
    Case("H2", "A", (NARROWER,)),
    Case("I", "A", (NARROWER,)),
    Case("B", "H", (WIDER,)),
    Case("B", "A", (NARROWER,)),
    Case("H", "B", (WIDEST,)),
    Case("Q", "A", (NARROWER, "host 0=-3ms")),
    Case("M", "H", ("concurrency=32",)),
    Case("H", "M", ("concurrency=2",)),
    Case("A", "D", ("disable_cuda_graph=true",)),
    Case("D", "A", ("disable_cuda_graph=false",)),
    Case("D", "H", ("disable_cuda_graph=false", WIDER)),
)


def closed_formula(model: Model, predictor: Predictor, case: Case, slots: Sequence[int]) -> float | None:
    """The period formula with this capture's means, its host terms scaled so that it gives the server's own throughput.
    None where it has no term for the change."""
    facts = cast("dict[str, Any]", bound(model).facts["model"])
    parts = predictor.parts
    if facts["tau_ns"] is None or parts.throughput is None or "graph" in " ".join(case.changes):
        return None
    stages = cast("list[dict[str, int]]", facts["per_stage"])
    gpu, host, hop = ([s[k] for s in stages] for k in ("t_ns", "k_ns", "c_ns"))
    serial = facts["terms_ns"].get("last_stage_serial", gpu[-1]) - gpu[-1]
    extra = [c.value for c in parse_words(case.changes) if c.kind == "host"]
    sleep = sum(ns for ns in extra if isinstance(ns, int))

    serial = int(serial)

    def tau(t: Sequence[float], speed: float, more: int, m: int) -> float:
        hosts = [k * speed for k in host]
        hosts[0] += more
        ring = (sum(t) + sum(hop) * speed + more) / m
        return max(*t, *hosts, ring, t[-1] + serial * speed)

    filled = sum(b > 0 for b in parts.slots)
    own_ns = sum(parts.slots) / filled / (parts.throughput / 1000) * 1e9
    low, high, speed = 0.05, 3.0, 1.0
    for _ in range(60):
        speed = (low + high) / 2
        low, high = (low, speed) if tau(gpu, speed, 0, filled) > own_ns else (speed, high)
    sizes = [b for b in slots if b]
    times: list[float] = []
    for stage in parts.stages:
        made = [
            scaled_to_batch(stage.kernels, stage.kernels.gpu, parts.rows_of, b, MIDDLE, predictor.experts)[1].mean()
            for b in sizes
        ]
        times.append(float(sum(made)) / len(sizes))
    return sum(sizes) / len(sizes) / tau(times, speed, sleep, len(sizes)) * 1e9


def main(folder: Path) -> None:
    """Print both tables."""
    models: dict[str, Model] = {}
    predictors: dict[str, Predictor] = {}
    print("| capture | profiled period, ms | model, ms | error | host dilation |")
    print("|---|---|---|---|---|")
    for letter in ("A", "B", "D", "G", "H", "H2", "I", "M", "Q", "X"):
        path = next(iter(sorted(folder.glob(f"{letter}-*"))))
        models[letter], _, _ = load_model(path, Options())
        p = predictors[letter] = Predictor(models[letter])
        seen, model_ns = p.parts.period_ns, p.identity_ns
        ways = ", ".join(f"{c.dilation:.2f}" for c in p.calibrations((0, 0)))
        print(f"| {letter} | {seen / 1e6:.2f} | {model_ns / 1e6:.2f} | {model_ns / seen - 1:+.1%} | {ways} |")
    print("\n| case | measured | no change | closed formula | prediction | error | range | inside | allowed |")
    print("|---|---|---|---|---|---|---|---|---|")
    errors: dict[str, list[float]] = {"no change": [], "closed formula": [], "prediction": []}
    for case in CASES:
        measured = MEASURED[case.end]
        said = predictors[case.start].predict(parse_words(case.changes))
        closed = closed_formula(models[case.start], predictors[case.start], case, said.slots or ())
        found = {"no change": said.baseline, "closed formula": closed, "prediction": said.throughput}
        for name, value in found.items():
            if value is not None:
                errors[name].append(abs(value / measured - 1))
        print(
            f"| {case.start} to {case.end} | {measured:.0f} | {said.baseline / measured - 1:+.1%} | {_error(closed, measured)} | "
            f"{said.throughput:.0f} | {said.throughput / measured - 1:+.1%} | {said.low:.0f} to {said.high:.0f} | "
            f"{'yes' if said.low <= measured <= said.high else 'no'} | {f'{case.asked} %' if case.asked else ''} |"
        )
    print("\n" + _means(errors))
    started = time.perf_counter()
    p = Predictor(models["A"])
    made = time.perf_counter()
    for case in CASES[:8]:
        p.predict(parse_words(case.changes))
    print(
        f"A: {made - started:.3f} s to cut and play as profiled, {time.perf_counter() - made:.3f} s to calibrate and predict 8 times"
    )


def _error(value: float | None, measured: float) -> str:
    return "" if value is None else f"{value / measured - 1:+.1%}"


def _means(errors: Mapping[str, Sequence[float]]) -> str:
    means = (f"{name} {sum(e) / len(e):.1%} (worst {max(e):.1%})" for name, e in errors.items())
    return "mean absolute error: " + ", ".join(means)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else REAL)

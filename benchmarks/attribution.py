"""Cost of states and blame as events and ranks grow: generated worlds of 1x, 4x and 16x the steps, and PP2 to PP16.

    python benchmarks/attribution.py

Prints seconds beside the seconds of the smallest world, both from this run; linear is a ratio equal to the events'.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "fixtures"))

from traceana.model.blame import blame
from traceana.model.states import device_states
from traceana.pipeline import Options, load_model
from tracegen import Load, Model, build_model


def measure(pp: int, steps: int) -> tuple[int, float]:
    """Events of a world and the best of three runs of states and blame, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        build_model(Model(pp=pp, steps=steps, load=Load(preload=(4,) * pp)), Path(folder))
        model, _, _ = load_model(Path(folder), Options(assume="same-host", cache=False))
    trace = model.trace
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        states = {r.info.rank: device_states(r, trace) for r in trace.capture.ranks}
        blame(trace, states)
        best = min(best, time.perf_counter() - start)
    return sum(r.device.height + r.calls.height + r.annotations.height for r in trace.capture.ranks), best


def main() -> None:
    """Print the table."""
    print("| stages | steps | events | ratio of events | seconds | ratio of seconds |")
    print("|---|---|---|---|---|---|")
    for worlds in ([(2, 40), (2, 160), (2, 640)], [(2, 40), (4, 40), (8, 40), (16, 40)]):
        first: tuple[int, float] | None = None
        for pp, steps in worlds:
            events, seconds = measure(pp, steps)
            first = first or (events, seconds)
            print(
                f"| {pp} | {steps} | {events} | {events / first[0]:.1f} | {seconds:.3f} | {seconds / first[1]:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""What-if against generated servers: predictions from one world, compared with what the changed world then does.

    python benchmarks/worlds.py [WORDS THAT CASES MUST HAVE]

Prints the table of docs/concepts/whatif.md, section "on generated servers". The generator (fixtures/tracegen) shares no
code with traceana; a changed world is generated anew, and its throughput is that of its unprofiled visits.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "fixtures"), str(ROOT / "benchmarks")]

from predictions import Case, closed_formula

from traceana.model.model import Model as Explained
from traceana.pipeline import Options, load_model
from traceana.simulate.changes import parse_words
from traceana.simulate.predict import Predictor
from tracegen import Load, Model, build_model
from tracegen.sglang import simulate
from tracegen.sidefiles import steady


def decode(*sizes: int) -> Load:
    """Requests that decode for ever in the slots."""
    return Load(preload=sizes)


# The balance of the captures at hand: about as much host as GPU time in a visit; the smaller ones with fast hosts.
PP2 = Model(load=decode(8, 8), base_host=500, base_gpu=28_000, steps=24, warm=96)
PP4 = Model(pp=4, load=decode(8, 8, 8, 8), max_running=32, base_host=350, base_gpu=24_000, steps=24, warm=96, lean=True)
PP8 = Model(
    pp=8, load=decode(8, 8, 8, 8), cap=8, max_running=64, base_host=250, base_gpu=20_000, steps=16, warm=160, lean=True
)
WORLDS: dict[str, Model] = {
    "pp2": PP2,
    "pp2 depth 2": replace(PP2, depth=2, load=decode(8, 8, 8, 8), cap=8, max_running=32),
    "pp2 layers 4,4": replace(PP2, layers=(4, 4), base_gpu=7_000),
    "pp2 layers 5,3": replace(PP2, layers=(5, 3), base_gpu=7_000),
    "pp2 no graphs": replace(PP2, graph=False, layers=(6, 6), base_gpu=4_600, lean=True),
    "pp2 graphs": replace(PP2, layers=(6, 6), base_gpu=4_600, lean=True),
    "pp4": PP4,
    "pp4 layers 4,8,4,8": replace(PP4, layers=(4, 8, 4, 8), base_gpu=5_000),
    "pp8": PP8,
    "pp8 full": replace(PP8, steps=30, load=decode(*[4] * 8), cap=4, max_running=32),
    "pp8 layers 4,4,4,4,4,4,4,8": replace(
        PP8, steps=30, load=decode(*[4] * 8), cap=4, max_running=32, layers=(*[4] * 7, 8), base_gpu=4_000
    ),
}
HIDES = 1_500_000


@dataclass(frozen=True, slots=True)
class Change:
    """`words` of what-if on `world`, and the fields of the generator that are the same change."""

    world: str
    words: tuple[str, ...]
    fields: dict[str, Any]


def _planted() -> list[Change]:
    """Delays that are in the capture and taken off: host sleeps on each stage and place, kernels on each stage."""
    out: list[Change] = []
    for base, stages in (("pp2", (0, 1)), ("pp4", (0, 2, 3)), ("pp8 full", (0, 5, 7))):
        for stage in stages:
            for place in ("get_next_batch_to_run", "process_batch_result", "run_batch", "recv_proxy"):
                if (place == "recv_proxy" and stage == 0) or (base != "pp2" and place in ("run_batch", "recv_proxy")):
                    continue
                name = f"{base}, 3 ms in {place} of {stage}"
                WORLDS[name] = replace(WORLDS[base], delays={(stage, place): 3_000_000})
                out.append(Change(name, (f"host {stage}=-3ms",), {"delays": {}}))
        for stage in stages[-2:]:
            for where in ("ahead", "among", "behind") if base == "pp2" else ("among",):
                name = f"{base}, kernel of 2 ms {where} the layers of {stage}"
                WORLDS[name] = replace(WORLDS[base], spins={(stage, where): 2_000_000})
                out.append(Change(name, ("remove spin_kernel",), {"spins": {}}))
    return out


def cases() -> list[Change]:
    """All changes, planted delays last."""
    full = decode(*[4] * 8)
    return [
        Change("pp2", ("host 0=+3ms",), {"sleep": {0: 3_000_000}}),
        Change("pp2", ("host 1=+3ms",), {"sleep": {1: 3_000_000}}),
        Change("pp2", ("pp_async_batch_depth=2",), {"depth": 2, "cap": 8, "load": decode(1, 8, 7)}),
        Change(
            "pp2", ("pp_async_batch_depth=2", "max_running_requests=32", "concurrency=32", "pp_max_micro_batch_size=8"),
            {"depth": 2, "cap": 8, "max_running": 32, "load": decode(8, 8, 8, 8)},
        ),
        Change(
            "pp2 depth 2", ("pp_async_batch_depth=0",),
            {"depth": 0, "load": decode(8, 8)},
        ),
        Change("pp2 depth 2", ("pp_async_batch_depth=8",), {"depth": 8, "load": decode(1, 8, 8, 8, 7)}),
        Change("pp2 layers 4,4", ("pp_layer_partition=5,3",), {"layers": (5, 3)}),
        Change("pp2 layers 5,3", ("pp_layer_partition=4,4",), {"layers": (4, 4)}),
        Change("pp2 layers 5,3", ("pp_layer_partition=3,5",), {"layers": (3, 5)}),
        Change("pp2 graphs", ("disable_cuda_graph=true",), {"graph": False}),
        Change("pp2 no graphs", ("disable_cuda_graph=false",), {"graph": True}),
        Change("pp4", ("host 1=+2ms",), {"sleep": {1: 2_000_000}}),
        Change("pp4", ("link 1-2=30",), {"links": {(1, 2): 30_000}}),
        Change("pp4", ("pp_async_batch_depth=2",), {"depth": 2, "cap": 8, "load": decode(1, 8, 8, 8, 7)}),
        Change("pp4 layers 4,8,4,8", ("pp_layer_partition=6,6,6,6",), {"layers": (6, 6, 6, 6)}),
        Change("pp8", ("pp_max_micro_batch_size=4",), {"cap": 4, "load": full}),
        Change("pp8", ("pp_max_micro_batch_size=2",), {"cap": 2, "load": decode(*[2] * 8)}),
        Change("pp8", ("pp_async_batch_depth=8",), {"depth": 8, "load": decode(8, 8, 8, 8)}),
        Change("pp8", ("pp_async_batch_depth=8", "pp_max_micro_batch_size=2"),
               {"depth": 8, "cap": 2, "load": decode(*[2] * 16)}),
        Change("pp8 full", ("pp_max_micro_batch_size=8",), {"cap": 8, "load": decode(8, 8, 8, 8)}),
        Change("pp8 full", ("pp_async_batch_depth=2", "pp_max_micro_batch_size=4"), {"depth": 2, "load": full}),
        Change("pp8 layers 4,4,4,4,4,4,4,8", ("pp_layer_partition=5,5,5,5,4,4,4,4",), {"layers": (5, 5, 5, 5, 4, 4, 4, 4)}),
        *_planted(),
    ]  # fmt: skip


@cache
def captured(name: str, folder: Path) -> tuple[Explained, Predictor]:
    """The world of a name, generated and read."""
    world = build_model(WORLDS[name], folder / name.replace(" ", "_").replace(",", ""), name=name)
    model = load_model(world.folder, Options(cache=False))[0]
    return model, Predictor(model)


def truth(model: Model) -> float:
    """Decode tokens per second of the unprofiled visits of a generated server."""
    tokens, ns, _ = steady(simulate(model, "truth/0"))
    return tokens * 1e9 / ns


def main(wanted: Sequence[str]) -> None:
    """Print the table."""
    chosen = [c for c in cases() if all(w in f"{c.world}: {' '.join(c.words)}" for w in wanted)]
    print("| world | change | generated, tokens/s | no change | closed formula | prediction | error | in range |")
    print("|---|---|---|---|---|---|---|---|")
    errors: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in chosen:
            model, predictor = captured(case.world, Path(scratch))
            real = truth(replace(WORLDS[case.world], **case.fields))
            said = predictor.predict(parse_words(case.words))
            closed = closed_formula(model, predictor, Case("", "", case.words), said.slots or ())
            errors.append(abs(said.throughput / real - 1))
            formula = "" if closed is None else f"{closed / real - 1:+.1%}"
            print(
                f"| {case.world} | {' '.join(case.words)} | {real:.0f} | {said.baseline / real - 1:+.1%} | {formula} |"
                f" {said.throughput:.0f} | {said.throughput / real - 1:+.1%} | {'yes' if said.low <= real <= said.high else 'no'} |",
                flush=True,
            )
    print(f"\nmean absolute error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}, {len(errors)} cases")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Predictions against generated servers: what the simulator says of a change, and what the changed server then does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from traceana.errors import ModelError, TraceanaError
from traceana.matching.topology import Topology
from traceana.pipeline import Options, load_model
from traceana.simulate.changes import parse_words
from traceana.simulate.predict import Predictor, predict, predict_many, pricer
from tracegen import Load, Model, build_model
from tracegen.scenarios import MODELS
from tracegen.sglang import simulate
from tracegen.sidefiles import steady


def _decode(*sizes: int) -> Load:
    return Load(preload=sizes)


# The steady part before the profile is long enough to say the server's throughput to a percent.
PP2 = replace(MODELS["pp2_decode"], warm=96)
PP8 = replace(
    MODELS["pp8_decode"], load=_decode(8, 8, 8, 8), cap=8, warm=160, steps=16, base_gpu=10_000, base_host=150
)  # fmt: skip
WORLDS: Mapping[str, Model] = {
    "pp2": PP2,
    "pp2_sleep": replace(PP2, sleep={1: 3_000_000}),
    "pp2_spin_of_last": replace(PP2, spins={(1, "among"): 2_000_000}),
    "pp2_held_where_it_hides": replace(PP2, delays={(0, "send_proxy_dict_to_next_stage"): 150_000}),
    "pp2_depth2": replace(MODELS["pp2_depth2"], warm=96),
    "pp4_link": replace(MODELS["pp4_slow_link"], warm=96),
    "pp4_layers": replace(MODELS["pp4_uneven_layers"], warm=96, layers=(4, 8, 4, 8)),
    "pp8": PP8,
    "pp8_depth8": replace(PP8, depth=8, warm=320),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@cache
def predictor(folder: Path, name: str) -> Predictor:
    world = build_model(WORLDS[name], folder / name, name=name)
    return Predictor(load_model(world.folder, Options(cache=False))[0])


@cache
def truth(name: str, *changed: tuple[str, object]) -> float:
    """Decode tokens per second that the generated server reaches once it is changed."""
    model = replace(WORLDS[name], **{k: dict(v) if isinstance(v, tuple) else v for k, v in changed})  # type: ignore[arg-type]
    tokens, ns, _ = steady(simulate(model, f"{name}/0"))
    return tokens * 1e9 / ns


@pytest.mark.parametrize("name", WORLDS)
def test_the_model_gives_the_profiled_period(folder: Path, name: str) -> None:
    p = predictor(folder, name)
    assert p.identity_ns == pytest.approx(p.parts.period_ns, rel=0.02)


@pytest.mark.parametrize(
    ("name", "change", "changed"),
    [
        ("pp2", "host 0=+3ms", {"sleep": ((0, 3_000_000),)}),
        ("pp2", "host 1=+3ms", {"sleep": ((1, 3_000_000),)}),
        ("pp2_sleep", "host 1=-3ms", {"sleep": ()}),
        ("pp2_spin_of_last", "remove spin_kernel", {"spins": ()}),
        ("pp2_depth2", "host 1=+1ms", {"sleep": ((1, 1_000_000),)}),
        ("pp4_link", "link 1-2=0.0025", {"links": ()}),
        ("pp4_layers", "pp_layer_partition=6,6,6,6", {"layers": "6,6,6,6"}),
        ("pp4_layers", "pp_layer_partition=8,4,6,6", {"layers": "8,4,6,6"}),
    ],
)
def test_one_knob_is_predicted_within_two_percent(
    folder: Path, name: str, change: str, changed: dict[str, object]
) -> None:
    if isinstance(layers := changed.get("layers"), str):
        model = replace(WORLDS[name], layers=tuple(int(x) for x in layers.split(",")))
        tokens, ns, _ = steady(simulate(model, f"{name}/0"))
        real = tokens * 1e9 / ns
    else:
        real = truth(name, *changed.items())
    said = predictor(folder, name).predict(parse_words([change]))
    assert said.throughput == pytest.approx(real, rel=0.02)
    assert said.low <= real <= said.high


def test_32_requests_at_a_cap_of_8_fill_four_of_eight_slots(folder: Path) -> None:
    p = predictor(folder, "pp8")
    assert p.parts.slots == (8, 8, 8, 8, 0, 0, 0, 0)
    now = p.predict([])
    assert all(s.utilisation <= 0.5 for s in now.stages)
    capped = p.predict(parse_words(["pp_max_micro_batch_size=4"]))
    assert capped.slots == (4,) * 8
    assert predictor(folder, "pp8_depth8").parts.slots == (8, 8, 8, 8, *[0] * 12)


@pytest.mark.parametrize("cap", [4, 2])
def test_caps_on_eight_stages_agree_with_the_generator(folder: Path, cap: int) -> None:
    filled = min(8, 32 // cap)
    model = replace(PP8, cap=cap, load=_decode(*[cap] * filled))
    tokens, ns, _ = steady(simulate(model, "pp8/0"))
    said = predictor(folder, "pp8").predict(parse_words([f"pp_max_micro_batch_size={cap}"]))
    assert said.throughput == pytest.approx(tokens * 1e9 / ns, rel=0.02)
    assert said.low <= tokens * 1e9 / ns <= said.high


@pytest.mark.parametrize(("name", "depth"), [("pp8", 8), ("pp2_depth2", 1)])
def test_another_async_depth_agrees_with_the_generator(folder: Path, name: str, depth: int) -> None:
    model = WORLDS[name]
    sizes = (8, 8, 8, 8) if model.pp == 8 else (8,) * (model.pp + depth)
    tokens, ns, _ = steady(simulate(replace(model, depth=depth, load=_decode(*sizes)), f"{name}/0"))
    said = predictor(folder, name).predict(parse_words([f"pp_async_batch_depth={depth}"]))
    assert said.throughput == pytest.approx(tokens * 1e9 / ns, rel=0.02)


def test_many_predictions_are_those_of_one_at_a_time(folder: Path) -> None:
    p = predictor(folder, "pp2")
    asked = [parse_words([w]) for w in ("host 0=+3ms", "scale class:moe=0.5", "concurrency=8", "merge_waiting=true")]
    model = load_model(folder / "pp2", Options(cache=False))[0]
    assert predict_many(model, asked) == [p.predict(changes) for changes in asked]
    assert predict(model, asked[0]) == p.predict(asked[0])


def test_no_change_predicts_the_servers_own_throughput(folder: Path) -> None:
    said = predictor(folder, "pp2").predict([])
    assert said.throughput == said.baseline
    assert said.low < said.baseline < said.high
    assert said.gain == 0


def test_findings_are_priced_and_what_does_not_fit_is_not(folder: Path) -> None:
    model = load_model(folder / "pp2", Options(cache=False))[0]
    price, work = pricer(model)
    assert [w["rank"] for w in work] == [0, 1]
    assert price is not None
    fits, not_here = price([["host 0=+1ms"], ["link 5-6=2"]])
    assert fits is not None and set(fits) >= {"throughput_tokens_per_s", "low", "high", "period_ns", "stages"}
    assert not_here is None


def test_figures_of_a_prediction_agree_with_each_other(folder: Path) -> None:
    said = predictor(folder, "pp2").predict(parse_words(["host 1=+3ms"]))
    assert said.slots is not None and said.token_ns is not None
    assert said.token_ns * said.throughput == pytest.approx(sum(said.slots) * 1e9, rel=1e-6)
    assert said.period_ns == said.token_ns // 2
    assert all(s.bubble_ns == pytest.approx(said.period_ns * (1 - s.utilisation), rel=1e-3) for s in said.stages)


def test_ranks_of_one_stage_are_refused(folder: Path) -> None:
    model = load_model(folder / "pp2", Options(cache=False))[0]
    peers = replace(model, trace=replace(model.trace, topology=Topology(1, {0: 0, 1: 0}, {}, {}, "no pipeline")))
    with pytest.raises(ModelError) as refused:
        predict(peers, [])
    assert refused.value.hint
    assert pricer(peers) == (None, [])


def test_a_lone_stage_is_refused(folder: Path) -> None:
    build_model(WORLDS["pp2"], folder / "lone", name="pp2")
    model = load_model(folder / "lone", Options(ranks=(0,), cache=False))[0]
    with pytest.raises(TraceanaError):
        predict(model, [])

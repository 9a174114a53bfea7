"""Findings: each fires on a generated server that has its cause, and stays silent on one that has not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from captures import real, report_of

from traceana.findings import find
from traceana.findings.facts import held
from traceana.findings.rules_stage import balanced
from traceana.pipeline import Options, analyse
from tracegen import Load, Model, build_model
from tracegen.scenarios import MODELS

PP2 = replace(MODELS["pp2_decode"], steps=16, load=Load(preload=(8, 8)))
SEND = "send_proxy_dict_to_next_stage"
WORLDS: Mapping[str, Model] = {
    "plain": PP2,
    "held where it costs": replace(PP2, delays={(0, SEND): 3_000_000}),
    "held in run_batch": replace(PP2, delays={(1, "run_batch"): 3_000_000}),
    "kernel that costs": replace(PP2, spins={(1, "among"): 2_000_000}),
    "kernel that hides": replace(PP2, spins={(0, "ahead"): 1_500_000}),
    "slow host": replace(MODELS["pp4_slow_host"], steps=12),
    "gloo": replace(MODELS["pp2_control_message"], load=Load(preload=(8, 8))),
    "slow link": replace(MODELS["pp4_slow_link"], steps=10),
    "back-pressure": MODELS["pp2_backpressure"],
    "late rank": MODELS["pp2_collective"],
    "layers": replace(MODELS["pp4_uneven_layers"], layers=(3, 6, 3, 6), base_gpu=4_000, steps=12),
    "one request": MODELS["pp8_one_request"],
    "burst": MODELS["pp8_burst_depth8"],
    "waiting": MODELS["pp2_waiting_no_place"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@cache
def document(folder: Path, name: str) -> dict[str, Any]:
    world = build_model(WORLDS[name], folder / name.replace(" ", "_"), name=name)
    return dict(analyse(world.folder, Options(cache=False)).document)


def first(folder: Path, name: str) -> dict[str, Any]:
    return cast("list[dict[str, Any]]", document(folder, name)["findings"])[0]


@pytest.mark.parametrize(
    ("name", "finding", "words", "action"),
    [
        ("held where it costs", "host_span", f"stage 0 is held up for (2.9|3.0). ms a visit in {SEND}", "py-spy"),
        ("held in run_batch", "host_span", "stage 1 is held up for (2.9|3.0). ms a visit in run_batch", "py-spy"),
        ("kernel that costs", "stage_kernel", "Only stage 1 runs spin_kernel: 2.00 ms a step", "spin_kernel"),
        ("slow host", "slow_host", "The host of stage 1 is slow", "taskset"),
        ("gloo", "control_messages", "gloo messages", "GLOO_SOCKET_IFNAME"),
        ("slow link", "slow_link", "The link 1 to 2 is slow", "topo"),
        ("layers", "stage_imbalance", "does more work", "SGLANG_PP_LAYER_PARTITION="),
        ("one request", "few_requests", "Too few requests arrive: 1 in the whole server", "send more requests"),
        ("waiting", "micro_batch_cap", "max_running_requests 8 holds back 24 waiting", "--max-running-requests 32"),
    ],
)
def test_the_first_finding_is_what_was_planted(folder: Path, name: str, finding: str, words: str, action: str) -> None:
    found = first(folder, name)
    assert found["id"] == finding
    assert re.search(words, found["title"])
    assert action in found["action"]
    assert found["evidence"] and found["lost_ns"] > 0
    predicted = found["predicted"]
    assert predicted["low"] <= predicted["throughput_tokens_per_s"] <= predicted["high"]
    assert found["recoverable_fraction"] > 0.03


def test_a_kernel_of_about_the_same_size_that_hides_is_said_to_gain_nothing(folder: Path) -> None:
    found = {f["id"]: f for f in document(folder, "kernel that hides")["findings"]}["stage_kernel"]
    assert found["recoverable_fraction"] == 0
    assert found["predicted"] is None
    assert found["action"].startswith("nothing to gain from spin_kernel now")
    assert "would not help" in found["evidence"][-1]
    assert first(folder, "kernel that costs")["recoverable_fraction"] > 0.15


def test_a_plain_server_has_none_of_the_planted_causes(folder: Path) -> None:
    found = {f["id"] for f in document(folder, "plain")["findings"]}
    assert found <= {"host_bound", "few_slots"}


@pytest.mark.parametrize(("name", "finding"), [("back-pressure", "exposed_p2p"), ("late rank", "late_rank")])
def test_causes_without_a_prediction_of_their_own_claim_no_gain(folder: Path, name: str, finding: str) -> None:
    found = {f["id"]: f for f in document(folder, name)["findings"]}[finding]
    assert found["recoverable_fraction"] == 0
    assert found["lost_ns"] > 0


def test_32_requests_at_a_cap_of_8_fill_4_of_16_slots(folder: Path) -> None:
    found = first(folder, "burst")
    assert found["id"] == "greedy_slots"
    evidence = " / ".join(found["evidence"])
    for words in (
        "4 of the 16 slots are filled",
        "at most 50 % utilisation",
        "cap 8 a slot",
        "--pp-max-micro-batch-size 4: ",
    ):
        assert words in evidence
    assert all(s["utilisation"] <= 0.5 for s in document(folder, "burst")["stages"])


def test_host_bound_says_which_part(folder: Path) -> None:
    found = {f["id"]: f for f in document(folder, "plain")["findings"]}["host_bound"]
    part = next(e for e in found["evidence"] if e.startswith("of it "))
    assert "issuing forwards" in part and "get_next_batch_to_run" in part
    assert any(e.startswith("predicted if all host work took a fifth less: ") for e in found["evidence"])


def test_findings_that_ask_for_the_same_are_one(folder: Path) -> None:
    for name in ("plain", "slow host", "one request"):
        actions = [f["action"] for f in document(folder, name)["findings"]]
        assert len(set(actions)) == len(actions)


# Rules over facts that no generated server has


def facts(folder: Path, **changed: object) -> dict[str, object]:
    return document(folder, "plain") | changed


def test_a_batch_above_the_captured_sizes(folder: Path) -> None:
    plain = document(folder, "plain")
    eager = [
        {**row, "by_mode": [{**mode, "graphed": 0} for mode in row["by_mode"]]} for row in plain["cuda_graph"]
    ]  # fmt: skip
    server = {**plain["server"], "cuda_graph": {"enabled": True, "captured_sizes": [1, 2, 4]}}
    found = find(facts(folder, cuda_graph=eager, server=server))
    missed = next(f for f in found if f.id == "cuda_graphs_off")
    assert missed.title == "CUDA graphs missed: micro-batches of 8 are above the largest captured size 4"
    assert missed.action == "--cuda-graph-max-bs-decode 8"


def test_layers_go_where_they_take_least_time() -> None:
    assert balanced([100, 100], [0, 0], 8) == [4, 4]
    assert balanced([100, 100], [0, 400], 8) == [6, 2]  # lm_head weighs as much as four layers
    assert balanced([100, 200], [0, 0], 9) == [6, 3]  # a slow GPU


def test_what_slots_hold_in_words() -> None:
    assert held([31, 1]) == "31 and 1"
    assert held([8, 0, 8, 0, 4]) == "2 slots of 8, 1 slot of 4, 2 empty"


@pytest.mark.parametrize(
    ("capture", "finding", "words"),
    [
        ("A", "micro_batch_cap", "holds back 16 waiting requests"),
        ("B", "greedy_slots", "slots of 31 and 1"),
        ("D", "cuda_graphs_off", "CUDA graphs are off"),
        ("M", "few_requests", "2 in the whole server"),
        ("Q", "host_span", "stage 0 is held up for 3.00 ms a visit in get_next_batch_to_run"),
    ],
)
def test_the_first_finding_of_a_real_capture(capture: str, finding: str, words: str) -> None:
    found = cast("list[dict[str, Any]]", report_of(real(capture)).document["findings"])
    assert found[0]["id"] == finding
    assert words in found[0]["title"]


def test_a_capture_without_a_pipeline_claims_no_gain() -> None:
    found = cast("list[dict[str, Any]]", report_of(real("F")).document["findings"])
    assert all(f["recoverable_fraction"] == 0 and f["predicted"] is None for f in found)


def test_prefill_alone_is_not_taken_for_few_requests() -> None:
    found = cast("list[dict[str, Any]]", report_of(real("G")).document["findings"])
    assert [f["id"] for f in found] == ["host_bound"]
    assert "--chunked-prefill-size" in found[0]["action"]

"""`traceana whatif`: one JSON document, words that fit a screen, refusals with a hint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from traceana.cli import run
from tracegen import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("pp2_decode", tmp_path_factory.mktemp("world")).folder


def test_one_document_on_stdout(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--set",
        "pp_max_micro_batch_size=16,max_running_requests=32",
        "--host",
        "0=+1ms",
        "--scale",
        "class:moe=0.9",
    ]
    assert run(["whatif", str(folder), *words, "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert set(document) == {"baseline", "predicted", "changes", "method", "calibration", "extrapolations"}
    assert set(document["baseline"]) == {"throughput_tokens_per_s", "source"}
    predicted = document["predicted"]
    assert {"throughput_tokens_per_s", "low", "high", "period_ns", "stages"} <= set(predicted)
    assert predicted["low"] < predicted["throughput_tokens_per_s"] < predicted["high"]
    assert [set(s) for s in predicted["stages"]] == [{"rank", "utilisation", "bubble_ns"}] * 2
    assert isinstance(predicted["period_ns"], int) and all(isinstance(s["bubble_ns"], int) for s in predicted["stages"])
    assert all(0 <= s["utilisation"] <= 1 for s in predicted["stages"])
    assert predicted["slots"] == [16, 16]
    assert document["changes"] == [
        "pp_max_micro_batch_size=16", "max_running_requests=32", "scale class:moe=0.9", "host 0=+1ms",
    ]  # fmt: skip
    assert document["extrapolations"]


def test_words_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["whatif", str(folder), "--remove", "fused_moe_kernel"]) == 0
    out = capsys.readouterr().out
    assert "predicted" in out and "range" in out and "utilisation" in out and "host dilation" in out


def test_without_changes_it_says_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["whatif", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["predicted"]["throughput_tokens_per_s"] == document["baseline"]["throughput_tokens_per_s"]


@pytest.mark.parametrize(
    "words",
    [
        ["--set", "pp_size=4"], ["--set", "pp_layer_partition=1,2,3"], ["--host", "7=+1ms"], ["--host", "zero=1"],
        ["--link", "0-9=2"], ["--remove", "no_such_kernel"], ["--remove", "["], ["--scale", "class:moe"],
        ["--set", "concurrency=2", "--set", "concurrency=3"], ["--remove", "cause:no_work"],
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_a_hint(
    folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["whatif", str(folder), *words, "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("traceana: error: ") and "\nhint: " in err


def test_unknown_options_are_wrong_usage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["whatif", str(folder), "--sett", "x=1"]) == 2
    assert run(["whatif", str(folder / "nowhere")]) == 2
    capsys.readouterr()

"""`traceana diff`: parts that sum to the change, gates, and words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from captures import real

from traceana.cli import run


@pytest.mark.parametrize(("left", "right"), [("A", "A"), ("A", "H"), ("H", "F")])
def test_parts_sum_to_the_change_to_the_nanosecond(left: str, right: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", str(real(left)), str(real(right)), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    for side in ("baseline", "candidate"):
        assert sum(p[f"{side}_ns"] for p in document["parts"]) == document["token_ns"][side]
    assert sum(p["change_ns"] for p in document["parts"]) == document["token_ns"]["change"]
    assert sum(document["split_ns"].values()) == document["token_ns"]["change"]
    assert document["significant"] is (left != right)


def test_gates(capsys: pytest.CaptureFixture[str]) -> None:
    same = str(real("demo"))
    assert run(["diff", same, same, "--fail-on", "throughput<-3%"]) == 0
    assert run(["diff", same, same, "--fail-on", "throughput<3%"]) == 3
    assert "gate failed: throughput<3%" in capsys.readouterr().err
    assert run(["diff", same, same, "--fail-on", "speed<3%"]) == 2
    assert run(["diff", same, "/nowhere", "--json"]) == 1
    # An empty word is no capture, not the current folder.
    assert run(["diff", ",", same]) == 2
    assert run(["diff", "", same]) == 2


def test_text_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    same = str(real("demo"))
    assert run(["diff", same, same]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) == 80
    assert any(line.startswith("sum = time per token") for line in lines)


def test_out_is_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = str(real("demo"))
    assert run(["diff", f"{same},{same}", same, "--json", "-o", str(tmp_path / "diff.json")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "diff.json").read_text(encoding="utf-8")) == document
    assert document["token_ns"]["change"] == 0
    assert document["baseline"]["tokens"] == 2 * document["candidate"]["tokens"]

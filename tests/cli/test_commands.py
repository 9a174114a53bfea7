"""The commands: exit status, what goes where, files whole or absent."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from traceana.cli import run
from traceana.demo_capture import demo_folder

PROBES = Path(__file__).resolve().parent.parent / "probes"


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """A copy of the bundled capture."""
    return Path(shutil.copytree(demo_folder(), tmp_path / "capture"))


def test_report_prints_answers_and_writes_files(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(capture)]) == 0
    out = capsys.readouterr().out
    assert "Is the pipe fed?" in out
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith(("Wrote", "Next")))
    files = {p.name for p in (capture / "report").iterdir()}
    assert files == {"report.html", "report.json", "merged.pftrace", "tables"}
    attribution = pl.read_parquet(capture / "report" / "tables" / "attribution.parquet")
    document = json.loads((capture / "report" / "report.json").read_text(encoding="utf-8"))
    bubbles = sum(s["bubble_ns"] for s in document["stages"])
    assert attribution.select((pl.col("end_ns") - pl.col("ts_ns")).sum()).item() == bubbles


def test_report_files_are_never_read_back(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(capture), "--json"]) == 0
    before = capsys.readouterr().out
    assert run(["report", str(capture)]) == 0
    capsys.readouterr()
    assert run(["report", str(capture), "--json"]) == 0
    assert capsys.readouterr().out == before


def test_json_is_one_document_with_every_key_and_no_files(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(capture), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert not (capture / "report").exists()
    assert set(document) >= {
        "schema_version", "traceana_version", "window", "clock", "stages", "blame", "micro_batches", "p2p", "moe",
        "cuda_graph", "gpu", "model", "server", "findings", "losses",
    }  # fmt: skip


def test_parsing_again_or_from_the_cache_gives_the_same_bytes(
    capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for extra in (["--no-cache"], [], []):
        assert run(["report", str(capture), "--json", *extra]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] == outputs[2]


def test_window_narrows_and_is_checked(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(capture), "--json", "--window", "10ms..60.5ms"]) == 0
    assert json.loads(capsys.readouterr().out)["window"]["duration_ns"] == 50_500_000
    assert run(["report", str(capture), "--json", "--window", "5"]) == 1
    assert "hint:" in capsys.readouterr().err
    assert run(["report", str(capture), "--json", "--window", "9s..10s"]) == 1
    assert "outside the common window" in capsys.readouterr().err


def test_gap_prints_its_chain(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(capture), "--gap", "1"]) == 0
    out = capsys.readouterr().out
    assert "waiting for the micro-batch of visit" in out
    assert "scheduler of rank" in out
    assert run(["report", str(capture), "--gap", "99"]) == 1


def test_check_names_ranks_and_clocks(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(capture)]) == 0
    out = capsys.readouterr().out
    assert "Usable: yes" in out
    assert "Clocks" in out


def test_strict_exits_3_on_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = PROBES / "05_ts_zero"
    assert run(["check", str(folder), "--no-cache"]) == 0
    assert run(["check", str(folder), "--no-cache", "--strict"]) == 3
    assert "gate failed" in capsys.readouterr().err


def test_merge_writes_one_trace(capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.pftrace.gz"
    assert run(["merge", str(capture), "-o", str(out)]) == 0
    assert out.read_bytes()[:2] == b"\x1f\x8b"
    assert str(out) in capsys.readouterr().out


def test_demo_runs_on_the_bundled_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["id"] == "micro_batch_cap"


@pytest.mark.parametrize("argv", [["report"], ["nonsense"], ["report", "/nowhere/at/all"], ["merge", "--args", "some"]])
def test_wrong_usage_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 2
    assert capsys.readouterr().out == ""


def test_a_folder_without_traces_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("traceana: error: ")
    assert "hint: " in err
    assert "Traceback" not in err


def test_help_imports_no_tables() -> None:
    code = "import sys; from traceana.cli import run; run(['--help']); sys.exit('polars' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "capture" in done.stdout


@pytest.mark.parametrize("kept", [0, 1])
def test_the_rank_that_a_dying_server_left_is_reported_alone(
    kept: int, capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What needs all stages is not made up from one: no round trip, and the first of two is not the last."""
    manifest = json.loads((capture / "manifest.json").read_text(encoding="utf-8"))
    (capture / manifest["ranks"][1 - kept]["file"]).unlink()
    manifest["ranks"][1 - kept] |= {"file": None, "state": "missing"}
    manifest["status"] = "partial"
    manifest["problems"].append(
        {"name": "server_died", "severity": "error", "rank": None, "count": 1, "detail": "gone"}
    )
    (capture / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert run(["report", str(capture), "--json", "--no-cache"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [s["pp_rank"] for s in document["stages"]] == [kept]
    assert {"server_died", "ranks_missing"} <= {row["name"] for row in document["losses"]}
    model = document["model"]
    assert set(model["terms_ns"]) == {"compute", "host"} | ({"last_stage_serial"} if kept == 1 else set())
    assert model["tau_ns"] == max(model["terms_ns"].values()) and model["binding_stage"] == kept
    assert model["needed_in_flight"] is None


def test_what_the_profile_cost_is_said_where_it_was_measured(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = capture / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for share, words in (
        (0.625, "decode ran at 62 % of its pace"),
        (0.97, "decode ran at 97 % of its pace"),
        (None, None),
    ):
        manifest["throughput"]["disturbance"] = share
        path.write_text(json.dumps(manifest), encoding="utf-8")
        assert run(["report", str(capture), "--no-files"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert ("of its pace" in out) is (words is not None) and (words or "") in out

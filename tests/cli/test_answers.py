"""Answers kept: the same bytes as computed, for the same files, options and code only, and nothing that breaks a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from traceana.cli import run
from traceana.cli.answers import answer_key, load_answer, save_answer
from traceana.demo_capture import demo_folder
from traceana.errors import SourceError
from traceana.sources.limits import Limits

ASKED = {"ranks": None, "window": None, "assume": None, "no_limits": False}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRACEANA_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_folder(), tmp_path / "capture"))


def answers(cache: Path) -> list[Path]:
    return sorted((cache / "answers").rglob("*.json"))


def test_a_kept_answer_is_the_computed_one_to_the_byte(
    capture: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["report", str(capture), "--json", "--no-cache"]) == 0
    computed = capsys.readouterr().out
    assert not answers(cache)
    assert run(["report", str(capture), "--json"]) == 0
    assert capsys.readouterr().out == computed
    [kept] = answers(cache)
    with monkeypatch.context() as m:
        m.setattr("traceana.pipeline.analyse", None)  # to compute it would fail
        assert run(["report", str(capture), "--json"]) == 0
        assert capsys.readouterr().out == computed
        assert run(["report", str(capture), "--json", "--strict"]) == 0
        assert capsys.readouterr().out == computed
    sound = kept.read_bytes()
    kept.write_bytes(sound[:-9] + b"4" + sound[-8:])
    assert run(["report", str(capture), "--json"]) == 0  # damaged: computed and kept again
    assert capsys.readouterr().out == computed
    assert kept.read_bytes() == sound


def test_a_kept_answer_fails_the_gate_too(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = answer_key(capture, ASKED)
    assert key is not None
    row = {"name": "gz_truncated", "severity": "warning", "rank": 0, "count": 1, "detail": "too short"}
    save_answer(key, json.dumps({"losses": [row]}))
    assert run(["report", str(capture), "--json"]) == 0
    assert run(["report", str(capture), "--json", "--strict"]) == 3
    assert "1 losses of severity warning or error: gz_truncated" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--ranks", "0"], ["--window", "1ms..9ms"], ["--no-limits"], ["--engine", "nothing"]])
def test_another_question_has_another_answer(
    capture: Path, more: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = answer_key(capture, ASKED)
    assert key is not None
    save_answer(key, '{"losses": []}')

    def asked(*_: object) -> None:
        raise SourceError("computed")

    monkeypatch.setattr("traceana.pipeline.analyse", asked)
    assert run(["report", str(capture), "--json"]) == 0
    assert run(["report", str(capture), "--json", *more]) == 1
    assert "computed" in capsys.readouterr().err


def test_every_file_that_a_report_looks_at_is_in_the_key(capture: Path, tmp_path: Path) -> None:
    from traceana.sources.folder import list_folder

    (capture / "server").mkdir(exist_ok=True)
    (capture / "server" / "more.log").write_text("nothing yet")
    seen = {answer_key(capture, {})}
    listing = list_folder(capture, Limits())
    for path in (*listing.traces, *listing.beside):
        path.write_bytes(path.read_bytes() + b" ")
        seen.add(answer_key(capture, {}))
    assert len(seen) == 1 + len(listing.traces) + len(listing.beside)
    (capture / "ranks" / "link").symlink_to(tmp_path / "elsewhere")
    seen.add(answer_key(capture, {}))
    (capture / "new.txt").write_text("")
    seen.add(answer_key(capture, {}))
    seen.add(answer_key(capture, {"window": "1ms..2ms"}))
    assert None not in seen
    assert len(seen) == 4 + len(listing.traces) + len(listing.beside)


def test_a_capture_that_was_killed_is_read_from_where_the_server_wrote(
    capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(capture), "--json", "--no-cache"]) == 0
    whole = json.loads(capsys.readouterr().out)
    for name in ("incoming-1", "incoming-2", "incoming-3"):  # a throw-away profile, the capture's own, an empty one
        (capture / "incoming" / name).mkdir(parents=True)
    before = answer_key(capture, ASKED)
    (capture / "incoming" / "incoming-1" / "old.json").write_text('{"traceEvents": []}')
    assert answer_key(capture, ASKED) != before
    assert run(["report", str(capture), "--json", "--no-cache"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"] == whole["stages"]  # what was brought in is what counts
    for path in sorted((capture / "ranks").iterdir()):
        path.rename(capture / "incoming" / "incoming-2" / path.name)
    manifest = json.loads((capture / "manifest.json").read_text())
    (capture / "manifest.json").write_text(json.dumps({**manifest, "status": "running", "ranks": []}))
    assert run(["report", str(capture), "--json", "--no-cache"]) == 0
    left = json.loads(capsys.readouterr().out)
    assert left["stages"] == whole["stages"]
    assert [(row["count"], row["severity"]) for row in left["losses"] if row["name"] == "traces_not_brought_in"] == [
        (2, "info")
    ]


def test_what_a_report_writes_changes_no_key(capture: Path) -> None:
    before = answer_key(capture, {})
    (capture / "report").mkdir()
    (capture / "report" / "report.json").write_text("{}")
    assert answer_key(capture, {}) == before


def test_other_code_has_other_keys(capture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = answer_key(capture, {})
    monkeypatch.setattr("traceana.cli.answers.code_stamp", lambda: "another")
    assert answer_key(capture, {}) not in (None, before)


def test_where_nothing_can_be_kept_nothing_breaks(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file, not a folder")
    save_answer("0" * 64, "{}")
    assert load_answer("0" * 64) is None
    assert answer_key(cache.parent / "absent", {}) is None
    assert answer_key("s3://bucket/capture", {}) is None
    monkeypatch.setenv("TRACEANA_CACHE_DIR", "s3://bucket/cache")
    assert answer_key(cache.parent, {}) is None


def test_a_kept_answer_needs_no_library(capture: Path) -> None:
    key = answer_key(capture, ASKED)
    assert key is not None
    save_answer(key, '{"losses": []}')
    code = (
        "import sys; from traceana.cli import run; code = run(sys.argv[1:]); "
        "print([m for m in ('numpy', 'polars', 'pyarrow', 'rich') if m in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(capture), "--json"], capture_output=True, text=True, env=os.environ
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, '{"losses": []}\n[]\n', "")

"""`traceana capture`, and the recorder alone, from the command line: arguments to exit status, stdout and stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from fake_server import FakeServer, Traps

from traceana.cli.capture import command
from traceana_capture.errors import CaptureError
from traceana_capture.options import OPTIONS, CaptureOptions, parse_arguments

BOTH = pytest.mark.parametrize("program", ["traceana.cli", "traceana_capture"])
QUICK = ["--load", "concurrency=2,input=4,output=8", "--steps", "4", "--windows", "0", "--throw-away", "no"]


def run(program: str, *words: str, tmp: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from traceana.cli import main; main()" if program == "traceana.cli" else ""
    start = [sys.executable, "-c", code] if code else [sys.executable, "-m", program]
    environment = {**os.environ, "TMPDIR": str(tmp)}
    return subprocess.run([*start, "capture", *words], capture_output=True, text=True, env=environment, timeout=60)


@BOTH
def test_a_capture_prints_one_document_and_nothing_else(tmp_path: Path, program: str) -> None:
    with FakeServer() as fake:
        done = run(
            program, "--url", fake.url, "--ranks", "0-1", "-o", str(tmp_path / "cap"), *QUICK, "--json", tmp=tmp_path
        )
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["status"] == "complete"
    assert document == json.loads((tmp_path / "cap" / "manifest.json").read_text())


@BOTH
def test_a_person_gets_a_few_lines(tmp_path: Path, program: str) -> None:
    with FakeServer(traps=Traps(absent=frozenset({1}), late_s={0: 0.1})) as fake:
        words = ["--url", fake.url, "--ranks", "0", "-o", str(tmp_path / "cap"), *QUICK, "-v"]
        done = run(program, *words, tmp=tmp_path)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == f"{tmp_path / 'cap'}: complete, traces of 1 of 1 ranks"
    assert "traceana: profiling 4 steps of 2 ranks" in done.stderr


@BOTH
def test_errors_are_two_lines_and_exit_1(tmp_path: Path, program: str) -> None:
    done = run(program, "--url", "http://127.0.0.1:9", "-o", str(tmp_path / "cap"), tmp=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    first, second = done.stderr.splitlines()
    assert first.startswith("traceana: error: no answer (") and first.endswith(": http://127.0.0.1:9/server_info")
    assert second == "hint: is the server up, and the URL right?"
    assert not (tmp_path / "cap").exists()


@BOTH
@pytest.mark.parametrize("words", [["--nonsense"], ["--steps", "x"], ["--profiler", "perf"]])
def test_usage_errors_exit_2(tmp_path: Path, program: str, words: list[str]) -> None:
    done = run(program, *words, tmp=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr


@BOTH
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "0-7"], "the server has 2 ranks, not 2, 3, 4, 5, 6, 7"),
        (["--load", "many"], "not a load"),
        (["--set", "tp_size=4"], "cannot be changed on a running server"),
        (["--set", "x"], "not KEY=VALUE"),
        (["--sweep", "pp_max_micro_batch_size"], "not KEY=A,B,C"),
        (["--profiler", "nsys"], "only record a server that it has started"),
        (["--steps", "0"], "steps and timeouts are positive"),
        (["--server-log", "/nowhere.log"], "no such log"),
        (["--hook"], "started without the hook"),
    ],
)
def test_bad_requests_say_so(tmp_path: Path, program: str, words: list[str], said: str) -> None:
    quick = [w for w in QUICK if not (words[0] == "--load" and w.startswith("conc"))]
    quick = quick[1:] if words[0] == "--load" else quick
    with FakeServer() as fake:
        done = run(program, "--url", fake.url, "-o", str(tmp_path / "cap"), *quick, *words, tmp=tmp_path)
        assert not fake.profiling and fake.lost_profiles == 0
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


@BOTH
def test_a_partial_capture_exits_1_and_names_the_rank(tmp_path: Path, program: str) -> None:
    with FakeServer(traps=Traps(truncated=frozenset({1}))) as fake:
        (tmp_path / "a").mkdir()
        words = ["--url", fake.url, "-o", str(tmp_path / "cap"), *QUICK, "--timeout", "4"]
        done = run(program, *words, tmp=tmp_path)
    assert done.returncode == 1
    assert "partial, traces of 1 of 2 ranks" in done.stdout and "missing: rank 1" in done.stdout
    assert "error: rank_truncated: rank 1 (PP1 TP0): truncated" in done.stdout


def test_both_command_lines_have_the_same_options() -> None:
    ours = {f for o in OPTIONS for f in o.flags}
    assert {f for p in command.params if isinstance(p, click.Option) for f in p.opts} == ours
    for option in OPTIONS:
        value = option.choices[-1] if option.choices else "1"
        words = [option.flags[0]] if option.flag else [option.flags[0], value]
        parsed = getattr(parse_arguments(words), option.name)
        assert parsed != getattr(CaptureOptions(), option.name) or option.choices


def test_the_command_after_the_dashes_is_kept_as_it_is() -> None:
    parsed = parse_arguments(["-o", "cap", "--", "python", "-m", "sglang.launch_server", "--port", "3", "--", "-x"])
    assert parsed.command == ("python", "-m", "sglang.launch_server", "--port", "3", "--", "-x") and parsed.out == "cap"
    with pytest.raises(CaptureError, match="no command after --"):
        parse_arguments(["-o", "cap", "--"])

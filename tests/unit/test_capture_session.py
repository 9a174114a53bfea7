"""Whole captures against the stand-in server: what is in the folder, and how the server is left."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer, Traps

from traceana_capture import driver, facts, incoming
from traceana_capture.errors import CaptureError
from traceana_capture.options import CaptureOptions

LOAD = "concurrency=4,input=4,output=12"
FAKE = str(Path(__file__).parent.parent / "fake_server.py")


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield


def options(fake: FakeServer, out: Path, **values: Any) -> CaptureOptions:
    usual = CaptureOptions(
        url=fake.url, url_given=True, out=str(out), load=LOAD, steps=6, windows=1, throw_away="no", grace_s=0.6
    )
    return dataclasses.replace(usual, **values)


def capture(fake: FakeServer, out: Path, **values: Any) -> Mapping[str, Any]:
    ((folder, document),) = driver.capture(options(fake, out, **values), say=lambda text: None)
    assert json.loads((folder / "manifest.json").read_text()) == json.loads(json.dumps(document, default=str))
    return document


def problems(document: Mapping[str, Any]) -> dict[str, str]:
    return {p["name"]: p["severity"] for p in document["problems"]}


def test_an_attached_capture_is_complete_and_says_all(tmp_path: Path) -> None:
    with FakeServer(traps=Traps(merged=True, profiled_step_factor=2.0)) as fake:
        load = "concurrency=4,input=4,output=150"
        document = capture(fake, tmp_path / "cap", throw_away="yes", ranks="0-1", steps=31, load=load)
        assert not fake.profiling and len(fake.written) == 4
    folder = tmp_path / "cap"
    assert document["status"] == "complete" and document["schema_version"] == 1
    assert [(r["rank"], r["pp_rank"], r["state"]) for r in document["ranks"]] == [
        (0, 0, "complete"),
        (1, 1, "complete"),
    ]
    assert all((folder / r["file"]).stat().st_size == r["bytes"] for r in document["ranks"])
    assert sorted(p.name for p in (folder / "ranks").iterdir()) == sorted(r["file"][6:] for r in document["ranks"])
    assert document["profile_request"]["num_steps"] == 32 and "steps_rounded" in problems(document)
    assert [p["throw_away"] for p in document["profiles"]] == [True, False]
    assert [w["name"] for w in document["windows"]] == ["steady_1", "after"]
    for window in document["windows"]:
        assert window["end_ns"] - window["start_ns"] >= 500_000_000
        assert window["decode_tokens"] > 0 and window["requests_ended"] > 0 and window["latency_ns"]["p50"] > 0
    assert document["steady_window"] == {k: document["windows"][0][k] for k in ("start_ns", "end_ns")}
    figures = document["throughput"]
    assert figures["source"] == "token times of one streaming client" and figures["loop_ns"]["inside_count"] >= 10
    assert figures["outside_tokens_per_s"] > 0 and figures["disturbance"] > 0
    client = json.loads((folder / "client.json").read_text())
    assert client["load"]["concurrency"] == 4 and all(r["status"] == 200 for r in client["requests"])
    assert {"server_info.json", "loads.json", "metrics_steady_1_start.txt", "metrics_after_end.txt"} <= {
        p.name for p in (folder / "server").iterdir()
    }
    assert [c["when"] for c in document["clock"]["hosts"]] == ["before", "during", "after"]
    assert not (folder / "incoming").exists() or "files_left_out" in problems(document)
    assert "sk-very-secret" not in "".join(p.read_text() for p in folder.rglob("*") if p.suffix in (".json", ".txt"))


@pytest.mark.parametrize(
    ("traps", "state", "problem"),
    [
        (Traps(absent=frozenset({1})), "missing", "rank_missing"),
        (Traps(truncated=frozenset({1})), "truncated", "rank_truncated"),
    ],
)
def test_a_rank_without_a_whole_file_makes_it_partial(tmp_path: Path, traps: Traps, state: str, problem: str) -> None:
    with FakeServer(traps=traps) as fake:
        document = capture(fake, tmp_path / "cap", windows=0)
    assert document["status"] == "partial" and problems(document)[problem] == "error"
    assert [r["state"] for r in document["ranks"]] == ["complete", state]
    assert driver.exit_status(CaptureOptions(), [document]) == 1
    assert ("missing: rank 1" in driver.summary(tmp_path, document)) is True


def test_only_the_selected_ranks_are_waited_for(tmp_path: Path) -> None:
    with FakeServer(traps=Traps(absent=frozenset({1}))) as fake:
        document = capture(fake, tmp_path / "cap", ranks="0", windows=0)
    assert document["status"] == "complete" and [r["rank"] for r in document["ranks"]] == [0]
    assert problems(document)["ranks_not_selected"] == "info"
    assert driver.exit_status(CaptureOptions(), [document]) == 0


def test_a_server_that_dies_in_mid_profile_leaves_a_manifest_that_says_so(tmp_path: Path) -> None:
    with FakeServer(traps=Traps(dies_after_steps=3)) as fake:
        document = capture(fake, tmp_path / "cap", windows=0)
    assert document["status"] == "failed" and problems(document)["server_died"] == "error"
    assert {r["state"] for r in document["ranks"]} == {"missing"}


def test_without_a_load_the_traffic_that_is_there_is_used(tmp_path: Path) -> None:
    over = threading.Event()
    with FakeServer() as fake:

        def traffic() -> None:
            while not over.is_set():
                fake.submit(20)
                over.wait(0.01)

        thread = threading.Thread(target=traffic)
        thread.start()
        document = capture(fake, tmp_path / "cap", load="none", windows=0)
        over.set()
        thread.join()
        assert not [p for p, _ in fake.asked if p == "/generate"]
    assert document["status"] == "complete" and document["load"]["steady"] is True
    assert not (tmp_path / "cap" / "client.json").exists()


def test_without_traffic_nothing_is_profiled(tmp_path: Path) -> None:
    with FakeServer() as fake, pytest.raises(CaptureError, match="the server has no traffic") as raised:
        capture(fake, tmp_path / "cap", load="none", steady_timeout=1.5)
    assert raised.value.hint and "--load concurrency" in raised.value.hint
    assert not [p for p, _ in fake.asked if p == "/start_profile"]
    assert json.loads((tmp_path / "cap" / "manifest.json").read_text())["status"] == "failed"


def test_no_folder_is_left_where_there_is_no_server(tmp_path: Path) -> None:
    with FakeServer() as fake:
        fake.die()
        with pytest.raises(CaptureError, match="no answer"):
            capture(fake, tmp_path / "cap")
    assert not (tmp_path / "cap").exists()


def test_a_folder_that_holds_something_is_never_written_into(tmp_path: Path) -> None:
    (tmp_path / "cap").mkdir()
    (tmp_path / "cap" / "mine").write_text("")
    with FakeServer() as fake, pytest.raises(CaptureError, match="exists and is not empty"):
        capture(fake, tmp_path / "cap")
    assert [p.name for p in (tmp_path / "cap").iterdir()] == ["mine"]


def test_a_disk_without_room_is_refused_before_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("usage", (), {"free": 1 << 20})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with FakeServer() as fake, pytest.raises(CaptureError, match="a full disk would end the server"):
        capture(fake, tmp_path / "cap", windows=0)
    assert not [p for p, _ in fake.asked if p == "/start_profile"]


def test_a_tight_disk_that_others_fill_costs_the_capture_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server writes elsewhere, and the traces stay there; the manifest still finds its room."""
    monkeypatch.setattr(
        incoming, "_free", lambda path: 1 << (40 if Path(path).is_relative_to(tmp_path / "tmp") else 28)
    )
    monkeypatch.setattr(facts, "look_at", lambda server: facts.LocalServer(pid=os.getpid()))

    def full(source: Path, target: Path) -> None:
        if target.is_relative_to(tmp_path / "cap"):
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return rename(source, target)

    rename, replace = os.rename, os.replace
    with FakeServer() as fake:
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", full)
            with pytest.raises(CaptureError, match="no space left") as raised:
                capture(fake, tmp_path / "cap", windows=0)
        assert not fake.profiling and all(path.is_file() for path in fake.written) and len(fake.written) == 2
    folder = fake.written[0].parent
    assert folder.parent == tmp_path / "tmp" and raised.value.hint and str(fake.written[0]) in raised.value.hint
    document = json.loads((tmp_path / "cap" / "manifest.json").read_text())
    assert document["status"] == "failed" and problems(document)["capture_failed"] == "error"

    def filled(source: str | Path, target: str | Path) -> None:  # every small file but the manifest
        if Path(target).is_relative_to(tmp_path / "other") and Path(target).name != "manifest.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return replace(source, target)

    with FakeServer() as fake:
        monkeypatch.setattr(facts, "save_answers", lambda *rest: monkeypatch.setattr(os, "replace", filled))
        document = capture(fake, tmp_path / "other", windows=0)
        assert not fake.written[0].parent.exists()  # emptied and swept
    assert document["status"] == "complete" and problems(document)["file_not_written"] == "error"
    assert [r["state"] for r in document["ranks"]] == ["complete", "complete"]
    assert not (tmp_path / "other" / ".manifest-room").exists()


def test_a_setting_is_put_back_also_when_the_capture_fails(tmp_path: Path) -> None:
    with FakeServer(traps=Traps(profile_status=503), version="0.4.9") as fake:
        with pytest.raises(CaptureError, match="refused to profile"):
            capture(fake, tmp_path / "cap", set=("pp_max_micro_batch_size=3",), windows=0)
        assert fake.cap == 8
    document = json.loads((tmp_path / "cap" / "manifest.json").read_text())
    assert document["settings"] == {
        "set": {"pp_max_micro_batch_size": 3},
        "before": {"pp_max_micro_batch_size": 8},
        "restored": True,
    }


def test_a_sweep_is_a_capture_for_each_value(tmp_path: Path) -> None:
    with FakeServer() as fake:
        found = driver.capture(
            options(fake, tmp_path / "cap", sweep="pp_max_micro_batch_size=2,4", windows=0), say=print
        )
        assert fake.cap == 8
    assert [folder.name for folder, _ in found] == ["pp_max_micro_batch_size=2", "pp_max_micro_batch_size=4"]
    assert [d["settings"]["set"]["pp_max_micro_batch_size"] for _, d in found] == [2, 4]
    assert [d["server"]["micro_batch_cap"] for _, d in found] == [2, 4]
    for folder, document in found:  # every fact is of the server as it was recorded
        info = json.loads((folder / "server" / "server_info.json").read_text())
        cap = document["settings"]["set"]["pp_max_micro_batch_size"]
        assert info["internal_states"][0]["pp_max_micro_batch_size"] == cap
    assert all(d["status"] == "complete" and d["settings"]["restored"] for _, d in found)


def test_somebody_elses_profile_is_left_alone(tmp_path: Path) -> None:
    with FakeServer(traps=Traps(never_ends=True)) as fake:
        fake.start_profile({"output_dir": str(tmp_path / "theirs"), "num_steps": 5})
        with pytest.raises(CaptureError, match="somebody is profiling this server already"):
            capture(fake, tmp_path / "cap", windows=0)
        assert fake.profiling and fake.lost_profiles == 0


def start(fake: FakeServer, out: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "traceana_capture", "capture", "--url", fake.url, "-o", str(out), "-v"]
    command += ["--load", LOAD, "--windows", "0", "--throw-away", "no", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def wait_profiling(fake: FakeServer) -> None:
    end = time.monotonic() + 20
    while not fake.profiling:
        assert time.monotonic() < end, "no profile began"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_the_profiler_and_exits_130(tmp_path: Path, number: signal.Signals) -> None:
    with FakeServer(traps=Traps(never_ends=True)) as fake:
        with start(fake, tmp_path / "cap", "--set", "pp_max_micro_batch_size=4") as process:
            wait_profiling(fake)
            process.send_signal(number)
            process.communicate(timeout=30)
        assert process.returncode == 130 and not fake.profiling and fake.cap == 8
    document = json.loads((tmp_path / "cap" / "manifest.json").read_text())
    assert document["status"] == "interrupted" and not list((tmp_path / "cap").rglob("*.part"))
    whole = [r["file"] for r in document["ranks"] if r["state"] == "complete"]
    assert len(whole) == 2 and all((tmp_path / "cap" / f).is_file() for f in whole)


def test_an_impatient_ctrl_c_does_not_take_the_servers_folder_away(tmp_path: Path) -> None:
    """Seen with the real server: its scheduler dies if the folder is gone when the export has been made."""
    with FakeServer(traps=Traps(never_ends=True, export_s=1.5)) as fake:
        with start(fake, tmp_path / "cap") as process:
            wait_profiling(fake)
            for _ in range(3):
                process.send_signal(signal.SIGINT)
                time.sleep(0.2)
            process.communicate(timeout=30)
        assert process.returncode == 130
        time.sleep(2.0)
        before = fake.forwards
        fake.submit(20)
        time.sleep(0.5)
        assert fake.forwards > before and len(fake.written) == 2


def test_a_second_capture_is_refused_with_who_holds_it(tmp_path: Path) -> None:
    with FakeServer(traps=Traps(never_ends=True)) as fake, start(fake, tmp_path / "one") as first:
        wait_profiling(fake)
        with start(fake, tmp_path / "two") as second:
            _, said = second.communicate(timeout=30)
        assert second.returncode == 1
        assert f"another capture of this server is running (process {first.pid} of " in said
        assert str(tmp_path / "one") in said and "hint: " in said
        assert fake.profiling and not (tmp_path / "two").exists()
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=30)


def test_after_a_kill_the_next_capture_puts_the_server_right(tmp_path: Path) -> None:
    with FakeServer(traps=Traps(never_ends=True)) as fake:
        with start(fake, tmp_path / "one", "--set", "pp_max_micro_batch_size=4") as first:
            wait_profiling(fake)
            first.kill()
            first.communicate()
        assert fake.profiling and fake.cap == 4 and fake.forwards > 0  # the server lives on
        fake.traps.never_ends = False
        fake.traps.absent = frozenset()
        document = capture(fake, tmp_path / "two", windows=0)
        assert fake.cap == 8 and not fake.profiling
    assert document["status"] == "complete"
    detail = next(p["detail"] for p in document["problems"] if p["name"] == "earlier_capture_died")
    assert f"process {first.pid}" in detail and "restored {'pp_max_micro_batch_size': 8}" in detail
    assert json.loads((tmp_path / "one" / "manifest.json").read_text())["status"] == "running"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_a_server_started_by_the_command_is_stopped_and_its_log_kept_without_secrets(tmp_path: Path) -> None:
    port = free_port()
    command = (sys.executable, FAKE, "--port", str(port), "--start-s", "0.3")
    started = CaptureOptions(
        command=command, out=str(tmp_path / "cap"), load=LOAD, steps=6, windows=0, throw_away="no", grace_s=0.6
    )
    ((folder, document),) = driver.capture(started, say=lambda text: None)
    assert document["status"] == "complete" and document["command"] == list(command)
    assert document["server"]["started_by_capture"] and document["server"]["url"] == f"http://127.0.0.1:{port}"
    log = (folder / "server" / "server.log").read_text()
    assert "is ready" in log and "sk-very-secret" not in log and "api_key='***'" in log
    with socket.socket() as one:
        assert one.connect_ex(("127.0.0.1", port)) != 0


def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    command = (sys.executable, FAKE, "--port", str(free_port()), "--fails")
    with pytest.raises(CaptureError, match=r"ended before it was ready.*exit status 1"):
        driver.capture(CaptureOptions(command=command, out=str(tmp_path / "cap")), say=lambda text: None)
    assert "the model does not fit" in (tmp_path / "cap" / "server" / "server.log").read_text()


def test_a_port_in_use_is_not_started_on(tmp_path: Path) -> None:
    with FakeServer() as fake:
        port = fake.url.rsplit(":", 1)[1]
        command = (sys.executable, FAKE, "--port", port)
        with pytest.raises(CaptureError, match="a server runs there already"):
            driver.capture(CaptureOptions(command=command, out=str(tmp_path / "cap")), say=lambda text: None)


def test_nsys_needs_a_command(tmp_path: Path) -> None:
    with FakeServer() as fake, pytest.raises(CaptureError, match="only record a server that it has started"):
        capture(fake, tmp_path / "cap", profiler="nsys")


NSYS = """#!/bin/sh
last() { for a in "$@"; do case "$a" in --output=*) out="${a#--output=}";; *.nsys-rep) in="$a";; esac; done; }
mode=$1; shift; last "$@"
if [ "$mode" = export ]; then cp "$in" "$out"; exit; fi
case "$TRACEANA_CAPTURE_NVTX" in 1) ;; *) exit 9;; esac
cp "${0%/*}/database" "$out.nsys-rep"
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


def test_both_profilers_record_two_passes_into_one_folder(tmp_path: Path) -> None:
    nsys = tmp_path / "nsys"
    nsys.write_text(NSYS)
    nsys.chmod(0o755)
    with contextlib.closing(sqlite3.connect(tmp_path / "database")) as export:
        export.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        export.execute("INSERT INTO StringIds VALUES (1, 'launch --api-key topsecretkey')")
        export.commit()
    command = (sys.executable, FAKE, "--port", str(free_port()), "--start-s", "0")
    both = CaptureOptions(
        command=command, out=str(tmp_path / "cap"), load=LOAD, steps=6, windows=1, throw_away="no", grace_s=0.6,
        profiler="both", nsys=str(nsys),
    )  # fmt: skip
    ((folder, document),) = driver.capture(both, say=lambda text: None)
    assert document["status"] == "complete" and [r["state"] for r in document["ranks"]] == ["complete", "complete"]
    assert [p["via"] for p in document["profiles"]] == ["http"] and all(
        (folder / r["file"]).is_file() for r in document["ranks"]
    )
    second = document["nsys_pass"]
    assert [p["via"] for p in second["profiles"]] == ["nsys"] and second["status"] == "complete"
    assert b"topsecretkey" not in (folder / "nsys" / "report.sqlite").read_bytes()
    assert (tmp_path / "cap.private" / "report.nsys-rep").is_file() and not (folder / ".nsys-pass").exists()
    assert "without the profiler" in driver.summary(folder, document)
    assert "under nsys, not recording," in driver.summary(folder, second) and "measured_under_nsys" in problems(second)


def test_strict_is_a_gate() -> None:
    warned = {"status": "complete", "problems": [{"severity": "warning"}]}
    told = {"status": "complete", "problems": [{"severity": "info"}]}
    gate = CaptureOptions(strict=True)
    assert [driver.exit_status(gate, [d]) for d in (warned, told)] == [3, 0]
    assert driver.exit_status(CaptureOptions(), [warned]) == 0

"""nsys: found or said what to install, started around the server, its export without secrets."""

from __future__ import annotations

import shutil
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from traceana_capture.driver import prepare
from traceana_capture.errors import CaptureError
from traceana_capture.hook import ENVIRONMENT as HOOK
from traceana_capture.nsys import NsysRecording, find_nsys, mask_export, under_nsys
from traceana_capture.nvtx import ENVIRONMENT as NVTX
from traceana_capture.options import CaptureOptions

# What `nsys export` and `QdstrmImporter` do, as far as a capture can see it.
PROGRAM = """#!/bin/sh
case "$1" in
export)
  for a in "$@"; do case "$a" in --output=*) out="${a#--output=}";; *.nsys-rep) in="$a";; esac; done
  cp "$in" "$out";;
*) exit 3;;
esac
"""
IMPORTER = '#!/bin/sh\ncp "$2" "$4"\n'


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def database(path: Path) -> Path:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
    connection.execute("CREATE TABLE META_DATA_CAPTURE (name TEXT, value TEXT)")
    connection.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER)")
    environment = (
        "HOME=/root\nHF_TOKEN=hf_abcdefghijklmnopqrstuvwx\nNCCL_DEBUG=INFO\nAWS_ACCESS_KEY_ID=AKIAABCDEFGHIJKLMNOP\n"
    )
    texts = [environment, "fused_moe_kernel", "python -m sglang --api-key topsecretkey --port 3"]
    connection.executemany("INSERT INTO StringIds VALUES (?, ?)", list(enumerate(texts)))
    connection.executemany(
        "INSERT INTO META_DATA_CAPTURE VALUES (?, ?)", [("ENV:HF_TOKEN", "plainvalue"), ("ENV:LANG", "C.UTF-8")]
    )
    connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 2)")
    connection.commit()
    connection.close()
    return path


def test_an_absent_nsys_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for given in (None, "/nowhere/nsys"):
        with pytest.raises(CaptureError, match="nsys is not here") as raised:
            find_nsys(given)
        assert raised.value.hint and "install Nsight Systems" in raised.value.hint


def test_the_command_runs_under_nsys_with_graphs_as_nodes() -> None:
    words = under_nsys("/opt/nsys", Path("/private/report"), ["python", "-m", "sglang.launch_server"])
    assert words[:2] == ["/opt/nsys", "profile"] and words[-3:] == ["python", "-m", "sglang.launch_server"]
    assert {"--cuda-graph-trace=node", "--capture-range=cudaProfilerApi", "--output=/private/report"} <= set(words)


def test_an_export_loses_its_secrets_and_nothing_else(tmp_path: Path) -> None:
    path = database(tmp_path / "a.sqlite")
    assert mask_export(path) == 3
    raw = path.read_bytes()
    for secret in (b"hf_abcdefghij", b"AKIAABCDEF", b"topsecretkey", b"plainvalue", b"HOME=/root"):
        assert secret not in raw
    connection = sqlite3.connect(path)
    values = [r[0] for r in connection.execute("SELECT value FROM StringIds ORDER BY id")]
    assert values == ["NCCL_DEBUG=INFO", "fused_moe_kernel", "python -m sglang --api-key *** --port 3"]
    rows = list(connection.execute("SELECT * FROM META_DATA_CAPTURE"))
    assert rows == [("ENV:HF_TOKEN", "***"), ("ENV:LANG", "C.UTF-8")]
    assert list(connection.execute("SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL")) == [(1, 2)]
    connection.close()
    assert mask_export(path) == 0


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").write_bytes(b"SQLite format 3\0" + b"x" * 500)
    with pytest.raises(CaptureError, match="cannot be masked"):
        mask_export(tmp_path / "a.sqlite")


@pytest.mark.parametrize("imported", [False, True])
def test_a_report_becomes_an_export_in_the_capture(tmp_path: Path, imported: bool) -> None:
    nsys = program(tmp_path / "nsight" / "target-linux-x64" / "nsys", PROGRAM)
    private, folder = tmp_path / "private", tmp_path / "cap"
    private.mkdir()
    if imported:
        program(tmp_path / "nsight" / "host-linux-x64" / "QdstrmImporter", IMPORTER)
        shutil.move(database(tmp_path / "r"), private / "report.qdstrm")
    else:
        shutil.move(database(tmp_path / "r"), private / "report.nsys-rep")
    recording = NsysRecording(str(nsys), private, folder, pause=lambda s: None)
    recording.export()
    assert recording.document["export"] == "nsys/report.sqlite"
    assert b"topsecretkey" not in (folder / "nsys" / "report.sqlite").read_bytes()
    assert b"topsecretkey" in (private / "report.nsys-rep").read_bytes()  # the report itself stays outside the capture
    assert not list(folder.rglob("*.nsys-rep"))


def test_what_is_missing_for_the_export_is_named(tmp_path: Path) -> None:
    nsys = program(tmp_path / "nsight" / "target-linux-x64" / "nsys", PROGRAM)
    private = tmp_path / "private"
    private.mkdir()
    recording = NsysRecording(str(nsys), private, tmp_path / "cap", pause=lambda s: None)
    with pytest.raises(CaptureError, match="left no report"):
        recording.export()
    (private / "report.qdstrm").write_bytes(b"x")
    with pytest.raises(CaptureError, match="no importer here") as raised:
        recording.export()
    assert raised.value.hint and "QdstrmImporter" in raised.value.hint
    (private / "report.nsys-rep").write_bytes(b"x")
    broken = NsysRecording(
        str(program(tmp_path / "broken", "#!/bin/sh\necho no >&2; exit 1\n")), private, tmp_path, pause=print
    )
    with pytest.raises(CaptureError, match="failed: no"):
        broken.export()


def test_a_server_under_nsys_says_its_spans(tmp_path: Path) -> None:
    nsys = str(program(tmp_path / "nsys", PROGRAM))
    server = ["python", "-m", "sglang.launch_server"]
    plain = CaptureOptions(command=tuple(server), profiler="torch")
    assert prepare(plain, tmp_path / "cap", tmp_path / "p") == (server, {}, None)
    under = replace(plain, profiler="nsys", nsys=nsys)
    command, environment, control = prepare(under, tmp_path / "cap", tmp_path / "p")
    assert command[0] == nsys and command[-3:] == server and control is None  # nsys records, not the hook
    assert environment[NVTX] == "1" and Path(environment[HOOK]).is_dir()
    assert str(tmp_path / "p" / "site") in environment["PYTHONPATH"].split(":")
    assert prepare(replace(plain, hook=True), tmp_path / "cap", tmp_path / "p")[2] == tmp_path / "p" / "hook"

"""Captures made to do harm: names that act, files that unpack to gigabytes, paths and links that lead elsewhere."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import kineto_files as kf
import polars as pl
import pytest

from traceana.cli import run
from traceana.sources.limits import Limits
from traceana.tables import read
from traceana.tables.read import read_capture

EVENTS = [kf.launch(0, 5, 1), kf.kernel("k", 10, 50, 1)]
NAME = '\x1b]0;owned\x07\x1b[2J</script><script>alert(1)</script>\u202egnp.exe=HYPERLINK("http://x")'
ACTS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def hostile(capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The capture with every name that a writer chooses replaced: kernels, processes, files, arguments, manifest."""
    folder = tmp_path_factory.mktemp("hostile") / "\x1b[31mc"
    (folder / "trace").mkdir(parents=True)
    for path in sorted((capture / "trace").iterdir()):
        document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        for event in document["traceEvents"]:
            if event.get("cat") == "kernel" and "nccl" not in event["name"]:
                event["name"] = NAME
            if event.get("name") == "process_name":
                event["args"] = {"name": NAME + event["args"]["name"]}
        (folder / "trace" / path.name).write_bytes(gzip.compress(json.dumps(document).encode()))
    (folder / f"server\x1b[2J{NAME[:8]}.log").write_text(NAME * 9)
    problem = {"name": NAME, "severity": "warning", "rank": 0, "count": 1, "detail": NAME}
    listed = {"rank": 0, "file": "../../../../etc/passwd", "host": NAME}
    manifest = {
        "schema_version": 1,
        "command": [NAME],
        "problems": [problem],
        "ranks": [listed],
        "versions": {NAME: NAME},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    "argv", [["report"], ["check"], ["check", "--strict"], ["merge"], ["report", "--gap", "1"], ["whatif"], ["diff"]]
)
def test_names_cannot_act_on_a_terminal(
    hostile: Path, argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *rest = argv
    out = ["-o", str(tmp_path / "r\x1b[2J")] if command in ("report", "merge") else []
    also = [str(hostile)] if command == "diff" else []
    assert run([command, str(hostile), *also, *rest, *out]) in (0, 1, 3)
    told = capsys.readouterr()
    assert told.out + told.err
    assert not ACTS.search(told.out) and not ACTS.search(told.err)


def test_names_are_text_in_the_page_and_data_in_the_files(hostile: Path, tmp_path: Path) -> None:
    assert run(["report", str(hostile), "-o", str(tmp_path / "r")]) == 0
    page = (tmp_path / "r" / "report.html").read_text()
    assert "<script>alert" not in page and "\x1b" not in page and "\u202e" not in page
    # Nothing that a spreadsheet would open and run: tables are typed columns, in Parquet only.
    assert {p.suffix for p in (tmp_path / "r").rglob("*") if p.is_file()} == {".html", ".json", ".pftrace", ".parquet"}
    assert pl.read_parquet(tmp_path / "r" / "tables" / "losses.parquet").height


def test_a_manifest_leads_nowhere(hostile: Path) -> None:
    capture = read_capture(hostile, cache=False)
    assert [r.info.file.parent for r in capture.ranks] == [hostile / "trace"] * 2
    [row] = capture.losses.filter(name="listed_trace_missing").to_dicts()
    assert row["severity"] == "warning" and "passwd" in row["detail"] and "root:" not in row["detail"]


@pytest.mark.parametrize("kind", ["ratio", "size"])
def test_a_gz_bomb_is_refused_and_the_option_reads_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = kf.text(EVENTS, kf.header()).replace('"traceName"', " " * (8 << 20) + '"traceName"')
    (tmp_path / "rank0.json.gz").write_bytes(gzip.compress(text.encode()))
    small = {"ratio": Limits(ratio_from_bytes=1 << 20), "size": Limits(text_bytes=1 << 20)}[kind]
    monkeypatch.setattr(read, "Limits", partial(lambda limits: limits, small))
    assert run(["check", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "hint: " in told and "--no-limits" in told
    assert run(["diff", str(tmp_path), str(tmp_path)]) == 1
    assert capsys.readouterr().err == told
    assert run(["diff", str(tmp_path), str(tmp_path), "--no-limits"]) == 1
    assert "no decode forward" in capsys.readouterr().err  # it was read
    assert run(["check", str(tmp_path), "--no-limits"]) == 0


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kf.write(tmp_path / "out" / "rank1.json", EVENTS, kf.header(1, 2))
    (tmp_path / "out" / "server.log").write_text("[2026-11-29 10:00:00] secret\n")
    kf.write(tmp_path / "x" / "rank0.json", EVENTS, kf.header(0, 2))
    for name in ("rank1.json", "server.log"):
        (tmp_path / "x" / name).symlink_to(tmp_path / "out" / name)
    (tmp_path / "x" / "server").symlink_to(tmp_path / "out")
    (tmp_path / "x" / "loop.json").symlink_to("loop.json")
    capture = read_capture(tmp_path / "x", cache=False)
    assert [r.info.rank for r in capture.ranks] == [0]
    assert capture.losses.filter(name="link_left_out", severity="warning").height == 3
    assert run(["check", str(tmp_path / "x"), "--strict"]) == 3
    assert "link_left_out" in capsys.readouterr().out


def test_a_report_does_not_write_through_a_link(capture: Path, tmp_path: Path) -> None:
    """A capture from somebody else may hold report/ files that are links to files of ours."""
    folder = tmp_path / "c"
    shutil.copytree(capture, folder)
    (tmp_path / "mine").write_text("precious")
    (folder / "report").mkdir()
    (folder / "report" / "report.html").symlink_to(tmp_path / "mine")
    assert run(["report", str(folder)]) == 0
    assert (tmp_path / "mine").read_text() == "precious"
    assert not (folder / "report" / "report.html").is_symlink()


@pytest.mark.parametrize("place", ["report", "report/tables"])
def test_a_report_folder_that_is_a_link_out_is_refused(
    capture: Path, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "c"
    shutil.copytree(capture, folder)
    (tmp_path / "mine").mkdir()
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).symlink_to(tmp_path / "mine")
    assert run(["report", str(folder)]) == 1
    assert "hint: remove the link" in capsys.readouterr().err
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"rank": 2**31, "world_size": 2}, "rank is 2147483648"),
        ({"rank": 0, "world_size": 10**12}, "world_size is 1000000000000"),
        ("x", "distributedInfo is 'x'"),
    ],
)
def test_impossible_facts_count_as_unknown(tmp_path: Path, facts: object, said: str) -> None:
    kf.write(tmp_path / "rank0.json", EVENTS, {**kf.header(), "distributedInfo": facts})
    [rank] = read_capture(tmp_path, cache=False).ranks
    [row] = rank.losses.filter(name="header_fact_impossible").to_dicts()
    assert rank.info.rank == 0 and row["severity"] == "warning" and said in row["detail"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[1]", "manifest_broken"),
        ('{"schema_version": 1, "ra', "manifest_broken"),
        ('{"schema_version": 99}', "manifest_version_unknown"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_said(tmp_path: Path, text: str, name: str) -> None:
    kf.write(tmp_path / "rank0.json", EVENTS)
    (tmp_path / "manifest.json").write_text(text)
    assert name in read_capture(tmp_path, cache=False).losses.filter(severity="warning")["name"].to_list()


def test_numbers_in_file_names_stay_ranks(tmp_path: Path) -> None:
    kf.write(tmp_path / "rank99999999999.json", EVENTS, kf.header(None))
    kf.write(tmp_path / "1.5-TP-999999-PP-999999.trace.json", EVENTS, kf.header(None))
    capture = read_capture(tmp_path, cache=False)
    assert [r.info.rank for r in capture.ranks] == [0, 1]
    assert "rank_by_order" in capture.losses["name"].to_list()


def test_half_surrogates_reach_every_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        kf.text(EVENTS, kf.header()).replace('"k"', r'"k\ud800"').replace('"cat": "cuda_runtime"', r'"cat": "x\udfff"')
    )
    (tmp_path / "rank0.json").write_text(text)
    (tmp_path / "manifest.json").write_text(
        r'{"schema_version": 1, "ranks": [], "problems": [{"name": "\ud800", "severity": "info"}]}'
    )
    assert run(["report", str(tmp_path), "--json", "--no-cache"]) == 0
    json.loads(capsys.readouterr().out)
    assert run(["report", str(tmp_path), "--no-cache"]) == 0

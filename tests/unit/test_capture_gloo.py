"""The hook in a real torch.distributed job: two processes over gloo on the CPU, profiled, checked, and reported."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from traceana_capture.files import incomplete, parse_name
from traceana_capture.hook import ENVIRONMENT
from traceana_capture.hook_client import HookClient

JOB = str(Path(__file__).parent.parent / "gloo_pipeline.py")
SLOT = re.compile(r"traceana\.slot\[mb=(\d+) stage=(\d+) (\w+) bs=(\d+) n=(\d+)\]")
STEPS = 12

if importlib.util.find_spec("torch") is None:
    if os.environ.get("TRACEANA_NEEDS_TORCH"):
        raise RuntimeError("torch is needed: pip install torch==2.13.0")
    pytest.skip("torch is not installed: pip install torch==2.13.0 (a CPU build)", allow_module_level=True)


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[int, dict[str, Any]], list[Any]]]:
    """The job's folder after a recording of step times and one of a profile, what each rank said, and its steps."""
    folder = tmp_path_factory.mktemp("gloo")
    control = folder / "control"
    environment = {**os.environ, ENVIRONMENT: str(control), "GLOO_SOCKET_IFNAME": "lo"}
    jobs = [subprocess.Popen([sys.executable, JOB, str(r), str(folder)], env=environment) for r in (0, 1)]

    def died() -> str | None:
        return next((f"rank {i} ended" for i, j in enumerate(jobs) if j.poll() is not None), None)

    try:
        client = HookClient(control)
        client.record(
            [0, 1],
            {r: f"steps-{r}.json" for r in (0, 1)},
            folder,
            steps=STEPS,
            round_to=3,
            record="steps",
            answer_s=120,
        )
        assert len(client.wait([0, 1], timeout_s=60, died=died, tick=lambda: None)) == 2
        names = {r: f"1796009885.7412264-TP-0-PP-{r}.trace.json.gz" for r in (0, 1)}
        client.record([0, 1], names, folder / "ranks", steps=STEPS, round_to=3, record="profile", answer_s=60)
        done = client.wait([0, 1], timeout_s=120, died=died, tick=lambda: None)
        (folder / "over").touch()
        assert [j.wait(60) for j in jobs] == [0, 0]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    steps = [json.loads((folder / f"steps-{r}.json").read_text())["steps"] for r in (0, 1)]
    yield folder, done, steps


def events(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / "ranks" / f"1796009885.7412264-TP-0-PP-{rank}.trace.json.gz"
    document: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return document


def test_both_ranks_wrote_a_whole_trace_of_the_same_steps(capture: tuple[Path, dict[int, Any], list[Any]]) -> None:
    folder, done, _ = capture
    marks: list[list[tuple[str, ...]]] = []
    for rank in (0, 1):
        path = folder / "ranks" / done[rank]["file"]
        name = parse_name(path.name)
        assert incomplete(path) is None and name is not None and name.pp == rank
        document = events(folder, rank)
        assert document["distributedInfo"]["rank"] == rank and document["distributedInfo"]["world_size"] == 2
        found = [
            SLOT.fullmatch(e["name"]) for e in document["traceEvents"] if str(e.get("name")).startswith("traceana.slot")
        ]
        marks.append([m.groups() for m in found if m])
    assert [len(m) for m in marks] == [STEPS, STEPS]
    for rank, rows in enumerate(marks):
        ordinals = [int(n) for *_, n in rows]
        assert ordinals == list(range(ordinals[0], ordinals[0] + STEPS))
        assert [int(mb) for mb, *_ in rows] == [(n - 1) % 3 for n in ordinals]
        assert {(stage, mode, bs) for _, stage, mode, bs, _ in rows} == {(str(rank), "DECODE", "8")}
    assert marks[0][0][4] == marks[1][0][4]  # the same first step on both, by its number
    assert done[0]["steps"] == done[1]["steps"] == STEPS


def test_step_times_without_a_profiler(capture: tuple[Path, dict[int, Any], list[Any]]) -> None:
    _, _, steps = capture
    assert [r["ordinal"] for r in steps[0]] == [r["ordinal"] for r in steps[1]]
    for rows in steps:
        assert len(rows) == STEPS and all(
            r["start_ns"] <= r["launch_start_ns"] <= r["launch_end_ns"] <= r["end_ns"] for r in rows
        )


def test_the_report_reads_what_the_hook_wrote(capture: tuple[Path, dict[int, Any], list[Any]]) -> None:
    """End to end: exit 0, and both ranks are in it. There is no GPU here, so no busy time is expected."""
    folder, _, _ = capture
    done = subprocess.run(
        [sys.executable, "-c", "from traceana.cli import main; main()", "check", str(folder / "ranks"), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert sorted(r["rank"] for r in document["ranks"]) == [0, 1]

"""The in-process hook: agreement of ranks on one step, slot marks, and what it costs when it is off."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import types
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from traceana_capture import hook as hook_module
from traceana_capture import nvtx
from traceana_capture.errors import CaptureError
from traceana_capture.hook import ENVIRONMENT, RankHook
from traceana_capture.hook_client import HookClient, hook_environment


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_module, "_POLL_S", 0.01)
    monkeypatch.setattr(hook_module, "_ARMED_POLL_S", 0.01)
    monkeypatch.setattr("traceana_capture.hook_client._MARGIN_S", 0.2)
    monkeypatch.setitem(sys.modules, "torch", None)  # whatever is installed: these tests are about the protocol
    monkeypatch.delitem(sys.modules, "torch")


@contextmanager
def ranks(folder: Path, count: int, *, pace_s: float = 0.003) -> Generator[list[RankHook], None, None]:
    """Rank threads that run micro-batches of three slots, each at a pace of its own."""
    over = threading.Event()
    hooks = [RankHook(folder, rank=r, stage=r, place={"tp_rank": 0}) for r in range(count)]

    def engine(one: RankHook) -> None:
        slot = 0
        while not over.is_set():
            with one.slot(slot % 3, 8, "DECODE"), one.forward():
                time.sleep(pace_s * (1 + one.rank))
            slot += 1

    threads = [threading.Thread(target=engine, args=(h,)) for h in hooks]
    for thread in threads:
        thread.start()
    try:
        yield hooks
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_all_ranks_record_the_same_steps(tmp_path: Path) -> None:
    client = HookClient(tmp_path / "control")
    with ranks(tmp_path / "control", 3):
        names = {r: f"steps-rank-{r}.json" for r in range(3)}
        answers = client.record([0, 1, 2], names, tmp_path / "out", steps=6, round_to=3, record="steps")
        found = client.wait([0, 1, 2], timeout_s=20, died=lambda: None, tick=lambda: None)
    assert [answers[r]["stage"] for r in range(3)] == [0, 1, 2] and answers[0]["pid"] == os.getpid()
    assert {r: f["file"] for r, f in found.items()} == names
    steps = [json.loads((tmp_path / "out" / n).read_text())["steps"] for n in names.values()]
    first = steps[0][0]["ordinal"]
    assert first % 3 == 0  # a round begins
    for rows in steps:
        assert [r["ordinal"] for r in rows] == list(range(first, first + 6))
        assert [r["micro_batch"] for r in rows] == [(n - 1) % 3 for n in range(first, first + 6)]
        assert all(r["batch_size"] == 8 and r["mode"] == "DECODE" for r in rows)
        assert all(r["start_ns"] <= r["launch_start_ns"] <= r["launch_end_ns"] <= r["end_ns"] for r in rows)


def test_a_second_recording_follows_the_first(tmp_path: Path) -> None:
    with ranks(tmp_path / "control", 1):
        for attempt in range(2):
            client = HookClient(tmp_path / "control")
            client.record([0], {0: f"s{attempt}.json"}, tmp_path, steps=3, round_to=3, record="steps")
            assert client.wait([0], timeout_s=20, died=lambda: None, tick=lambda: None)[0]["file"] == f"s{attempt}.json"


def test_a_rank_without_the_hook_is_named(tmp_path: Path) -> None:
    client = HookClient(tmp_path / "control")
    with ranks(tmp_path / "control", 1), pytest.raises(CaptureError, match="the hook of rank 1 does not answer"):
        client.record([0, 1], {}, tmp_path, steps=3, round_to=3, record="steps", answer_s=0.5)


def test_a_profiler_that_cannot_start_leaves_the_engine_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(plan: dict[str, Any]) -> None:
        raise RuntimeError("CUPTI is taken")

    monkeypatch.setattr(hook_module, "_Profiler", broken)
    client = HookClient(tmp_path / "control")
    with ranks(tmp_path / "control", 1) as (one,):
        client.record([0], {0: "t.json.gz"}, tmp_path, steps=3, round_to=3, record="profile")
        found = client.wait([0], timeout_s=20, died=lambda: None, tick=lambda: None)
        before = one.ordinal
        time.sleep(0.1)
        assert one.ordinal > before
    assert found[0]["fault"] == "cannot start (CUPTI is taken)"


def test_a_disk_that_is_full_leaves_the_engine_running(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    client = HookClient(tmp_path / "control")
    with ranks(tmp_path / "control", 1) as (one,):
        client.record([0], {0: "s.json"}, tmp_path / "file" / "x", steps=3, round_to=3, record="steps")
        found = client.wait([0], timeout_s=20, died=lambda: None, tick=lambda: None)
        before = one.ordinal
        time.sleep(0.1)
        assert one.ordinal > before
    assert "cannot write" in found[0]["fault"]


def test_time_over_aborts_and_keeps_what_there_is(tmp_path: Path) -> None:
    client = HookClient(tmp_path / "control")
    with ranks(tmp_path / "control", 1):
        client.record([0], {0: "s.json"}, tmp_path, steps=100_000, round_to=3, record="steps")
        found = client.wait([0], timeout_s=1.0, died=lambda: None, tick=lambda: None)
    assert found[0]["file"] == "s.json" and json.loads((tmp_path / "s.json").read_text())["steps"]


def test_without_the_variable_there_is_no_hook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert RankHook.from_environment(rank=0, stage=0) is None
    hook_module.plugin()  # and SGLang's registry, which is not even installed here, is not touched
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    assert RankHook.from_environment(rank=3, stage=1) is not None


def test_an_idle_hook_hands_out_one_shared_context(tmp_path: Path) -> None:
    one = RankHook(tmp_path, rank=0, stage=0)
    assert one.slot(0, 8, "DECODE") is one.slot(1, 8, "DECODE") is one.forward()
    assert one.ordinal == 2


def test_the_environment_makes_an_entry_point_without_installing(tmp_path: Path) -> None:
    found = hook_environment(tmp_path / "control", tmp_path / "site", {"PYTHONPATH": "/theirs"})
    paths = found["PYTHONPATH"].split(os.pathsep)
    assert paths[0] == str(tmp_path / "site") and paths[-1] == "/theirs"
    code = """
from importlib.metadata import entry_points
print([e.load().__module__ for e in entry_points(group="sglang.srt.plugins")])
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], env=found, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['traceana_capture.hook']"


def test_the_plugin_wraps_sglangs_launch_and_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a registry that behaves as SGLang's: targets by dotted path, an AROUND hook gets the original first."""
    targets: dict[str, Any] = {}
    registry = types.ModuleType("sglang.srt.plugins.hook_registry")

    class HookRegistry:
        @staticmethod
        def register(target: str, function: Any, kind: str) -> None:
            assert kind == "around"
            targets[target] = function

    registry.HookRegistry = HookRegistry  # type: ignore[attr-defined]
    registry.HookType = types.SimpleNamespace(AROUND="around")  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    monkeypatch.setattr(hook_module, "_hook", None)
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    hook_module.plugin()
    assert len(targets) == 2
    monkeypatch.setenv(nvtx.ENVIRONMENT, "1")
    monkeypatch.setattr(nvtx, "install", lambda: None)
    hook_module.plugin()
    assert {t.rpartition(".")[2] for t in targets} == {
        "_pp_launch_batch",
        "run_batch",
        "_start_profile",
        "_stop_profile",
    }
    launch = targets["sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin._pp_launch_batch"]
    forward = targets["sglang.srt.managers.scheduler.Scheduler.run_batch"]

    scheduler = types.SimpleNamespace(ps=types.SimpleNamespace(pp_rank=1, tp_rank=1, pp_size=2, tp_size=2))
    batch = types.SimpleNamespace(
        reqs=[1, 2, 3], forward_mode=types.SimpleNamespace(name="EXTEND"), extend_num_tokens=96
    )
    assert hook_module._shape(batch) == (3, "EXTEND", 96)
    calls: list[Any] = []

    def run_batch(self: Any, *arguments: Any) -> str:
        calls.append(("run", self, *arguments))
        return "result"

    def pp_launch(self: Any, mb: int, what: Any, *rest: Any) -> Any:
        calls.append(("launch", self, mb, what, *rest))
        return forward(run_batch, self, what, "proxy")

    assert launch(pp_launch, scheduler, 1, batch, None, "meta") == "result"
    assert calls == [("launch", scheduler, 1, batch, None, "meta"), ("run", scheduler, batch, "proxy")]
    made = hook_module._hook
    assert made is not None and (made.rank, made.stage, made.ordinal) == (3, 1, 1)


def test_an_installed_traceana_is_a_plugin_that_does_nothing_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    found = re.search(r'\[project\.entry-points\."sglang\.srt\.plugins"\]\n(\w+) = "([\w.]+):(\w+)"', text)
    assert found is not None
    name, module, function = found.groups()
    # The same name as the one that a capture adds for a server without traceana: SGLang loads one of a name.
    hook_environment(tmp_path / "control", tmp_path / "site", {})
    added = next((tmp_path / "site").glob("*/entry_points.txt")).read_text()
    assert added == f"[sglang.srt.plugins]\n{name} = {module}:{function}\n"
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)  # an import would fail
    getattr(importlib.import_module(module), function)()

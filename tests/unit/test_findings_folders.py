"""Findings that rest on side files or on rare calls: each on a capture folder as such a server would leave it, and silent
on its twin."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest

from traceana.pipeline import Options, analyse
from tracegen import Load, Model, build_model
from tracegen.scenarios import MODELS

PLAIN = replace(MODELS["pp2_decode"], steps=12, load=Load(preload=(8, 8)), cap=16, max_running=32, lean=True)
SLOW_GPU = replace(PLAIN, gpu={1: 1_600})
TOKENS = 16 * 300  # about what 16 requests hold


def edit(file: Path, pattern: str, text: str) -> None:
    """Replace in one of the capture's files; the pattern must occur."""
    before = file.read_text()
    after, found = re.subn(pattern, text, before)
    assert found, f"{pattern} is not in {file.name}"
    file.write_text(after)


def throttled(folder: Path) -> None:
    """GPU 1 runs at 1,200 MHz, at its power limit."""
    samples = folder / "gpu_samples.csv"
    head, *rows = samples.read_text().splitlines()
    out = [f"{head},power_limit_mw"]
    for row in rows:
        cells = row.split(",")
        if cells[1] == "1":
            cells[4], cells[6] = "695000", "1200"
        out.append(",".join([*cells, "700000"]))
    samples.write_text("\n".join(out) + "\n")


def full_pool(folder: Path) -> None:
    """A KV pool of a little more than the running requests hold, and eight that wait for it; stage 1 has less memory."""
    log = folder / "server.log"
    edit(log, r"#tokens: \d+", f"#tokens: {TOKENS + 200}")
    edit(log, r"max_total_num_tokens=\d+", f"max_total_num_tokens={TOKENS + 200}")
    edit(log, r"(PP1\].*available_gpu_mem=)55.08", r"\g<1>30.08")
    edit(log, r"token usage: 0.\d\d", "token usage: 0.97")
    edit(log, r"#queue-req: 0", "#queue-req: 8")


def captures_while_serving(folder: Path) -> None:
    """Rank 0 captures a graph anew in the middle of its trace: two runtime calls in a gap of its main thread."""
    trace = next(iter(sorted(folder.glob("**/*PP-0*.trace.json.gz"))))
    document = json.loads(gzip.decompress(trace.read_bytes()))
    events = cast("list[dict[str, Any]]", document["traceEvents"])
    runs = [e for e in events if e.get("name") == "run_batch" and e.get("ph") == "X"]
    after = runs[len(runs) // 2]
    calls = [
        {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": after["pid"], "tid": after["tid"],
         "ts": after["ts"] + at, "dur": 1, "args": {"correlation": 900_000_000 + at}}
        for name, at in (("cudaStreamBeginCapture", 1), ("cudaStreamEndCapture", 3))
    ]  # fmt: skip
    document["traceEvents"] = events + calls
    trace.write_bytes(gzip.compress(json.dumps(document).encode(), 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@cache
def findings(folder: Path, model: str, change: Callable[[Path], None] | None) -> dict[str, dict[str, Any]]:
    made: Model = {"plain": PLAIN, "slow": SLOW_GPU}[model]
    name = f"{model}_{change.__name__ if change else 'as_it_is'}"
    world = build_model(made, folder / name, name=model)
    if change is not None:
        change(world.folder)
    found = analyse(world.folder, Options(cache=False)).document["findings"]
    return {f["id"]: f for f in cast("list[dict[str, Any]]", found)}


def test_a_gpu_that_is_throttled(folder: Path) -> None:
    found = findings(folder, "slow", throttled)["straggling_gpu"]
    assert (found["rank"], found["title"]) == (1, "The GPU of rank 1 runs at 61 % of the others' clock")
    assert "SM clock 1200 MHz on rank 1, 1980 on the others (median)" in found["evidence"]
    assert "it draws 695 W of a limit of 700 W" in found["evidence"]
    # The same stage as slow at the usual clock has more to do: that is another finding.
    other = findings(folder, "slow", None)
    assert "stage_imbalance" in other and "straggling_gpu" not in other


def test_kv_memory_that_holds_requests_back(folder: Path) -> None:
    found = findings(folder, "plain", full_pool)["kv_memory"]
    assert found["title"] == "KV memory is 97 % full and 8 requests wait for it"
    text = " / ".join(found["evidence"])
    assert f"token usage 0.97 of {TOKENS + 200} tokens, with 8 and 8 running" in text
    assert "stage 1: 19.3 GB of weights, 63.6 GB of KV, 0.04 GB of graphs, 30.1 GB free" in text
    assert "the one with the least memory, stage 1: 25 GB of stage 0 serve nothing" in text
    assert found["action"].startswith("--mem-fraction-static higher (30 GB are free on the fullest stage)")
    predicted = found["predicted"]
    assert sum(predicted["slots"]) == 24
    assert predicted["low"] <= predicted["throughput_tokens_per_s"] <= predicted["high"]
    assert "kv_memory" not in findings(folder, "plain", None)


def test_graphs_captured_while_serving(folder: Path) -> None:
    found = findings(folder, "plain", captures_while_serving)["cuda_graphs_recaptured"]
    assert found["title"] == "CUDA graphs are captured while serving: 1 capture in the window"
    assert "cuda_graphs_recaptured" not in findings(folder, "plain", None)

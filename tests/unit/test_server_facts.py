"""Server facts from excerpts of real recordings, and from small files written here."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from traceana import schema
from traceana.sources.server_info import arguments_of_command, arguments_of_log, layer_split, model_shape
from traceana.tables.capture import ServerFacts
from traceana.tables.server import assign_gpu_ranks, read_server

DATA = Path(__file__).parent.parent / "data" / "server"
COMMAND = "python -m sglang.launch_server --model-path m --pp-size 4 --max-running-requests 64 --api-key hunter2hunter2"


def facts_of(*paths: Path) -> Any:
    facts, _, _ = read_server(paths)
    assert facts is not None
    return facts.facts


def write(folder: Path, files: Mapping[str, object]) -> list[Path]:
    paths: list[Path] = []
    for name, content in files.items():
        path = folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        paths.append(path)
    return paths


def losses_of(*paths: Path) -> dict[str, int]:
    _, _, losses = read_server(paths)
    return dict(losses.select("name", "count").iter_rows())


@pytest.fixture
def capture() -> ServerFacts:
    facts, _, _ = read_server(list((DATA / "A").iterdir()))
    assert facts is not None
    return facts


def test_real_capture_scheduler(capture: ServerFacts) -> None:
    facts: Any = capture.facts
    assert (facts["pp_size"], facts["tp_size"], facts["async_depth"], facts["slots"]) == (2, 1, 0, 2)
    assert facts["max_running_requests"] == 16
    assert facts["micro_batch_cap"] == 8
    assert facts["cap_source"] == "auto: max_running_requests // pp_size"
    # 16 requests run, and every line says 8: the line counts one micro-batch.
    assert facts["running_per_slot"] == {"min": 8, "p50": 8, "max": 8, "histogram": [[8, 86]]}
    assert facts["queue"] == {"min": 16, "p50": 16, "max": 16}
    assert facts["kv"] == {"token_usage": 0.01, "tokens": 8128, "capacity": 1041718}
    assert [r["weight_gb"] for r in facts["memory_by_rank"]] == [19.39, 19.26]
    assert [r["kv_gb"] for r in facts["memory_by_rank"]] == [63.58, 63.58]
    assert facts["cuda_graph"] == {
        "enabled": True,
        "captured_sizes": [1, 2, 4, 8, 12, 16],
        "backend": "full",
        "prefill": False,
    }
    assert facts["nnodes"] == 1
    assert facts["disable_overlap"] is True
    assert facts["attention_backend"] == "triton"
    assert facts["versions"] == {"nccl": "2.28.9", "sglang": "0.5.16"}
    assert facts["model"]["experts"] == 64
    assert facts["layers_by_rank"] is None
    assert facts["pid_by_rank"] == [{"rank": 0, "pid": 817}, {"rank": 1, "pid": 818}]
    json.dumps(facts)


def test_real_capture_times(capture: ServerFacts) -> None:
    facts: Any = capture.facts
    assert facts["log_clock"] == {"resolution_ns": 10**9, "utc_offset_ns": 0, "utc_offset_source": "profile id"}
    runs = facts["profile"]["runs"]
    assert [r["started_ns"] for r in runs] == [1795969813 * 10**9] * 2
    assert [r["done_ns"] for r in runs] == [1795969814 * 10**9, 1795969815 * 10**9]
    assert facts["profile"]["request"]["num_steps"] == 30
    assert facts["steady_window_ns"] == [1795969803733694800, 1795969809751987500]
    clients = facts["clients"]
    assert (clients["count"], clients["failed"], clients["concurrency"]) == (72, 0, 16)
    assert clients["latency_ns_p50"] == 8443226100
    assert clients["latency_of"] == "answered in the steady window"
    assert capture.requests.get_column("start_ns")[0] == 1795969784161801000


def test_real_capture_throughput(capture: ServerFacts) -> None:
    facts: Any = capture.facts
    rate = facts["throughput"]
    assert rate["decode_lines"] == 79
    assert round(rate["decode"]) == 984
    assert rate["decode_spread"]["min"] == 880.08
    assert rate["decode_spread"]["max"] == 1041.74
    # (24055 - 18327) tokens in 6.0182927 s
    assert rate["decode_counter"] == (24055 - 18327) * 10**9 / (1795969809751987500 - 1795969803733694800)
    assert rate["decode_profiled"] == 707.47
    assert capture.decode_log.schema == schema.DECODE_LOG.polars_schema
    assert capture.prefill_log.get_column("new_tokens").sum() > 0
    assert set(capture.metrics.get_column("when")) == {0, 1}


# The figures of the same logs whole, to a token per second.
@pytest.mark.parametrize(
    ("name", "decode", "lines"),
    [
        ("B", 1906, 50), ("H", 1792, 51), ("H2", 1736, 62), ("I", 1817, 51), ("J", 1810, 51), ("O", 1755, 50),
        ("Q", 1631, 50), ("U", 1689, 51),
    ],
)  # fmt: skip
def test_real_decode_throughput(name: str, decode: int, lines: int) -> None:
    rate = facts_of(DATA / f"{name}.log")["throughput"]
    assert (round(rate["decode"]), rate["decode_lines"]) == (decode, lines)
    assert rate["source"].startswith("log: decode lines before the profile")


def test_two_profiles_by_stage() -> None:
    runs = facts_of(DATA / "J.log")["profile"]["runs"]
    assert [(r["pp_rank"], r["stage"]) for r in runs] == [(0, "DECODE"), (1, "DECODE"), (0, "EXTEND"), (1, "EXTEND")]
    assert [r["done_ns"] // 10**9 - 1795970700 for r in runs] == [31, 31, 34, 35]


def test_milliseconds_and_iterations() -> None:
    facts, _, _ = read_server([DATA / "X.log"])
    assert facts is not None
    clock: Any = facts.facts["log_clock"]
    assert clock["resolution_ns"] == 10**6
    first = facts.decode_log.row(0, named=True)
    assert first["ts_ns"] % 10**9 != 0 and first["ts_ns"] % 10**6 == 0
    assert facts.decode_log.get_column("iteration").null_count() == 0
    assert facts.decode_log.get_column("fwd_occupancy").null_count() == facts.decode_log.height  # `nan%`


def test_order_and_names_do_not_matter(tmp_path: Path) -> None:
    facts, samples, losses = read_server(sorted((DATA / "A").iterdir()))
    paths = [tmp_path / f"{i:x}.bin" for i in range(20)]
    files = sorted((DATA / "A").iterdir())
    random.Random(1).shuffle(files)
    copies = [Path(shutil.copy(file, path)) for file, path in zip(files, paths, strict=False)]
    again, samples_again, losses_again = read_server(copies)
    assert facts is not None and again is not None
    assert again.facts == facts.facts
    assert_frame_equal(again.decode_log, facts.decode_log)
    assert_frame_equal(again.metrics.drop("file"), facts.metrics.drop("file"))
    assert_frame_equal(samples_again, samples)
    assert losses_again.get_column("name").sort().to_list() == losses.get_column("name").sort().to_list()


def test_nothing_about_a_server(tmp_path: Path) -> None:
    assert read_server([])[0] is None
    paths = write(tmp_path, {"notes.txt": "hello", "other.json": {"a": 1}, "list.json": [1, 2], "empty": ""})
    facts, samples, losses = read_server(paths)
    assert facts is None
    assert samples.height == 0
    assert dict(losses.select("name", "count").iter_rows()) == {"file_empty": 1, "file_not_recognised": 3}


def test_command_alone(tmp_path: Path) -> None:
    text = f"SGLANG_PP_LAYER_PARTITION=10,20,20,10 HF_TOKEN=abc {COMMAND}"
    facts = facts_of(*write(tmp_path, {"command.txt": text}))
    assert (facts["pp_size"], facts["slots"], facts["max_running_requests"], facts["micro_batch_cap"]) == (4, 4, 64, 16)
    assert facts["layers_by_rank"] == [10, 20, 20, 10]
    assert facts["layers_source"] == "SGLANG_PP_LAYER_PARTITION"
    assert facts["model"]["layers"] == 60
    assert facts["environment"] == {"SGLANG_PP_LAYER_PARTITION": "10,20,20,10"}
    assert "hunter2" not in json.dumps(facts)
    assert facts["launch_command"].endswith("--api-key ***")
    assert facts["throughput"]["decode"] is None


@pytest.mark.parametrize(
    ("asked", "real", "cap", "source"),
    [
        (None, 16, 16, "auto: max_running_requests // pp_size"),
        (None, None, 16, "auto: max_running_requests // pp_size"),
        (4, 4, 4, "set"),
        (4, None, 4, "set"),
        (4, 2, 2, "set while the server ran"),
        (None, 9, 9, "set while the server ran"),
    ],
)
def test_who_set_the_cap(tmp_path: Path, asked: int | None, real: int | None, cap: int, source: str) -> None:
    state = {} if real is None else {"internal_states": [{"pp_max_micro_batch_size": real}]}
    info = {"pp_size": 4, "tp_size": 1, "pp_async_batch_depth": 1, "max_running_requests": 64} | state
    facts = facts_of(*write(tmp_path, {"x.json": info | {"pp_max_micro_batch_size": asked}}))
    assert (facts["micro_batch_cap"], facts["cap_source"], facts["slots"]) == (cap, source, 5)


def test_settings_that_changed_and_contradict(tmp_path: Path) -> None:
    info = {"pp_size": 2, "tp_size": 1, "max_running_requests": 16}
    later = info | {"internal_states": [{"pp_max_micro_batch_size": 4, "effective_max_running_requests_per_dp": 99}]}
    log = (DATA / "A" / "server.log").read_text()
    losses = losses_of(*write(tmp_path, {"a.json": info, "b.json": later}))
    assert losses["server_info_changed"] == 1
    _, _, rows = read_server(write(tmp_path, {"b.json": later | {"pp_size": 1}, "server.log": log}))
    details = rows.filter(pl.col("name") == "server_facts_conflict").get_column("detail").to_list()
    assert details == [
        "max_running_requests: {'log': 16, 'internal_states': 99, 'server_info': 16}",
        "pp_size 1, but the log has 2 stages",
    ]


def test_zone_of_the_log(tmp_path: Path) -> None:
    log = (DATA / "H.log").read_text()
    moved = log.replace("2026-11-29 16:", "2026-11-29 22:")
    facts = facts_of(*write(tmp_path, {"server.log": moved}))
    assert facts["log_clock"]["utc_offset_ns"] == 6 * 3600 * 10**9
    assert facts["profile"]["runs"][0]["started_ns"] == 1795970218 * 10**9
    untold = moved.replace("profile id: 1795970218.07838", "profile id: mine")
    paths = write(tmp_path, {"server.log": untold})
    assert facts_of(*paths)["log_clock"]["utc_offset_ns"] is None
    assert losses_of(*paths)["log_zone_unknown"] == 1


@pytest.mark.parametrize(
    ("beside", "source"), [("v1_loads.json", "/v1/loads"), ("client_requests.json", "client requests")]
)
def test_zone_of_the_log_without_a_profile(tmp_path: Path, beside: str, source: str) -> None:
    def later(match: re.Match[str]) -> str:
        return (datetime.fromisoformat(match[0]) + timedelta(hours=5, minutes=30)).isoformat(" ")

    log = (DATA / "A" / "server.log").read_text().replace("profile id: 17", "profile id: mine")
    moved = re.sub(r"2026-11-29 \d\d:\d\d:\d\d", later, log)
    facts = facts_of(DATA / "A" / beside, *write(tmp_path, {"server.log": moved}))
    clock = facts["log_clock"]
    assert (clock["utc_offset_ns"], clock["utc_offset_source"]) == (19800 * 10**9, source)
    assert facts["profile"]["runs"][0]["started_ns"] == 1795969813 * 10**9


def test_what_the_capture_recorded(tmp_path: Path) -> None:
    manifest = {
        "schema_version": 1,
        "ranks": [{"rank": r, "pid": 70 + r, "gpu": 1 - r, "host": "h"} for r in (0, 1)],
        "server": {"environment": {"SGLANG_PP_LAYER_PARTITION": "16,48"}},
        "command": ["python", "-m", "sglang.launch_server", "--pp-size", "2"],
        "windows": [
            {"name": f"steady_{i}", "start_ns": 0, "end_ns": 10**9 * i, "decode_tokens": 100 * i} for i in (1, 3)
        ],
        "throughput": {"disturbance": 0.96},
    }
    facts, samples, _ = read_server([DATA / "A" / "gpu_samples.csv", *write(tmp_path, {"m.json": manifest})])
    assert facts is not None
    told: Any = facts.facts
    assert (told["layers_by_rank"], told["hosts"]) == ([16, 48], ["h"])
    assert (told["throughput"]["decode"], told["throughput"]["prefill"]) == (100.0, None)
    assert told["throughput"]["counter_source"] == "2 windows that the recorder counted"
    assert told["throughput"]["profile_cost"] == {"disturbance": 0.96}
    assert told["pid_by_rank"] == [{"rank": 0, "pid": 70}, {"rank": 1, "pid": 71}]
    assert samples.select("gpu", "rank").unique().sort("gpu").rows() == [(0, 1), (1, 0)]


def test_what_a_log_says_of_an_earlier_capture_is_not_this_ones(tmp_path: Path) -> None:
    """Two captures of one server, the second with another cap: its log holds both."""

    def line(second: int, text: str) -> str:
        return f"[{datetime.fromtimestamp(1_796_000_000 + second, timezone.utc):%Y-%m-%d %H:%M:%S} PP0] {text}\n"

    def decode(second: int, running: int, rate: float, queue: int) -> str:
        return line(
            second,
            f"Decode batch, #running-req: {running}, #token: 9, token usage: 0.01, cuda graph: True, "
            f"gen throughput (token/s): {rate}, #queue-req: {queue}",
        )

    def profile(second: int) -> str:
        begun = f"Profiling starts for PP0. Traces will be saved to: /x (with profile id: {1_796_000_000 + second}.5)"
        return line(second, begun) + line(second + 1, "Stop profiling...") + line(second + 2, "Profiling done.")

    log = "".join([decode(1, 16, 900.0, 0), decode(2, 16, 901.0, 0), profile(3), decode(8, 16, 905.0, 0)])
    log += "".join([decode(20, 4, 400.0, 24), decode(21, 4, 402.0, 24), decode(22, 4, 404.0, 24), profile(24)])
    manifest: dict[str, object] = {
        "schema_version": 1, "ranks": [], "created_ns": 1_796_000_010 * 10**9,
        "steady_window": {"start_ns": 1_796_000_020 * 10**9, "end_ns": 1_796_000_023 * 10**9},
        "settings": {"set": {"pp_max_micro_batch_size": 4}},
    }  # fmt: skip
    info = {"pp_size": 2, "tp_size": 1, "max_running_requests": 32, "pp_max_micro_batch_size": 16}
    told = facts_of(*write(tmp_path, {"server.log": log, "m.json": manifest, "i.json": info}))
    assert (told["micro_batch_cap"], told["cap_source"]) == (4, "set while the server ran")
    assert (told["queue"]["p50"], told["running_per_slot"]["max"]) == (24, 4)
    assert (told["throughput"]["decode"], told["throughput"]["decode_lines"]) == (403.0, 2)
    assert [run["started_ns"] for run in told["profile"]["runs"]] == [1_796_000_024 * 10**9]
    # Without a manifest that says when the capture began, every line counts.
    whole = facts_of(*write(tmp_path, {"server.log": log, "m.json": manifest | {"created_ns": None}, "i.json": info}))
    assert (whole["queue"]["p50"], len(whole["profile"]["runs"])) == (0, 2)


def test_log_that_begins_inside_a_profile(tmp_path: Path) -> None:
    lines = (DATA / "H.log").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if "Stop profiling" in line)
    late = "[2026-11-29 16:37:05 PP0] Decode batch, #running-req: 16, #token: 9, token usage: 0.01, cuda graph: True, "
    text = "\n".join([*lines[start:], *[f"{late}gen throughput (token/s): {r}, #queue-req: 0" for r in (100.0, 200.0)]])
    facts, _, _ = read_server(write(tmp_path, {"server.log": text}))
    assert facts is not None
    rate: Any = facts.facts["throughput"]
    assert rate["source"] == "log: decode lines outside the profiles without a prefill between"
    assert "before" not in set(facts.decode_log.get_column("phase"))


def test_several_replicas_add_up(tmp_path: Path) -> None:
    line = "[2026-01-01 00:00:0{s} DP{d} PP{p}] Decode batch, #running-req: 4, gen throughput (token/s): {r}"
    rows = [line.format(s=s, d=d, p=p, r=100 * (d + 1) + s) for s in range(3) for d in (0, 1) for p in (0, 1)]
    rate = facts_of(*write(tmp_path, {"a.log": "\n".join(rows)}))["throughput"]
    assert rate["decode"] == 101.5 + 201.5


def test_older_lines(tmp_path: Path) -> None:
    text = (
        "[2025-03-01 10:00:00 TP0] Prefill batch. #new-seq: 1, #new-token: 7, #cached-token: 0, token usage: 0.00, "
        "#running-req: 0, #queue-req: 0, \n"
        "[2025-03-01 10:00:01 TP0] Decode batch. #running-req: 1, #token: 33, token usage: 0.00, "
        "gen throughput (token/s): 0.03, largest-len: 0, #queue-req: 0, \n"
        "[2025-03-01 10:00:02 TP0] Decode batch. #running-req: broken\n"
    )
    paths = write(tmp_path, {"a.log": text})
    facts, _, losses = read_server(paths)
    assert facts is not None
    assert (facts.decode_log.height, facts.prefill_log.height) == (1, 1)
    assert facts.decode_log.row(0, named=True)["cuda_graph"] is None
    assert dict(losses.select("name", "count").iter_rows())["log_batch_line_malformed"] == 1


def test_numbers_that_do_not_fit(tmp_path: Path) -> None:
    text = (
        "[9999-01-01 00:00:00 PP0] Decode batch, #running-req: 4, gen throughput (token/s): 10.0\n"
        "[2026-01-01 00:00:00 PP99999999999] Decode batch, #running-req: 4, gen throughput (token/s): 10.0\n"
        "[2026-01-01 00:00:00 PP0] Decode batch, #running-req: 99999999999999999999, gen throughput (token/s): 10.0\n"
        "[2026-01-01 00:00:00 PP0] Decode batch, #running-req: 4, gen throughput (token/s): 1e999\n"
        "[2026-01-01 00:00:00 PP0] Decode batch, #running-req: 4, gen throughput (token/s): 2.0\n"
    )
    paths = write(tmp_path, {"a.log": text})
    facts, _, losses = read_server(paths)
    assert facts is not None
    assert facts.decode_log.select("pp_rank", "gen_throughput").rows() == [(0, 2.0)]
    counts = dict(losses.select("name", "count").iter_rows())
    assert (counts["log_batch_line_malformed"], counts["log_line_unparsed"]) == (2, 2)


def test_logs_of_two_nodes(tmp_path: Path) -> None:
    line = (
        "[2026-01-01 00:00:{s:02} PP{p}] Decode batch, #running-req: {p}, gen throughput (token/s): 10.0, #queue-req: 0"
    )
    files = {f"node{p}.log": "\n".join(line.format(s=s, p=p) for s in range(4)) for p in (0, 1)}
    facts, _, _ = read_server(write(tmp_path, files))
    assert facts is not None
    assert facts.decode_log.get_column("pp_rank").to_list() == [0, 1] * 4
    assert facts.decode_log.filter(pl.col("pure")).height == 6


def test_gpu_ranks(tmp_path: Path) -> None:
    _, samples, _ = read_server(list((DATA / "A").iterdir()))
    assert samples.select("gpu", "rank").unique().sort("gpu").rows() == [(0, 0), (1, 1)]
    _, unknown, losses = read_server([DATA / "A" / "gpu_samples.csv"])
    assert unknown.get_column("rank").null_count() == unknown.height
    assert assign_gpu_ranks(unknown, {7: 1}).get_column("rank").unique().sort().to_list() == [None, 7]
    # A server that was shown the GPUs in another order
    files = [
        DATA / "A" / "gpu_samples.csv",
        *write(tmp_path, {"command.txt": f"CUDA_VISIBLE_DEVICES=1,0 {COMMAND.replace('4', '2')}"}),
    ]
    _, turned, _ = read_server(files)
    assert turned.select("gpu", "rank").unique().sort("gpu").rows() == [(0, 1), (1, 0)]
    files[1].write_text("CUDA_VISIBLE_DEVICES=GPU-1-2 " + COMMAND)
    _, hidden, losses = read_server(files)
    assert hidden.get_column("rank").null_count() == hidden.height
    assert "gpu_rank_unknown" in losses.get_column("name")


def test_arguments() -> None:
    text = (
        "server_args=ServerArgs(model_path='/a, b', pp_size=2, pp_max_micro_batch_size=None, disable_cuda_graph=True)"
    )
    assert arguments_of_log(text) == {
        "model_path": "/a, b", "pp_size": 2, "pp_max_micro_batch_size": None, "disable_cuda_graph": True,
    }  # fmt: skip
    assert arguments_of_log("server_args={'pp_size': 8, 'max_running_requests': None, 'host': 'h'}") == {
        "pp_size": 8, "max_running_requests": None, "host": "h",
    }  # fmt: skip
    command = (
        "x --tp 4 --pipeline-parallel-size=2 --disable-cuda-graph --decode-log-interval 40 --decode-log-interval 1"
    )
    assert arguments_of_command(command) == {
        "tp_size": 4, "pp_size": 2, "disable_cuda_graph": True, "decode_log_interval": 1,
    }  # fmt: skip
    assert arguments_of_command("x --pp-size two --max-running-requests") == {}


@given(st.integers(1, 300), st.integers(1, 64))
def test_layer_split_gives_every_layer_once(layers: int, stages: int) -> None:
    split, _ = layer_split(layers, stages, None)
    assert split is not None
    assert sum(split) == layers
    assert len(split) == stages
    assert split == sorted(split)
    assert max(split) - min(split) <= 1


def test_layer_split_as_sglang() -> None:
    assert layer_split(61, 8, None)[0] == [7, 7, 7, 8, 8, 8, 8, 8]
    assert layer_split(64, 2, "16,48") == ([16, 48], "SGLANG_PP_LAYER_PARTITION")
    assert layer_split(64, 2, "16,47")[0] is None
    assert layer_split(None, 2, None) == (None, None)


def test_model_files(tmp_path: Path) -> None:
    config = {"model_type": "x", "text_config": {"num_hidden_layers": 61, "hidden_size": 7168, "n_routed_experts": 256}}
    assert model_shape(config) == {"layers": 61, "hidden": 7168, "experts": 256, "top_k": None}
    facts = facts_of(*write(tmp_path, {"c.json": config, "command.txt": COMMAND}))
    assert facts["layers_by_rank"] == [15, 15, 15, 16]


def test_damaged_files_are_losses(tmp_path: Path) -> None:
    cut = (DATA / "A" / "server_info.json").read_text()[:-40]
    (tmp_path / "folder").mkdir()
    paths = [*write(tmp_path, {"a.json": cut, "deep.json": "[" * 100_000}), tmp_path / "gone", tmp_path / "folder"]
    facts, _, losses = read_server(paths)
    assert facts is None
    assert dict(losses.group_by("name").agg(pl.col("count").sum()).iter_rows()) == {
        "file_damaged": 2,
        "file_unreadable": 2,
    }
    same = [DATA / "A" / "server.log", Path(shutil.copy(DATA / "A" / "server.log", tmp_path / "copy.log"))]
    assert losses_of(*same)["file_duplicate"] == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_value_raises(tmp_path: Path, data: st.DataObject) -> None:
    """Every key of every JSON file holds anything JSON can hold."""
    for source in sorted((DATA / "A").glob("*.json")):
        document: Any = json.loads(source.read_text())
        row: Any = document[0] if isinstance(document, list) else document
        for place in (row, *(v for v in row.values() if isinstance(v, dict)), *(row.get("internal_states") or ())):
            for key in data.draw(st.lists(st.sampled_from(sorted(place)), max_size=2)):
                place[key] = data.draw(JSON)
        (tmp_path / source.name).write_text(json.dumps(document))
    facts, _, losses = read_server([*tmp_path.iterdir(), DATA / "A" / "server.log"])
    assert facts is not None
    json.dumps(facts.facts, allow_nan=False)
    assert losses.schema == schema.LOSSES.polars_schema


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_content_raises(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes are cut, moved and replaced in every kind of file: facts stay JSON, tables keep their schema."""
    sources = sorted(p for p in DATA.rglob("*") if p.is_file() and p.suffix != ".md")
    source = data.draw(st.sampled_from(sources))
    content = bytearray(source.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        count = data.draw(st.integers(0, 200))
        content[at : at + count] = data.draw(st.binary(max_size=40))
    path = tmp_path / "mutant"
    path.write_bytes(bytes(content))
    facts, samples, losses = read_server([path])
    assert samples.schema == schema.GPU_SAMPLES.polars_schema
    assert losses.schema == schema.LOSSES.polars_schema
    if facts is not None:
        json.dumps(facts.facts, allow_nan=False)
        assert facts.decode_log.schema == schema.DECODE_LOG.polars_schema
        assert facts.requests.filter(pl.col("end_ns") < pl.col("start_ns")).height == 0


def test_a_process_id_in_digits_of_another_script_is_no_number(tmp_path: Path) -> None:
    lines = [f'sglang:num_running_reqs{{pid="{pid}",pp_rank="{r}"}} 1.0' for r, pid in ((0, "\u0661\u0662"), (1, "71"))]
    (tmp_path / "metrics_before.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    facts, _, _ = read_server([tmp_path / "metrics_before.txt"])
    assert facts is not None
    told: Any = facts.facts
    assert told["pid_by_rank"] == [{"rank": 1, "pid": 71}]

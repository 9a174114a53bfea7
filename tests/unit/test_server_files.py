"""The files beside the traces one by one: GPU samples, metrics, requests, manifests, and what tells them apart."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceana import schema
from traceana.sources.client_requests import read_requests
from traceana.sources.gpu_samples import read_gpu_samples
from traceana.sources.manifest import read_launch, read_recording
from traceana.sources.metrics import counter, label, read_metrics
from traceana.sources.sidecar import Sidecar, read_sidecars, to_ns

NS = 10**9


def kind_of(tmp_path: Path, content: str | bytes) -> str | None:
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found, _ = read_sidecars([path])
    return found[0].kind if found else None


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("[2026-01-01 00:00:00 PP0] Load weight begin. avail mem=1.0 GB\n", "log"),
        ("\ufeff[2026-01-01 00:00:00] server_args=ServerArgs(pp_size=2)\n", "log"),
        ("2026-01-01T00:00:00Z stdout F [2026-01-01 00:00:00 DP0 PP1 TP0] Decode batch\n", "log"),
        ("# HELP sglang:x y\n# TYPE sglang:x gauge\nsglang:x 1.0\n", "metrics"),
        ('sglang:x{pp_rank="0"} 1.0\n', "metrics"),
        ("epoch_ns,gpu,power_mw\n1,0,2\n", "gpu"),
        ("timestamp, index, power.draw [W]\n2026/01/01 00:00:00.000, 0, 79.15 W\n", "gpu"),
        ("A=1 python -m sglang.launch_server --pp-size 2\n", "command"),
        ('{"pp_size": 2}', "info"),
        ('{"model_path": "m", "is_generation": true}', "model"),
        ('{"architectures": ["x"], "num_hidden_layers": 3}', "config"),
        ('{"loads": []}', "loads"),
        ('[{"dp_rank": 0, "num_reqs": 1}]', "loads"),
        ('[{"start": 1.5, "end": 2.5}]', "requests"),
        ('{"requests": [{"start_ns": 1, "end_ns": 2}]}', "requests"),
        ('{"windows": {"steady": {"start": 1.0, "end": 2.0}}}', "windows"),
        ('{"schema_version": 1, "ranks": []}', "manifest"),
        ("epoch_ns,decode_pp0,decode_pp1\n1,2,3\n", "recorder"),
        ('{"steps": [{"ordinal": 4, "micro_batch": 0}]}', "recorder"),
        ('{"steps": []}', None),
        ("epoch_ns,decode\n1,2\n", None),
        ('{"traceEvents": []}', None),
        ('{"schema_version": 1, "traceana_version": "1"}', None),
        ("[tool]\nkey = 1\n", None),
        ("time,value\n1,2\n", None),
        (b"\x1f\x8b\x08\x00rest", None),
        (b"SQLite format 3\x00rest", None),
        (b"text\x00binary", None),
    ],
)
def test_told_by_content(tmp_path: Path, content: str | bytes, kind: str | None) -> None:
    assert kind_of(tmp_path, content) == kind


@given(st.integers(0, 2**62))
def test_nanoseconds_are_exact(value: int) -> None:
    assert to_ns(value, per_second=NS) == value
    assert to_ns(Decimal(value) / NS) == value
    assert to_ns(f"{value // NS}.{value % NS:09d}") == value


def test_numbers_that_are_no_time() -> None:
    values: list[object] = [None, True, "x", math.nan, math.inf, Decimal("1e30"), [], {}]
    assert [to_ns(v) for v in values] == [None] * 8


def gpu(text: str) -> tuple[pl.DataFrame, dict[str, int]]:
    frame, losses = read_gpu_samples(Sidecar("gpu", Path("gpu.csv"), text))
    assert frame.schema == schema.GPU_SAMPLES.polars_schema
    return frame, {str(row["name"]): int(str(row["count"])) for row in losses}


def test_gpu_samples_in_milliwatts() -> None:
    frame, losses = gpu(
        "epoch_ns,gpu,util_gpu,power_mw,power_limit_mw,mem_used_b,sm_mhz,temp_c\n"
        "1795969748412176685,1,72,404723,700000,92988506112,1980,40\n"
        "1795969748412176684,0,0,79155,,644939776,345,32\n"
    )
    assert losses == {}
    assert frame.rows() == [
        (1795969748412176684, None, 0, 79.155, None, 0.0, 345.0, 644939776, 32.0),
        (1795969748412176685, None, 1, 404.723, 700.0, 0.72, 1980.0, 92988506112, 40.0),
    ]


def test_gpu_samples_of_nvidia_smi() -> None:
    frame, losses = gpu(
        "timestamp, index, utilization.gpu [%], power.draw [W], enforced.power.limit [W], memory.used [MiB], "
        "clocks.sm [MHz]\n"
        "2026/11/29 16:29:08.412, 0, 72 %, 404.72 W, 700.00 W, 2 MiB, 1980 MHz\n"
        "2026/11/29 16:29:09.412, 0, 71 %, [N/A], [N/A], 2 MiB, 1980 MHz\n"
    )
    assert losses == {}
    assert frame.row(0) == (1795969748412000000, None, 0, 404.72, 700.0, 0.72, 1980.0, 2097152, None)
    assert frame.row(1, named=True)["power_w"] is None


def test_gpu_samples_malformed() -> None:
    frame, losses = gpu("epoch_s,gpu,power_w\n1.5,0,10\nx,0,10\n2.5,,10\n3.25,1,1e\n1.5,0,11\n4\n")
    assert frame.select("ts_ns", "gpu", "power_w").rows() == [(1500000000, 0, 10.0), (3250000000, 1, None)]
    assert losses == {"gpu_sample_malformed": 4, "gpu_value_malformed": 1, "gpu_power_limit_not_recorded": 1}
    frame, losses = gpu("epoch_s,gpu,power_w,util_pct\n1.5,0,7.9e20,10\n2.5,0,-3,101\n3.5,0,250,100\n")
    assert frame.select("power_w", "utilisation").rows() == [(None, 0.1), (None, None), (250.0, 1.0)]
    assert losses == {"gpu_value_malformed": 3, "gpu_power_limit_not_recorded": 1}
    frame, losses = gpu("gpu,power_w\n1,2\n")
    assert (frame.height, losses) == (0, {"gpu_samples_unusable": 1})


@pytest.mark.parametrize(
    ("header", "text", "ns"),
    [
        ("timestamp", "1795969748.412176685", 1795969748412176685),
        ("timestamp", "1795969748412176685", 1795969748412176685),
        ("time", "1795969748412.5", 1795969748412500000),
        ("ts_us", "1795969748412176.685", 1795969748412176685),
        ("epoch_s", "1795969748", 1795969748000000000),
        ("timestamp", "2026-11-29T16:29:08.412", 1795969748412000000),
        ("epoch_s", "1795969748412176685", None),
        ("timestamp", "9999-11-29T16:29:08.412", None),
    ],
)
def test_gpu_sample_times(header: str, text: str, ns: int | None) -> None:
    frame, _ = gpu(f"{header},gpu,power_w\n{text},0,1\n")
    assert frame.get_column("ts_ns").to_list() == ([] if ns is None else [ns])


def dump(name: str, requests: int, decode: int) -> Sidecar:
    text = (
        "# HELP sglang:http_requests_total x\n# TYPE sglang:http_requests_total counter\n"
        f'sglang:http_requests_total{{endpoint="/metrics",method="GET"}} {requests}.0\n'
        f'sglang:realtime_tokens_total{{mode="decode",pp_rank="0",tp_rank="0"}} {decode}.0\n'
        f'sglang:realtime_tokens_total{{mode="decode",pp_rank="1",tp_rank="0"}} {decode - 1}.0 1795969748412\n'
        'sglang:odd{text="a,b=\\"}{\\""} NaN\nsglang:bound{le="+Inf"} +Inf\nnot a sample at all\n\n'
    )
    return Sidecar("metrics", Path(name), text)


def test_metrics_are_put_in_order_by_their_counters() -> None:
    metrics, losses = read_metrics([dump("end.txt", 2, 500), dump("zero.txt", 1, 100)])
    assert metrics.schema == schema.METRICS.polars_schema
    assert metrics.select("when", "file").unique().sort("when").rows() == [(0, "zero.txt"), (1, "end.txt")]
    assert [loss["count"] for loss in losses] == [1, 1]
    last = metrics.filter(pl.col("when") == 1)
    assert counter(last, "sglang:realtime_tokens_total", mode="decode", pp_rank="0") == 500.0
    assert counter(last, "sglang:realtime_tokens_total", mode="decode") == 999.0
    assert counter(last, "sglang:realtime_tokens_total", mode="prefill") is None
    assert math.isnan(counter(last, "sglang:odd") or 0.0)
    assert counter(last, "sglang:bound") == math.inf
    assert last.filter(pl.col("name") == "sglang:odd").select(label("text")).item() == 'a,b=\\"}{\\"'


def requests(document: object) -> tuple[pl.DataFrame, int]:
    parsed = json.loads(json.dumps(document), parse_float=Decimal)
    frame, losses = read_requests(Sidecar("requests", Path("client.json"), "", parsed))
    return frame, sum(int(str(loss["count"])) for loss in losses)


def test_requests_of_several_tools() -> None:
    frame, lost = requests(
        [
            {
                "start": 1795969784.1625032,
                "end": 1795969788.7846608,
                "status": 200,
                "prompt": 256,
                "out": 25,
                "err": None,
            },
            {"start_ns": 5, "end_ns": 9, "ok": True, "input_tokens": 1, "output_tokens": 2},
            {"start_time": 2.5, "latency": 0.25, "prompt_len": 7, "error": "timed out"},
            {"start": 3, "end": 2.5},
            {"start": None, "end": 1},
            "text",
        ]
    )
    assert frame.rows() == [
        (5, 9, True, 1, 2),
        (2500000000, 2750000000, False, 7, None),
        (1795969784162503200, 1795969788784660800, True, 256, 25),
    ]
    assert lost == 3


def test_recordings_and_launches() -> None:
    manifest = {
        "schema_version": 1,
        "ranks": [{"rank": 0, "host": "b", "gpu": 4, "pid": 70}, {"rank": 1, "host": "a", "gpu": None}, 5],
        "command": ["x", "--y", "a b"],
        "steady_window": {"start_ns": 5, "end_ns": 9},
        "windows": [
            {"name": "steady_1", "start_ns": 1, "end_ns": 4, "decode_tokens": 30, "prefill_tokens": 3},
            {"name": "after", "start_ns": 9, "end_ns": 20, "decode_tokens": 1},
        ],
        "versions": {"sglang": "1"},
        "problems": [{"name": "rank_missing", "severity": "error", "rank": 1, "count": 2, "detail": "d"}, {"name": 1}],
    }
    recording, losses = read_recording(Sidecar("manifest", Path("manifest.json"), "", manifest))
    assert losses == [
        {"name": "rank_missing", "severity": "error", "rank": 1, "count": 2, "detail": "while capturing: d"}
    ]
    assert (recording.steady_ns, recording.command, recording.hosts) == ((5, 9), "x --y 'a b'", ("a", "b"))
    assert (recording.gpus, recording.pids, recording.windows) == ({0: 4}, {0: 70}, ((3, 30, 3),))
    document = {"windows": {"steady": {"start": 9, "end": 1}}}
    recording, losses = read_recording(Sidecar("windows", Path("r.json"), "", document))
    assert recording.steady_ns is None
    assert [loss["name"] for loss in losses] == ["steady_window_malformed"]
    launch = read_launch(
        Sidecar("command", Path("c"), 'A=1 B="x y" python -m s \\\n  --pp-size 2\nenv: {\n "C": "3"}\n')
    )
    assert launch.command == "python -m s --pp-size 2"
    assert launch.env == {"A": "1", "B": "x y", "C": "3"}


def test_an_exponent_beyond_every_number_is_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "server_info.json").write_text('{"pp_size": 2, "x": 1e99999999999999999999}')
    found, losses = read_sidecars([tmp_path / "server_info.json"])
    assert found == []
    assert [row["name"] for row in losses] == ["file_damaged"]

"""A part of a real export with the hook's NVTX ranges (fixtures/nsys): the whole attribution, by figures that stay."""

from __future__ import annotations

import lzma
import sqlite3
from pathlib import Path
from typing import Any, cast

import polars as pl
import pytest

from traceana.pipeline import Options, Report, analyse
from traceana.tables.nsys import read_nsys

PART = Path(__file__).parents[2] / "fixtures" / "nsys" / "pp2-cap8-part.sqlite.xz"


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nsys") / "report.sqlite"
    path.write_bytes(lzma.decompress(PART.read_bytes()))
    return path


@pytest.fixture(scope="module")
def report(export: Path) -> Report:
    return analyse(export, Options(cache=False))


def busy(export: Path, device: int, start: int, end: int) -> int:
    """What any activity but a message covers of a stretch of epoch time, straight from the database."""
    with sqlite3.connect(export) as database:
        (epoch,) = database.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
        rows = database.execute(
            "SELECT start, end FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds ON id = demangledName WHERE deviceId = ?1 "
            "AND value NOT LIKE '%SendRecv%' UNION ALL SELECT start, end FROM CUPTI_ACTIVITY_KIND_MEMCPY "
            "WHERE deviceId = ?1 UNION ALL SELECT start, end FROM CUPTI_ACTIVITY_KIND_MEMSET WHERE deviceId = ?1 "
            "ORDER BY 1",
            (device,),
        ).fetchall()
    database.close()
    covered, reach = 0, start - epoch
    for a, b in rows:
        a, b = max(a, reach), min(b, end - epoch)
        if b > a:
            covered, reach = covered + b - a, b
    return covered


def test_ranks_say_who_they_are_and_what_they_did_before_it_is_no_message(export: Path) -> None:
    ranks = read_nsys(export)
    assert [(r.info.rank, r.info.pp_rank, r.info.world_size, r.info.rank_source) for r in ranks] == [
        (0, 0, 2, "content"), (1, 1, 2, "content"),
    ]  # fmt: skip
    about = [pl.col(c).cast(pl.String()) for c in ("collective", "dtype")]
    rest = ("src_rank", "dst_rank", "in_elements", "out_elements")
    found = [r.device.drop_nulls("collective").select(*about, *rest).group_by(pl.all()).len() for r in ranks]
    assert sorted(found[0].rows()) == [
        ("recv", "Int", 1, None, None, 8, 8), ("send", "BFloat16", None, 1, 16_384, None, 16),
        ("send", "Int", None, 1, 8, None, 9),
    ]  # fmt: skip
    assert sorted(found[1].rows(), key=str) == [
        # The receive of rank 1 that nsys saw before rank 1 itself had begun.
        ("coalesced", None, None, None, None, None, 1), ("recv", "BFloat16", 0, None, None, 16_384, 16),
        ("recv", "Int", 0, None, None, 8, 7), ("send", "Int", None, 0, 8, None, 7),
    ]  # fmt: skip
    cut = [r.annotations.filter(~pl.col("finished")).get_column("name").cast(pl.String()).to_list() for r in ranks]
    assert cut == [["gloo:send"] * 3, ["gloo:send"] * 2]  # commits that the stop came before


def test_every_nanosecond_of_both_stages(report: Report, export: Path) -> None:
    document = cast("dict[str, Any]", report.document)
    window = document["window"]
    assert (window["start_ns"], window["duration_ns"]) == (1_796_049_008_131_616_497, 63_693_316)
    for stage in document["stages"]:
        assert stage["busy_ns"] == busy(export, stage["rank"], window["start_ns"], window["end_ns"])
        assert stage["busy_ns"] + stage["transfer_ns"] + sum(stage["causes_ns"].values()) == window["duration_ns"]


def test_the_answers_are_those_of_a_trace_with_spans(report: Report) -> None:
    document = cast("dict[str, Any]", report.document)
    first, second = document["stages"]
    assert (first["transfer_ns"], second["transfer_ns"]) == (73_350, 124_032)
    assert {k: v for k, v in first["causes_ns"].items() if v} == {
        "upstream_compute": 174_572, "control_message": 1_441_219, "host_schedule": 11_150_631,
        "host_launch": 14_354_717, "host_sync": 25_791, "launch_latency": 1_857_990, "stream_dependency": 672,
        "ambiguous": 99_546,
    }  # fmt: skip
    top = [(b["rank"], b["root_rank"], b["cause"], b["detail"], b["ns"]) for b in document["blame"][:3]]
    assert top == [
        (0, 0, "host_launch", "run_batch", 7_706_011), (0, 0, "host_launch", "graph launch", 6_648_706),
        (0, 0, "host_schedule", "send_proxy_dict_to_next_stage", 2_898_420),
    ]  # fmt: skip
    slots = document["micro_batches"]
    assert (slots["slots"], slots["batch_size"]["max"], slots["compared"], slots["mismatched_visits"]) == (2, 8, 5, [])
    assert slots["in_flight"]["histogram"] == [[1, 17_118_512], [2, 46_574_804]]
    assert [(p["src"], p["dst"], p["kind"], p["bytes"], p["count"], p["unmatched"]) for p in document["p2p"]] == [
        (0, 1, "output", 32, 6, 0), (0, 1, "proxy", 32_768, 12, 0), (1, 0, "output", 32, 6, 0),
    ]  # fmt: skip
    spans = {row["span"] for row in document["host_spans"]}
    assert "process_input_requests" in spans and not any("::" in span for span in spans)
    assert {(loss["name"], loss["severity"]) for loss in document["losses"]} == {("p2p_unmatched_edge", "info")}

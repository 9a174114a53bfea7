"""Who wrote which trace: content, then name, then order; contradictions are errors that name the files."""

from __future__ import annotations

import json
from pathlib import Path

import kineto_files as kf
import polars as pl
import pytest

from traceana.errors import SourceError
from traceana.tables.capture import CaptureTables
from traceana.tables.identity import FileName
from traceana.tables.read import read_capture

EVENTS = [kf.launch(0, 5, 1), kf.kernel("k", 10, 50, 1)]
ID = "1795969813.5867767"


def read(folder: Path, **how: object) -> CaptureTables:
    return read_capture(folder, cache=False, **how)  # type: ignore[arg-type]


def names(capture: CaptureTables) -> dict[str, str]:
    return dict(capture.losses.select("name", "severity").iter_rows())


@pytest.mark.parametrize(
    ("name", "rank", "parts", "capture", "stage"),
    [
        (f"{ID}-TP-0-PP-1.trace.json.gz", None, {"tp": 0, "dp": 0, "pp": 1, "ep": 0}, ID, None),
        (
            f"run-{ID}-TP-3-DP-1-PP-0-EP-3-DECODE.trace.json.gz",
            None,
            {"tp": 3, "dp": 1, "pp": 0, "ep": 3},
            f"run-{ID}",
            "DECODE",
        ),
        ("mine-TP-2.trace.json", None, {"tp": 2, "dp": 0, "pp": 0, "ep": 0}, "mine", None),
        ("rank0_trace.json", 0, {}, None, None),
        ("rank-12.json.gz", 12, {}, None, None),
        ("trace_8_rank_1.json", 1, {}, None, None),
        ("dp0_pp1_tp3_ep3_rank7.1759300074.pt.trace.json.gz", 7, {"dp": 0, "pp": 1, "tp": 3, "ep": 3}, None, None),
        ("rank0_of_rank1.json", None, {}, None, None),
        ("prank5.json", None, {}, None, None),
    ],
)
def test_names(name: str, rank: int | None, parts: dict[str, int], capture: str | None, stage: str | None) -> None:
    said = FileName.of(name)
    assert (said.rank, said.parts, said.capture, said.stage) == (rank, parts, capture, stage)


def test_torch_names_hold_the_host() -> None:
    assert FileName.of("node-7_4242.1759300074123456789.pt.trace.json.gz").host == "node-7"


def test_sglang_grid_and_process(tmp_path: Path) -> None:
    for pp in (0, 1):
        for tp in (0, 1):
            rank, pid = pp * 2 + tp, 100 + pp * 2 + tp
            process = {"name": "process_name", "ph": "M", "ts": 0, "pid": pid, "tid": 0}
            events = [
                kf.span("user_annotation", "run_batch", 0, 90, pid=pid, tid=pid),
                kf.launch(0, 5, 1, pid=pid),
                kf.kernel("k", 10, 50, 1, device=rank),
                {**process, "args": {"name": f"sglang::scheduler_PP{pp}_TP{tp}"}},
            ]
            kf.write(tmp_path / "trace" / f"{ID}-TP-{tp}-PP-{pp}.trace.json.gz", events, kf.header(rank, 4))
    capture = read(tmp_path)
    infos = [r.info for r in capture.ranks]
    assert [(i.rank, i.pp_rank, i.tp_rank, i.dp_rank, i.ep_rank) for i in infos] == [
        (0, 0, 0, 0, 0), (1, 0, 1, 0, 0), (2, 1, 0, 0, 0), (3, 1, 1, 0, 0),
    ]  # fmt: skip
    assert [(i.pid, i.device, i.world_size, i.rank_source) for i in infos] == [
        (100 + n, n, 4, "content") for n in range(4)
    ]
    assert infos[3].process_name == "sglang::scheduler_PP1_TP1"
    assert capture.losses.height == 0


def test_ranks_come_from_names_where_content_is_silent(tmp_path: Path) -> None:
    for pp in (0, 1):
        for tp in (0, 1):
            kf.write(tmp_path / f"{ID}-TP-{tp}-PP-{pp}.trace.json.gz", EVENTS, kf.header(None))
    assert [(r.info.rank, r.info.pp_rank, r.info.tp_rank, r.info.rank_source) for r in read(tmp_path).ranks] == [
        (0, 0, 0, "name"), (1, 0, 1, "name"), (2, 1, 0, "name"), (3, 1, 1, "name"),
    ]  # fmt: skip


def test_order_is_the_last_resort_and_said_aloud(tmp_path: Path) -> None:
    for name in ("b.json", "a.json"):
        kf.write(tmp_path / name, EVENTS, kf.header(None))
    capture = read(tmp_path)
    assert [(r.info.rank, r.info.file.name, r.info.rank_source) for r in capture.ranks] == [
        (0, "a.json", "order"),
        (1, "b.json", "order"),
    ]
    assert names(capture) == {"rank_by_order": "warning"}


def test_places_come_from_process_groups(tmp_path: Path) -> None:
    groups = [
        {"pg_name": "5", "pg_desc": "pp:device", "backend_config": "cuda:nccl", "ranks": [1, 3]},
        {"pg_name": "6", "pg_desc": "tp:device", "backend_config": "cuda:nccl", "ranks": [2, 3]},
    ]
    head = kf.header(3, 4)
    head["distributedInfo"]["pg_config"] = groups
    kf.write(tmp_path / "x.json", EVENTS, head)
    info = read(tmp_path).ranks[0].info
    assert (info.rank, info.pp_rank, info.tp_rank) == (3, 1, 1)
    assert [(g.name, g.desc, g.ranks) for g in info.groups] == [("5", "pp:device", (1, 3)), ("6", "tp:device", (2, 3))]


def test_name_against_content_is_an_error(tmp_path: Path) -> None:
    kf.write(tmp_path / "rank1_trace.json", EVENTS, kf.header(0, 2))
    with pytest.raises(SourceError, match=r"rank1_trace\.json .* name says rank 1, the content rank 0"):
        read(tmp_path)


def test_grid_against_content_is_an_error(tmp_path: Path) -> None:
    kf.write(tmp_path / f"{ID}-TP-1-PP-0.trace.json", EVENTS, kf.header(0, 4))
    with pytest.raises(SourceError, match="TP 1 and PP 0, the content rank 0"):
        read(tmp_path)


def test_two_tensor_parallel_sizes_are_an_error(tmp_path: Path) -> None:
    kf.write(tmp_path / f"{ID}-TP-0-PP-1.trace.json", EVENTS, kf.header(2, 8))
    kf.write(tmp_path / f"{ID}-TP-1-PP-1.trace.json", EVENTS, kf.header(5, 8))
    with pytest.raises(SourceError, match="do not fit one tensor-parallel size"):
        read(tmp_path)


def test_stages_of_one_rank_are_told_apart(tmp_path: Path) -> None:
    for stage in ("DECODE", "EXTEND"):
        kf.write(tmp_path / f"{ID}-TP-0-{stage}.trace.json", EVENTS, kf.header(0))
    with pytest.raises(SourceError, match=f"{ID}-TP-0-DECODE.* and {ID}-TP-0-EXTEND") as raised:
        read(tmp_path)
    assert "stages" in str(raised.value.hint)


def test_captures_mixed_in_one_folder_are_an_error(tmp_path: Path) -> None:
    for capture in (ID, "1795970218.07838"):
        kf.write(tmp_path / f"{capture}-TP-0.trace.json", EVENTS, kf.header(0))
    with pytest.raises(SourceError, match=r"several captures .*1795969813\.5867767 \(1 files\), 1795970218\.07838"):
        read(tmp_path)


def test_missing_ranks_and_worlds_that_disagree(tmp_path: Path) -> None:
    kf.write(tmp_path / "rank0.json", EVENTS, kf.header(0, 4))
    kf.write(tmp_path / "rank2.json", EVENTS, kf.header(2, 8))
    rows = {row["name"]: row for row in read(tmp_path).losses.to_dicts()}
    assert rows["ranks_missing"]["count"] == 6
    assert "1, 3, 4, 5, 6, 7" in rows["ranks_missing"]["detail"]
    assert "rank0.json says 4" in rows["world_sizes_disagree"]["detail"]


def test_a_broken_rank_takes_no_other_down(tmp_path: Path) -> None:
    kf.write(tmp_path / "rank0.json.gz", EVENTS, kf.header(0, 2))
    (tmp_path / "rank1.json.gz").write_bytes(b"")
    capture = read(tmp_path)
    assert [r.info.rank for r in capture.ranks] == [0]
    assert names(capture) == {"rank_not_read": "error", "ranks_missing": "warning"}
    (tmp_path / "rank0.json.gz").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(SourceError, match="none of 2 traces can be used"):
        read(tmp_path)


def test_a_merge_is_left_out_and_named(tmp_path: Path) -> None:
    kf.write(tmp_path / f"{ID}-TP-0.trace.json", EVENTS, kf.header(0))
    merged = [{**event, "pid": f"[TP00-PP00] {event['pid']}"} for event in EVENTS]
    kf.write(tmp_path / f"merged-{ID}.trace.json.gz", merged, kf.header(0))
    capture = read(tmp_path)
    [row] = capture.losses.to_dicts()
    assert (row["name"], row["severity"]) == ("merged_trace_left_out", "info")
    assert "TP00-PP00" in row["detail"]


def test_only_the_ranks_asked_for(tmp_path: Path) -> None:
    for rank in range(3):
        kf.write(tmp_path / f"rank{rank}.json", EVENTS, kf.header(rank, 3))
    assert [r.info.rank for r in read(tmp_path, ranks=[2, 0]).ranks] == [0, 2]
    with pytest.raises(SourceError, match="no trace of rank 5") as raised:
        read(tmp_path, ranks=[1, 5])
    assert raised.value.hint == "there are ranks 0, 1, 2"


def test_the_manifest_gives_hosts_and_contradicts_aloud(tmp_path: Path) -> None:
    kf.write(tmp_path / "ranks" / "x.trace.json", EVENTS, kf.header(1, 2))
    rows = [{"rank": 1, "file": "ranks/x.trace.json", "host": "node-a", "pp": 1}]
    (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": 1, "ranks": rows}))
    capture = read(tmp_path)
    assert capture.ranks[0].info.host == "node-a"
    assert capture.manifest is not None
    rows[0]["rank"] = 0
    (tmp_path / "manifest.json").write_text(json.dumps({"schema_version": 1, "ranks": rows}))
    with pytest.raises(SourceError, match="the manifest says rank 0, the content rank 1"):
        read(tmp_path)


def test_other_json_links_and_odd_files_are_not_traces(tmp_path: Path) -> None:
    home, outside = tmp_path / "capture", tmp_path / "outside"
    kf.write(home / "a.json", EVENTS, kf.header(0, 1))
    kf.write(outside / "rank1.json", EVENTS, kf.header(1, 2))
    (home / "server_info.json").write_text('{"pp_size": 1}')
    (home / "list.json").write_text('[{"name": "x"}]')
    (home / "link.json").symlink_to(outside / "rank1.json")
    (home / "trace").symlink_to(outside)
    capture = read(home)
    assert [r.info.file.name for r in capture.ranks] == ["a.json"]
    links = capture.losses.filter(pl.col("name") == "link_left_out")
    assert (links.height, set(links["severity"])) == (2, {"warning"})


@pytest.mark.parametrize("made", ["nothing", "empty", "file"])
def test_nothing_to_read_is_said_with_a_hint(tmp_path: Path, made: str) -> None:
    target = tmp_path / "x"
    if made == "empty":
        target.mkdir()
    if made == "file":
        target.write_text("hello")
    with pytest.raises(SourceError) as raised:
        read(target)
    assert raised.value.where == str(target)
    assert raised.value.hint

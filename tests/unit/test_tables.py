"""From events to tables: columns, order, impossible events, links between calls and kernels, and messages."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kineto_files as kf
import polars as pl
import pytest

from traceana import demo_capture, schema
from traceana.sources.limits import Limits
from traceana.tables.capture import RankTables
from traceana.tables.read import read_capture, read_rank
from traceana.tables.store import Store

BASE = kf.BASE_NS
START = 5 * 10**15
MS, SECOND, HOUR = 10**6, 10**9, 3600 * 10**9
TABLES = {
    "device": schema.DEVICE,
    "calls": schema.CALLS,
    "annotations": schema.ANNOTATIONS,
    "gpu_annotations": schema.GPU_ANNOTATIONS,
    "ops": schema.OPS,
    "overheads": schema.OVERHEADS,
    "losses": schema.LOSSES,
}


def tables(folder: Path, events: Sequence[kf.Event], head: Mapping[str, object] | None = None) -> RankTables:
    kf.write(folder / "rank0.json", events, kf.header() if head is None else head)
    return read_capture(folder, cache=False).ranks[0]


def losses(rank: RankTables, *, info: bool = True) -> dict[str, int]:
    rows = rank.losses if info else rank.losses.filter(pl.col("severity") != "info")
    return dict(rows.select("name", "count").iter_rows())


def busy(n: int = 10, first: int = MS, correlation: int = 1) -> list[kf.Event]:
    """`n` launches and kernels, a kernel a microsecond long every 10 us from `first` on."""
    return [
        event
        for k in range(n)
        for event in (
            kf.launch(first + 10_000 * k - 3000, 2000, correlation + k),
            kf.kernel("k", first + 10_000 * k, 1000, correlation + k),
        )
    ]


def test_every_table_has_its_schema_and_order() -> None:
    folder = Path(demo_capture.__file__).parent / "capture"
    capture = read_capture(folder, cache=False)
    assert [r.info.rank for r in capture.ranks] == [0, 1]
    for rank in capture.ranks:
        for name, table in TABLES.items():
            frame = getattr(rank, name)
            assert frame.schema == table.polars_schema
            if name != "losses":
                assert frame.height
                assert frame.select("ts_ns", -pl.col("end_ns")).equals(
                    frame.select("ts_ns", -pl.col("end_ns")).sort("ts_ns", "end_ns")
                )
                assert (frame["end_ns"] >= frame["ts_ns"]).all()
        assert losses(rank, info=False) == {}
        assert (rank.info.pid, rank.info.device) == ({0: 836, 1: 837}[rank.info.rank], rank.info.rank)
        assert rank.info.versions["nccl"] == "2.28.9"
        unfinished = rank.annotations.filter(~pl.col("finished"))
        assert 1 <= unfinished.height < 10
    sends = capture.ranks[0].device.filter(pl.col("collective").cast(pl.String()) == "send")
    assert sends.select("dst_rank", "src_rank", "group_size").unique().rows() == [(1, None, 2)]


def test_rows_and_columns(tmp_path: Path) -> None:
    rank = tables(
        tmp_path,
        [
            kf.span("user_annotation", "step", 0, 900, **{"External id": 4, "finished": False}),
            kf.span("user_annotation", "longer", 0, 1000),
            kf.span("cpu_op", "aten::mm", 5, 10, **{"External id": 5}),
            kf.span("gpu_user_annotation", "step", 20, 500, pid=1, tid=9, **{"External id": 4}),
            kf.span("overhead", "Buffer Flush", 30, 5, pid=-1, tid=0),
            kf.span("cuda_driver", "cuLaunchKernelEx", 10, 5, correlation=8),
            kf.span("gpu_memcpy", "Memcpy DtoD", 90, 10, pid=1, tid=9, bytes=64, correlation=9, stream=9, device=1),
            kf.span("gpu_memset", "Memset", 80, 10, pid=1, tid=9, **{"External id": 6}),
            kf.kernel("k", 50, 25, 8, device=1, stream=9),
        ],
    )
    columns = ["ts_ns", "end_ns", "kind", "name", "device", "stream", "correlation", "external_id", "bytes"]
    assert rank.device.select(columns).rows() == [
        (BASE + 50, BASE + 75, "kernel", "k", 1, 9, 8, 8, None),
        (BASE + 80, BASE + 90, "memset", "Memset", 1, 9, None, 6, None),
        (BASE + 90, BASE + 100, "memcpy", "Memcpy DtoD", 1, 9, 9, None, 64),
    ]
    assert rank.annotations.select("name", "external_id", "finished").rows() == [
        ("longer", None, True),
        ("step", 4, False),
    ]
    assert rank.ops.rows() == [(BASE + 5, BASE + 15, "aten::mm", 7, 7, 5)]
    assert rank.gpu_annotations.rows() == [(BASE + 20, BASE + 520, "step", 1, 9, 4)]
    assert rank.overheads.rows() == [(BASE + 30, BASE + 35, "Buffer Flush")]
    assert rank.calls["name"].to_list() == ["cuLaunchKernelEx"]


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (kf.kernel("bad", START + 500, -1, 99), "event_negative_duration"),
        (kf.launch(START + 500, -1, 99), "event_negative_duration"),
        (kf.kernel("bad", 0, 0, 99), "event_zero_timestamp"),
        (kf.kernel("bad", 0, 50, 99), "event_zero_timestamp"),
        (kf.kernel("bad", START + 500, 100 * SECOND, 99, stream=8), "event_absurd_duration"),
        (kf.kernel("bad", START + 500, SECOND // 2, 99), "event_absurd_duration"),
        (kf.kernel("ncclDevKernel_SendRecv", START + 500, 2 * HOUR, 99, stream=8), "event_absurd_duration"),
        (kf.launch(START + 500, 2 * HOUR, 99), "event_absurd_duration"),
        (kf.kernel("bad", START + HOUR, 10, 99, stream=8), "event_outside_trace"),
        (kf.kernel("bad", START - HOUR, 10, 99, stream=8), "event_outside_trace"),
    ],
)
def test_impossible_events_are_kept_out_and_counted(tmp_path: Path, event: kf.Event, name: str) -> None:
    rank = tables(tmp_path, [*busy(first=START), event, *busy(4, START + 20 * MS, 50)])
    assert rank.device.height == 14
    assert losses(rank, info=False) == {name: 1}


@pytest.mark.parametrize(
    "event",
    [
        kf.kernel("ncclDevKernel_SendRecv(x)", MS + 95_000, 5 * SECOND, 99, stream=8),  # waits for a peer
        kf.launch(MS + 95_000, 90 * SECOND, 99, "cudaDeviceSynchronize"),
        kf.kernel("long", MS + 95_000, 900 * MS, 99, stream=8),
        kf.kernel("pdl", MS + 500, 10_000, 99),  # overlaps the next on its stream
        kf.kernel("first", 0, 40, 99),  # its trace starts near zero
    ],
)
def test_odd_but_possible_events_stay(tmp_path: Path, event: kf.Event) -> None:
    first = [kf.span("user_annotation", "a", 10, 2 * MS)]
    rank = tables(tmp_path, [*first, *busy(), event])
    assert rank.device.height + rank.calls.height == 21
    assert losses(rank, info=False) == {}


def test_overlaps_on_a_stream_are_counted_as_information(tmp_path: Path) -> None:
    rank = tables(tmp_path, [kf.kernel("a", 0, 10, 1), kf.kernel("b", 8, 10, 2), kf.kernel("c", 9, 2, 3, stream=8)])
    row = rank.losses.filter(pl.col("name") == "overlap_on_stream").to_dicts()[0]
    assert (row["severity"], row["count"], "up to 2 ns" in row["detail"]) == ("info", 1, True)
    assert rank.device.height == 3


def test_links_between_calls_and_kernels(tmp_path: Path) -> None:
    head_launch, hole = kf.launch(10, 5, 100), kf.launch(MS + 5, 5, 101)
    rank = tables(
        tmp_path,
        [
            head_launch,
            *busy(),
            hole,
            kf.kernel("orphan", 2 * MS, 5, 102),
            kf.launch(3 * MS, 5, 1),
            kf.launch(4 * MS, 5, 103),
        ],
    )
    assert losses(rank) == {
        "duplicate_correlation": 1,
        "kernel_without_launch": 1,
        "launch_without_kernel_at_edge": 2,
        "launch_without_kernel": 1,
    }


def test_kernels_before_their_launch_say_the_skew(tmp_path: Path) -> None:
    rank = tables(
        tmp_path, [kf.launch(1000, 5, 1), kf.kernel("k", 992, 50, 1), kf.launch(2000, 5, 2), kf.kernel("k", 2010, 5, 2)]
    )
    [row] = rank.losses.to_dicts()
    assert (row["name"], row["severity"], row["count"]) == ("kernel_before_launch", "warning", 1)
    assert "8 ns" in row["detail"]
    assert rank.device.height == 2


def test_several_gpus_in_one_file(tmp_path: Path) -> None:
    rank = tables(tmp_path, [kf.kernel("a", 0, 5, 1), kf.kernel("b", 9, 5, 2, device=1)])
    assert rank.device["device"].to_list() == [0, 1]
    assert losses(rank, info=False) == {"several_devices": 2}


def test_an_impossible_base_is_not_added(tmp_path: Path) -> None:
    for base in (-5, 10**19):
        rank = tables(tmp_path, busy(), kf.header(base=base))
        assert rank.device["ts_ns"][0] == MS
        assert losses(rank) == {"base_time_not_added": 1}


def nccl(ts: int, correlation: int, stream: int = 9, **args: Any) -> kf.Event:
    return kf.kernel(
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", ts, 50, correlation, stream=stream, **args
    )


MESSAGE: dict[str, Any] = {
    "Collective name": "send", "In msg nelems": 16384, "Out msg nelems": 0, "Group size": 2, "dtype": "BFloat16",
    "Process Group Name": "7", "Process Group Description": "pp:device", "Dst Rank": 1, "Seq": 3,
}  # fmt: skip


def test_messages_come_from_the_kernel(tmp_path: Path) -> None:
    rank = tables(tmp_path, [nccl(100, 1, **MESSAGE), kf.kernel("k", 200, 5, 2)])
    names = [
        "collective",
        "src_rank",
        "dst_rank",
        "in_elements",
        "out_elements",
        "dtype",
        "group",
        "group_desc",
        "group_size",
        "seq",
    ]
    assert rank.device.select(names).rows() == [
        ("send", None, 1, 16384, 0, "BFloat16", "7", "pp:device", 2, 3),
        (None,) * 10,
    ]


def test_messages_fall_back_on_the_op_and_on_the_span(tmp_path: Path) -> None:
    head = kf.header(2, 4)
    head["distributedInfo"]["pg_config"] = [
        {"pg_name": "7", "pg_desc": "pp:device", "backend_config": "cuda:nccl", "ranks": [2, 0]}
    ]
    (tmp_path / "x").mkdir()
    rank = tables(
        tmp_path,
        [
            kf.span("cpu_op", "record_param_comms", 90, 5, **{"External id": 11, **MESSAGE}),
            nccl(100, 11),
            kf.span("gpu_user_annotation", "nccl:recv 0<-1", 195, 70, pid=0, tid=9),
            nccl(200, 12),
            kf.span("gpu_user_annotation", "nccl:all_reduce", 290, 70, pid=0, tid=9),
            nccl(300, 13),
            nccl(400, 14),
            nccl(200, 15, stream=10),
        ],
        head | {"distributedInfo": {**head["distributedInfo"], "rank": 0}},
    )
    said = rank.device.sort("correlation").select("collective", "src_rank", "dst_rank", "in_elements").rows()
    assert said == [
        ("send", None, 1, 16384),
        ("recv", 0, None, None),  # the group's second member is global rank 0
        ("all_reduce", None, None, None),
        (None, None, None, None),
        (None, None, None, None),
    ]


def test_limits_reach_the_reader(tmp_path: Path) -> None:
    kf.write(tmp_path / "rank0.json", busy())
    kf.write(tmp_path / "rank1.json", busy(500), kf.header(1))
    capture = read_capture(tmp_path, cache=False, limits=Limits(text_bytes=9000))
    assert [r.info.rank for r in capture.ranks] == [0]
    assert "larger than" in capture.losses.filter(pl.col("name") == "rank_not_read")["detail"][0]


def test_what_is_wrong_with_a_rank_holds_nothing_of_it(tmp_path: Path) -> None:
    kf.write(tmp_path / "rank0.json", busy(500))
    store = Store(tmp_path / "store")
    read = read_rank(tmp_path / "rank0.json", None, store=store, limits=Limits(text_bytes=9000), cache=False)
    assert read.error is not None
    frames = [frame for frame, _ in traceback.walk_tb(read.error.__traceback__)]
    assert {"read_kineto", "_within"} <= {frame.f_code.co_name for frame in frames}
    assert not any(frame.f_locals for frame in frames if frame.f_code.co_name in ("read_kineto", "_within"))


def test_progress_counts_every_trace(tmp_path: Path) -> None:
    for rank in range(3):
        kf.write(tmp_path / f"rank{rank}.json", busy(), kf.header(rank, 3))
    seen: list[tuple[str, int, int]] = []
    read_capture(tmp_path, cache=False, progress=lambda *step: seen.append(step))
    assert seen == [("read", n, 3) for n in range(4)]


def test_a_rank_that_cannot_be_is_left_out_and_said(tmp_path: Path) -> None:
    events = [nccl(100, 11, **{**MESSAGE, "Dst Rank": 2**53 + 1}), nccl(200, 12, **MESSAGE)]
    span = kf.span("gpu_user_annotation", f"nccl:send 0->{10**30}", 290, 70, pid=0, tid=9)
    rank = tables(tmp_path, [*events, span, nccl(300, 13)])
    assert rank.device["dst_rank"].to_list() == [None, MESSAGE["Dst Rank"], None]
    assert rank.device["in_elements"].to_list()[:2] == [MESSAGE["In msg nelems"]] * 2
    said = rank.losses.filter(pl.col("name") == "rank_impossible").select("severity", "count").rows()
    assert said == [("warning", 1)]

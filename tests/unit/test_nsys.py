"""nsys exports: the same tables as a torch.profiler trace, exact, and honest about what an export does not hold."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import cast

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nsys_export import Export, pid_of, tid_of

from traceana import schema
from traceana.errors import SourceError
from traceana.pipeline import Options, analyse
from traceana.sources.nsys import export_secrets
from traceana.sources.secret_scan import find_secrets
from traceana.tables.capture import RankTables
from traceana.tables.nsys import read_nsys

EPOCH = 1_795_970_791_144_221_540
SEND_RECV = "ncclDevKernel_SendRecv"


def rows(frame: pl.DataFrame, *columns: str) -> list[tuple[object, ...]]:
    return frame.select(pl.col(c).cast(pl.String()) if frame[c].dtype == pl.Categorical else c for c in columns).rows()


def losses(ranks: tuple[RankTables, ...]) -> dict[str, int]:
    return {name: count for rank in ranks for name, count in rank.losses.select("name", "count").iter_rows()}


def p2p(rank: RankTables) -> list[tuple[object, ...]]:
    kernels = rank.device.filter(pl.col("name").cast(pl.String()).str.starts_with(SEND_RECV))
    return rows(kernels, "ts_ns", "collective", "src_rank", "dst_rank")


def two_stages() -> Export:
    """Two processes on GPUs 0 and 1, one eager kernel each, and a graph of two kernels on the first."""
    export = Export()
    for device, pid in enumerate((300, 200)):  # the order of the GPUs is not that of the processes
        export.add("PROCESSES", globalPid=pid_of(pid), pid=pid, name="sglang::schedul")
        eager = export.call(pid, 100, 110, "cudaLaunchKernel_v7000")
        export.kernel(pid, device, 120, 121, "gemm(float)", eager)
    graph = export.call(300, 200, 260, "cudaGraphLaunch_v10000")
    export.kernel(300, 0, 250, 300, "fused_moe_kernel", graph)
    export.kernel(300, 0, 300, 350, "rmsnorm", graph)
    return export


def test_tables_are_exact(tmp_path: Path) -> None:
    export = two_stages()
    for device, table, extra in (
        (0, "CUPTI_ACTIVITY_KIND_MEMCPY", {"bytes": 128, "copyKind": 1, "srcKind": 1, "dstKind": 2}),
        (0, "CUPTI_ACTIVITY_KIND_MEMSET", {"bytes": 4, "memKind": 2}),
    ):
        export.add(
            table, start=10, end=15, deviceId=device, streamId=3, correlationId=1, globalPid=pid_of(300), **extra
        )
    export.range(300, 90, 400, "run_batch")
    export.range(300, 95, None, None, textId=export.string("step[DECODE bs=8]"))
    export.range(300, 96, 97, "aten::mm, seq = 4, op_id = 7")
    export.range(300, 98, 99, "recv_requests, op_id = 8")
    export.add("PROFILER_OVERHEAD", start=1, end=2, globalTid=tid_of(200, 5), nameId=export.string("Buffer Flush"))
    first, second = read_nsys(export.write(tmp_path / "x.sqlite", epoch_ns=EPOCH))
    assert (first.info.rank, first.info.pid, first.info.device, first.info.rank_source) == (0, 300, 0, "order")
    assert (second.info.rank, second.info.pid, second.info.device, second.info.base_time_ns) == (1, 200, 1, EPOCH)
    assert rows(first.device, "ts_ns", "end_ns", "kind", "name", "stream", "correlation", "bytes") == [
        (EPOCH + 10, EPOCH + 15, "memcpy", "Memcpy HtoD (Pinned -> Device)", 3, 1, 128),
        (EPOCH + 10, EPOCH + 15, "memset", "Memset (Device)", 3, 1, 4),
        (EPOCH + 120, EPOCH + 121, "kernel", "gemm(float)", 7, 1, None),
        (EPOCH + 250, EPOCH + 300, "kernel", "fused_moe_kernel", 7, 3, None),
        (EPOCH + 300, EPOCH + 350, "kernel", "rmsnorm", 7, 3, None),
    ]
    assert rows(first.calls, "ts_ns", "name", "pid", "tid", "correlation") == [
        (EPOCH + 100, "cudaLaunchKernel", 300, 300, 1),
        (EPOCH + 200, "cudaGraphLaunch", 300, 300, 3),
    ]
    assert rows(first.annotations, "ts_ns", "end_ns", "name", "finished") == [
        (EPOCH + 90, EPOCH + 400, "run_batch", True),
        (EPOCH + 95, EPOCH + 350, "step[DECODE bs=8]", False),
        (EPOCH + 98, EPOCH + 99, "recv_requests", True),
    ]
    assert rows(first.ops, "ts_ns", "name", "tid") == [(EPOCH + 96, "aten::mm", 300)]
    assert rows(second.overheads, "ts_ns", "name") == [(EPOCH + 1, "Buffer Flush")]
    assert first.device.schema == schema.DEVICE.polars_schema
    assert losses((first, second)) == {}


def test_a_range_that_the_stop_of_the_recording_ended_has_no_known_end(tmp_path: Path) -> None:
    """nsys writes the session's length for the end of what was open."""
    export = two_stages()
    export.add("ANALYSIS_DETAILS", globalVid=0, duration=900, startTime=5, stopTime=905)
    export.range(300, 90, 899, "recv_requests")
    export.range(300, 100, 900, "gloo:send", eventType=60)
    first = read_nsys(export.write(tmp_path / "x.sqlite", epoch_ns=0))[0]
    assert rows(first.annotations, "ts_ns", "end_ns", "name", "finished") == [
        (90, 899, "recv_requests", True), (100, 350, "gloo:send", False),
    ]  # fmt: skip


def test_what_the_export_lacks(tmp_path: Path) -> None:
    lacking = ("NVTX_EVENTS", "PROCESSES", "META_DATA_CAPTURE", "ENUM_CUDA_MEM_KIND", "PROFILER_OVERHEAD")
    ranks = read_nsys(two_stages().write(tmp_path / "x.sqlite", epoch_ns=None, without=lacking))
    assert [r.info.pid for r in ranks] == [300, 200]
    assert ranks[0].device.get_column("ts_ns")[0] == 120
    assert losses(ranks) == {"nsys_relative_time": 1, "nsys_no_spans": 1}


def test_ranks_from_process_names(tmp_path: Path) -> None:
    export = Export()
    for pid, name in (
        (11, "sglang::scheduler_PP1_TP0"),
        (12, "sglang::scheduler_PP0_TP1"),
        (13, "x_PP0_TP0"),
        (14, "x_PP1_TP1"),
    ):
        export.add("PROCESSES", globalPid=pid_of(pid), pid=pid, name=name)
        export.kernel(pid, pid - 11, 5, 6, "k", export.call(pid, 1, 2, "cudaLaunchKernel"))
    ranks = read_nsys(export.write(tmp_path / "x.sqlite"))
    assert [(r.info.rank, r.info.pid, r.info.pp_rank, r.info.tp_rank) for r in ranks] == [
        (0, 13, 0, 0), (1, 12, 0, 1), (2, 11, 1, 0), (3, 14, 1, 1),
    ]  # fmt: skip
    assert {r.info.rank_source for r in ranks} == {"content"}


def test_directions_of_two_ranks(tmp_path: Path) -> None:
    export = two_stages()
    export.p2p(300, 0, 1000, ["ncclSend"])
    export.p2p(300, 0, 2000, ["ncclRecv"])
    export.p2p(200, 1, 1000, ["ncclRecv", "ncclRecv"])
    export.p2p(200, 1, 2000, ["ncclSend", "ncclRecv"])  # an exchange: no direction
    lone = export.call(200, 3000, 3005, "cuLaunchKernelEx")  # outside any NCCL call
    export.kernel(200, 1, 3100, 3150, SEND_RECV + "()", lone)
    reduce = export.call(200, 4000, 4005, "cuLaunchKernelEx")
    export.kernel(200, 1, 4100, 4150, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", reduce)
    ranks = read_nsys(export.write(tmp_path / "x.sqlite", epoch_ns=0))
    assert p2p(ranks[0]) == [(1200, "send", None, 1), (2200, "recv", 1, None)]
    assert p2p(ranks[1]) == [(1200, "recv", 0, None), (2200, "sendrecv", None, None), (3100, None, None, None)]
    assert rows(ranks[1].device.tail(1), "collective", "src_rank") == [("allreduce", None)]
    assert losses(ranks) == {"nsys_p2p_direction_unknown": 1, "nsys_no_spans": 1}


def test_messages_before_and_after_what_the_hook_says_are_not_of_the_recording(tmp_path: Path) -> None:
    """nsys records a node's ranks from the first one's start on; the hook begins on each at that rank's own."""
    export = two_stages()
    for at in (1000, 2000, 3000):
        export.p2p(200, 1, at, ["ncclRecv"])
    export.range(200, 1990, 2100, "traceana.message[recv peer=0 elements=8 dtype=Int]")
    export.p2p(200, 1, 2500, ["ncclSend"])  # in between, by another library: as far as nsys tells
    export.range(200, 2700, 2710, "traceana.message[send peer=0 elements=8 dtype=Int]")  # and launches nothing
    export.p2p(300, 0, 1000, ["ncclSend"])  # this rank marks nothing at all
    ranks = read_nsys(export.write(tmp_path / "x.sqlite", epoch_ns=0))
    assert p2p(ranks[0]) == [(1200, "send", None, 1)]
    assert p2p(ranks[1]) == [
        (1200, "coalesced", None, None), (2200, "recv", 0, None), (2700, "send", None, 0),
        (3200, "coalesced", None, None),
    ]  # fmt: skip
    assert losses(ranks) == {"nsys_no_spans": 1}


def test_nested_groups_and_lone_calls(tmp_path: Path) -> None:
    export = two_stages()
    # recording began inside a group: its end comes without a start
    export.range(300, 500, 520, "ncclGroupEnd")
    # the inner end launches nothing; the outer one launches what both hold
    export.range(300, 1000, 1002, "ncclGroupStart")
    export.range(300, 1010, 1012, "ncclGroupStart")
    export.range(300, 1020, 1022, "ncclSend")
    export.range(300, 1030, 1032, "ncclGroupEnd")
    export.range(300, 1040, 1042, "ncclRecv")
    export.range(300, 1060, 1090, "ncclGroupEnd")
    export.kernel(300, 0, 1200, 1250, SEND_RECV, export.call(300, 1065, 1070, "cuLaunchKernelEx"))
    # without a group the call itself launches; the one after it is another message
    export.range(300, 2000, 2050, "ncclSend")
    export.kernel(300, 0, 2200, 2250, SEND_RECV, export.call(300, 2010, 2020, "cuLaunchKernelEx"))
    export.range(300, 3000, 3050, "ncclRecv")
    export.kernel(300, 0, 3200, 3250, SEND_RECV, export.call(300, 3010, 3020, "cuLaunchKernelEx"))
    # another thread's calls at the same time do not count
    export.add("NVTX_EVENTS", start=2005, end=2300, eventType=59, text="ncclRecv", globalTid=tid_of(300, 9), domainId=1)
    ranks = read_nsys(export.write(tmp_path / "x.sqlite", epoch_ns=0))
    assert p2p(ranks[0]) == [(1200, "sendrecv", None, None), (2200, "send", None, 1), (3200, "recv", 1, None)]


def test_peers_among_more_ranks_by_communicator(tmp_path: Path) -> None:
    export = Export()
    for device in range(3):
        pid = 10 + device
        export.kernel(pid, device, 5, 6, "k", export.call(pid, 1, 2, "cudaLaunchKernel"))
        export.p2p(
            pid, device, 1000, ["ncclSend"], payload=f'{{"NCCL communicator ID": "0x{device}a", "Peer rank": 1}}'
        )
        upstream = (device - 1) % 3
        export.p2p(
            pid, device, 2000, ["ncclRecv"], payload=f'{{"NCCL communicator ID": "0x{upstream}a", "Peer rank": 0}}'
        )
    export.p2p(10, 0, 3000, ["ncclSend"])
    ranks = read_nsys(export.write(tmp_path / "x.sqlite", epoch_ns=0))
    assert [p2p(r)[:2] for r in ranks] == [
        [(1200, "send", None, 1), (2200, "recv", 2, None)],
        [(1200, "send", None, 2), (2200, "recv", 0, None)],
        [(1200, "send", None, 0), (2200, "recv", 1, None)],
    ]
    assert p2p(ranks[0])[2] == (3200, "send", None, None)
    assert losses(ranks)["nsys_p2p_peer_unknown"] == 1


def test_graphs_as_one_piece(tmp_path: Path) -> None:
    export = two_stages()
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=500, end=900, deviceId=0, streamId=7, correlationId=77,
               globalPid=pid_of(300), graphId=4)  # fmt: skip
    ranks = read_nsys(export.write(tmp_path / "x.sqlite", epoch_ns=0))
    assert rows(ranks[0].device.tail(1), "ts_ns", "kind", "name") == [(500, "kernel", "CUDA graph 4")]
    assert losses(ranks) == {"nsys_graph_as_one": 1, "nsys_no_spans": 1, "kernel_without_launch": 1}


def test_impossible_rows_are_counted(tmp_path: Path) -> None:
    export = two_stages()
    export.kernel(300, 0, 900, 800, "backwards", 1)
    export.add("CUPTI_ACTIVITY_KIND_MEMSET", start=1, end=2, deviceId="text", streamId=3, globalPid=pid_of(300))
    export.add(
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", start=1, end=2, correlationId=999, globalPid=pid_of(300), syncType=3
    )
    # A process that only copies on a GPU is no rank.
    export.add(
        "CUPTI_ACTIVITY_KIND_MEMCPY", start=1, end=2, deviceId=5, streamId=3, correlationId=1, globalPid=pid_of(300)
    )
    ranks = read_nsys(export.write(tmp_path / "x.sqlite", epoch_ns=0))
    assert len(ranks) == 2
    assert losses(ranks) == {
        "event_negative_duration": 1,
        "nsys_activity_unplaced": 1,
        "nsys_activity_of_no_rank": 1,
        "nsys_no_spans": 1,
        "nsys_sync_without_call": 1,
        "nsys_shared_process": 1,
    }


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot open"):
        read_nsys(tmp_path / "gone.sqlite")
    (tmp_path / "text.sqlite").write_text("no database at all, but long enough to be read as one" * 40)
    with pytest.raises(SourceError, match="damaged nsys export"):
        read_nsys(tmp_path / "text.sqlite")
    with sqlite3.connect(tmp_path / "foreign.sqlite") as database:
        database.execute("CREATE TABLE users (id INTEGER)")
    database.close()
    with pytest.raises(SourceError, match="no export of nsys") as caught:
        read_nsys(tmp_path / "foreign.sqlite")
    assert caught.value.hint and caught.value.where == str(tmp_path / "foreign.sqlite")
    gpu = [t for t in ("KERNEL", "GRAPH_TRACE", "MEMCPY", "MEMSET")]
    path = two_stages().write(tmp_path / "cpu.sqlite", without=[f"CUPTI_ACTIVITY_KIND_{t}" for t in gpu])
    with pytest.raises(SourceError, match="no GPU activity"):
        read_nsys(path)


def test_locked_and_unchanged(tmp_path: Path) -> None:
    path = two_stages().write(tmp_path / "x.sqlite")
    before = path.read_bytes()
    holder = sqlite3.connect(path)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        assert len(read_nsys(path)) == 2
    finally:
        holder.close()
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.sqlite"]


def test_view_in_place_of_a_table(tmp_path: Path) -> None:
    path = two_stages().write(tmp_path / "x.sqlite", without=["NVTX_EVENTS"])
    with sqlite3.connect(path) as database:
        database.execute("CREATE VIEW NVTX_EVENTS AS SELECT load_extension('x') AS start")
    database.close()
    assert losses(read_nsys(path)) == {"nsys_no_spans": 1}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_is_an_error_or_a_loss(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x.sqlite"
    path.unlink(missing_ok=True)
    export = two_stages()
    export.p2p(300, 0, 1000, ["ncclSend"])
    content = bytearray(export.write(path, epoch_ns=0).read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + 20] = data.draw(st.binary(min_size=20, max_size=20))
    path.write_bytes(bytes(content[: data.draw(st.integers(1, len(content)))]))
    try:
        ranks = read_nsys(path)
    except SourceError:
        return
    for rank in ranks:
        assert rank.device.filter(pl.col("end_ns") < pl.col("ts_ns")).height == 0


ODD = st.sampled_from([None, -(2**63), 2**63 - 1, -1, 0, 1 << 40, 1.5, "text", b"\xff\x00", "\x1b[31m"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_odd_values_are_an_error_or_a_loss(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x.sqlite"
    path.unlink(missing_ok=True)
    export = two_stages()
    export.p2p(300, 0, 1000, ["ncclSend"])
    export.range(300, 90, 400, "run_batch")
    export.write(path, epoch_ns=EPOCH)
    with sqlite3.connect(path) as database:
        for _ in range(data.draw(st.integers(1, 5))):
            tables = [t for t, _ in export.rows]
            table = data.draw(st.sampled_from(sorted(set(tables))))
            column = data.draw(st.sampled_from([str(r[1]) for r in database.execute(f"PRAGMA table_info({table})")]))
            row = data.draw(st.integers(1, 5))
            try:
                database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (data.draw(ODD), row))
            except sqlite3.IntegrityError:
                continue
    database.close()
    try:
        ranks = read_nsys(path)
    except SourceError:
        return
    for rank in ranks:
        assert rank.device.filter(pl.col("end_ns") < pl.col("ts_ns")).height == 0
        assert rank.annotations.filter(pl.col("end_ns") < pl.col("ts_ns")).height == 0


def test_secrets_are_named_and_not_read(tmp_path: Path) -> None:
    export = two_stages()
    export.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value='HF_TOKEN="s3cr3t"')
    export.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE", value='HF_API_KEY=""')
    export.add("META_DATA_CAPTURE", name="PROCESS_0:ARGUMENT_0", value="--api-key")
    export.add("META_DATA_CAPTURE", name="PROCESS_0:ARGUMENT_1", value="s3cr3t")
    export.add("TARGET_INFO_SYSTEM_ENV", name="DeviceEnvironment", value="A=1;WANDB_API_KEY=s3cr3t;B=2")
    output = export.string("server_args=ServerArgs(admin_api_key='s3cr3t', port=1)")
    export.add("ProcessStreams", globalPid=pid_of(300), filenameId=output, contentId=output)
    path = export.write(tmp_path / "x.sqlite")
    assert export_secrets(path) == ["HF_TOKEN", "WANDB_API_KEY", "admin_api_key", "api-key"]
    found = find_secrets(tmp_path)
    assert found.select("name", "severity", "count").rows() == [("secret_in_capture", "warning", 4)]
    assert "s3cr3t" not in found.write_csv()
    for rank in read_nsys(path):
        assert "s3cr3t" not in repr(rank.info)
        for frame in (rank.device, rank.calls, rank.annotations, rank.ops, rank.overheads, rank.losses):
            assert "s3cr3t" not in frame.write_csv()


def test_graphs_are_told_by_their_launches(tmp_path: Path) -> None:
    """Without spans there are no forwards to tell, but there are launches."""
    export = two_stages()
    last = export.call(200, 390, 395, "cudaLaunchKernel_v7000")
    export.kernel(200, 1, 400, 410, "gemm(float)", last)  # the window is what both ranks have
    report = analyse(export.write(tmp_path / "report.sqlite"), Options(cache=False))
    rows = cast("list[dict[str, int]]", report.document["cuda_graph"])
    assert [(r["launched"], r["by_graphs"]) for r in rows] == [(3, 2), (1, 0)]
    answer = cast("list[dict[str, object]]", report.document["answers"])[3]
    assert answer["known"] is True
    assert str(answer["answer"]).startswith("CUDA graphs launch 50 % of the 4 GPU activities")

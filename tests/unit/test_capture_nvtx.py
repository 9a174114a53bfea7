"""Spans said to nsys, by a torch of the test's own: what is pushed, popped, started and ended, in order."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from traceana.tables.nsys_p2p import MESSAGE
from traceana_capture import hook, nvtx
from traceana_capture.nvtx import NvtxSpans


class Said:
    """torch._C._nvtx, written down."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.handles = 0

    def rangePushA(self, name: str) -> None:
        self.lines.append(f"push {name}")

    def rangePop(self) -> None:
        self.lines.append("pop")

    def rangeStartA(self, name: str) -> int:
        self.handles += 1
        self.lines.append(f"start {name} {self.handles}")
        return self.handles

    def rangeEnd(self, handle: int) -> None:
        self.lines.append(f"end {handle}")


class Tensor:
    def __init__(self, *, cuda: bool) -> None:
        self.is_cuda, self.dtype = cuda, "torch.bfloat16"

    def numel(self) -> int:
        return 4096


class Work:
    def wait(self, timeout: float | None = None) -> bool:
        return True


class Span:
    """record_function, which counts what it is told."""

    entered = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> Span:
        Span.entered += 1
        return self

    def __exit__(self, *error: Any) -> None:
        return None


def broken(tensor: Tensor, dst: int, group: object = None) -> Work:
    raise RuntimeError("no peer")


@pytest.fixture(autouse=True)
def _span_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(Span, name, getattr(Span, name))


def a_torch() -> Any:
    distributed: Any = SimpleNamespace(
        is_available=lambda: True, Work=type("Work", (Work,), {"wait": Work.wait}), send=lambda tensor, dst, group=None: None,
        recv=lambda tensor, src=None, group=None: 0, irecv=lambda tensor, src=None, group=None: distributed.Work(),
        isend=lambda tensor, dst, group=None: distributed.Work(),
    )  # fmt: skip
    for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        setattr(distributed, name, lambda tensor, *rest: None)
    runtime = SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)
    return SimpleNamespace(
        _C=SimpleNamespace(_nvtx=Said(), _cudart=runtime), distributed=distributed,
        autograd=SimpleNamespace(_profiler_enabled=lambda: False),
        profiler=SimpleNamespace(record_function=Span),
    )  # fmt: skip


def test_spans_nest_and_a_send_that_outlives_its_call_ends_with_its_wait() -> None:
    torch = a_torch()
    spans, said = NvtxSpans(torch), torch._C._nvtx
    spans.begin()
    with torch.profiler.record_function("run"):
        work = torch.distributed.isend(Tensor(cuda=False), 1)
    with torch.profiler.record_function("commit"):
        work.wait()
    assert said.lines == ["push run", "start gloo:send 1", "pop", "push commit", "end 1", "pop"]


def test_messages_of_nccl_say_peer_size_and_type_and_waits_are_ops() -> None:
    torch = a_torch()
    spans, said = NvtxSpans(torch), torch._C._nvtx
    spans.begin()
    torch.distributed.isend(Tensor(cuda=True), dst=1).wait()
    torch.distributed.irecv(Tensor(cuda=True), 0).wait()
    torch.distributed.recv(Tensor(cuda=False), src=0)
    torch.distributed.all_reduce(Tensor(cuda=True))
    torch.distributed.all_reduce(Tensor(cuda=False))
    first, second = said.lines[0].removeprefix("push "), said.lines[4].removeprefix("push ")
    assert first == "traceana.message[send peer=1 elements=4096 dtype=BFloat16]"
    assert re.match(MESSAGE, first) and re.match(MESSAGE, second)["collective"] == "recv"  # type: ignore[index]
    rest = [line for i, line in enumerate(said.lines) if i not in (0, 4)]
    comm = ["push record_param_comms", "pop"]
    assert rest == ["pop", *comm, "pop", *comm, "start gloo:recv 1", "end 1", *comm]


def test_spans_made_before_the_recording_are_said_and_those_entered_before_it_are_not() -> None:
    """SGLang has decorators, whose one object was made at import and is entered again and again."""
    torch = a_torch()
    spans, said = NvtxSpans(torch), torch._C._nvtx
    decorator = torch.profiler.record_function("copy_result_to_cpu")
    with decorator:
        spans.begin()
        with decorator, decorator:
            pass
    assert said.lines == ["push copy_result_to_cpu"] * 2 + ["pop"] * 2
    spans.end()


def test_a_server_that_asks_for_a_profiler_hears_of_nsys() -> None:
    """SGLang makes `scheduler.*` and `step[..]` spans only while a profiler is on."""
    torch = a_torch()
    before = torch.autograd._profiler_enabled
    spans = NvtxSpans(torch)
    spans.begin()
    taken = torch.autograd._profiler_enabled  # by a module that was imported meanwhile
    assert taken() is True
    spans.end()
    assert torch.autograd._profiler_enabled is before and taken() is False


def test_an_error_passes_and_leaves_nothing_open() -> None:
    torch = a_torch()
    torch.distributed.isend = broken
    spans, said = NvtxSpans(torch), torch._C._nvtx
    spans.begin()
    for cuda in (True, False):
        with pytest.raises(RuntimeError, match="no peer"), torch.profiler.record_function("span"):
            torch.distributed.isend(Tensor(cuda=cuda), 1)
    assert said.lines.count("pop") == 3 and sum(x.startswith("push") for x in said.lines) == 3
    assert said.lines[-2:] == ["end 1", "pop"]


def test_torch_is_untouched_outside_of_the_range() -> None:
    torch = a_torch()
    before = {n: getattr(torch.distributed, n) for n in ("isend", "irecv", "send", "recv", "all_reduce")}
    wait, runtime, enter = torch.distributed.Work.wait, torch._C._cudart, Span.__enter__
    spans, said = NvtxSpans(torch), torch._C._nvtx
    spans.watch(runtime)
    assert not spans.recording() and Span.__enter__ is enter
    assert runtime.cudaProfilerStart() == 0
    spans.begin()  # twice is once
    assert spans.recording() and Span.__enter__ is not enter
    torch.distributed.isend(Tensor(cuda=False), 1)  # nobody waits for it
    with torch.profiler.record_function("open at the stop"):
        assert runtime.cudaProfilerStop() == 0
    # No end is told of the message, which may not have been sent.
    assert said.lines == ["start gloo:send 1", "push open at the stop", "pop"] and not spans.recording()
    assert Span.__enter__ is enter and torch.distributed.Work.wait is wait
    assert {n: getattr(torch.distributed, n) for n in before} == before


def test_the_hook_says_who_it_is_and_marks_slots_while_nsys_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = a_torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv(nvtx.ENVIRONMENT, "1")
    spans, said = NvtxSpans(torch), torch._C._nvtx
    monkeypatch.setattr(nvtx, "_spans", spans)
    rank = hook.RankHook(tmp_path, rank=3, stage=1, place={"pp_rank": 1, "pp_size": 4, "tp_rank": 1, "tp_size": 2})
    with rank.slot(0, 8, "DECODE"):
        pass
    assert said.lines == []  # nothing records
    spans.begin()
    for slot in (1, 2):
        with rank.slot(slot, 8, "DECODE"):
            pass
    assert said.lines == [
        "push traceana.rank[rank=3 pp=1/4 tp=1/2]", "pop",
        "push traceana.slot[mb=1 stage=1 DECODE bs=8 n=2]", "pop", "push traceana.slot[mb=2 stage=1 DECODE bs=8 n=3]", "pop",
    ]  # fmt: skip


def test_a_rank_that_calls_no_cuda_profiler_begins_with_sglangs_own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang 0.5.16 does it: cudaProfilerStart on the first GPU of a node only, `profile_in_progress` on all."""
    torch, enter = a_torch(), Span.__enter__
    spans = NvtxSpans(torch)
    spans.watch(torch._C._cudart)
    monkeypatch.setattr(nvtx, "_spans", spans)

    class Manager:
        profile_in_progress = False
        profiler_activities: list[str] | None = None

        def start(self, *, works: bool = True) -> str:
            self.profile_in_progress = works
            return "started"

        def stop(self) -> str:
            assert not spans.recording()  # what the stop itself does is not in the trace
            return "stopped"

    manager = Manager()
    assert nvtx.around_start(Manager.start, manager) == "started" and not spans.recording()
    manager.profiler_activities = ["CPU", "GPU"]
    nvtx.around_start(Manager.start, manager)
    assert not spans.recording()  # torch.profiler sees them by itself
    manager.profiler_activities = ["CUDA_PROFILER"]
    nvtx.around_start(Manager.start, manager, works=False)
    assert not spans.recording()
    nvtx.around_start(Manager.start, manager)
    assert spans.recording() and Span.__enter__ is not enter
    assert nvtx.around_stop(Manager.stop, manager) == "stopped" and Span.__enter__ is enter

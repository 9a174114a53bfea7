"""The in-process hook: starts torch.profiler in a rank at an agreed step, and marks every micro-batch.

It runs inside the server. With the environment variable TRACEANA_CAPTURE_HOOK unset nothing is installed and nothing
costs anything; with it set, a step costs two calls (0.3 us) until a capture arms the hook. Ranks and the capture talk
through files in the folder that the variable names (`hook_client` is the other side):

    request.json              the capture asks: {id}
    ID/rank-R.json            each rank answers: who it is, and how many steps it has run
    ID/go.json                from which step to which, and what to record: a profile, or step times without one
    ID/rank-R.done.json       the rank has written its file, or says why not

All ranks count the same steps, so all start and stop at the same micro-batch, whatever their threads do meanwhile. A
capture that dies leaves a profile that ends by itself at its last step.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, cast

from traceana_capture import nvtx
from traceana_capture.clock import paired_reading

__all__ = ["ENVIRONMENT", "RankHook", "plugin"]

ENVIRONMENT = "TRACEANA_CAPTURE_HOOK"
_POLL_S = 0.2
_ARMED_POLL_S = 0.02
_OFF: AbstractContextManager[object] = nullcontext()


class RankHook:
    """One rank's side. The engine calls `slot(...)` around every micro-batch step, always from the same thread."""

    def __init__(self, folder: Path, *, rank: int, stage: int, place: dict[str, int] | None = None) -> None:
        self.folder = folder
        self.rank = rank
        self.stage = stage
        self.place = place or {}
        self.ordinal = 0  # micro-batch steps so far
        self._plan: dict[str, Any] | None = None
        self._recorder: _Recorder | None = None
        self._profiling: Callable[[], bool] | None = None
        self._named = False  # whether nsys has been told who this is, since it records
        self._thread = threading.Thread(target=self._listen, name="traceana-hook", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls, *, rank: int, stage: int, place: dict[str, int] | None = None) -> RankHook | None:
        """The hook of this rank, or None where TRACEANA_CAPTURE_HOOK names no folder."""
        folder = os.environ.get(ENVIRONMENT)
        return cls(Path(folder), rank=rank, stage=stage, place=place) if folder else None

    def slot(
        self, micro_batch: int, batch_size: int, mode: str, tokens: int | None = None
    ) -> AbstractContextManager[object]:
        """To be entered around one micro-batch step: slot number, requests, forward mode (DECODE, EXTEND, ...)."""
        self.ordinal += 1
        if self._plan is None:
            profiling = self._profiling or self._find_profiler()
            if not profiling():
                self._named = False
                return _OFF
        return self._armed_slot(micro_batch, batch_size, mode, tokens)

    def forward(self) -> AbstractContextManager[object]:
        """To be entered around the forward inside a slot, on its stream: times it without a profiler."""
        recorder = self._recorder
        return _OFF if recorder is None else recorder.forward()

    def _armed_slot(
        self, micro_batch: int, batch_size: int, mode: str, tokens: int | None
    ) -> AbstractContextManager[object]:
        plan = self._plan
        if plan is not None:
            if self._recorder is not None and self.ordinal >= plan["stop"]:
                self._finish(plan)
            elif self._recorder is None and self.ordinal == plan["start"]:
                self._begin(plan)
            elif self._recorder is None and self.ordinal > plan["start"]:
                self._done(plan, {"fault": f"the start at step {plan['start']} was missed at step {self.ordinal}"})
        facts = {
            "ordinal": self.ordinal,
            "micro_batch": micro_batch,
            "mode": mode,
            "batch_size": batch_size,
            "tokens": tokens,
        }
        if self._recorder is not None:
            return self._recorder.slot(facts, self.stage)
        if nvtx.recording() and not self._named:
            with _span(f"traceana.rank[{_place_text(self.rank, self.place)}]"):
                self._named = True
        if self._profiling is not None and self._profiling():  # somebody else's: /start_profile's, or nsys
            return _mark(facts, self.stage)
        return _OFF

    def _find_profiler(self) -> Callable[[], bool]:
        """Torch's own answer to whether a profiler runs, once torch is there. The hook never imports it by itself."""
        if "torch" not in sys.modules:
            return _no_profiler
        torch: Any = importlib.import_module("torch")

        enabled = cast("Callable[[], bool]", getattr(torch.autograd, "_profiler_enabled", _no_profiler))
        self._profiling = (lambda: enabled() or nvtx.recording()) if os.environ.get(nvtx.ENVIRONMENT) else enabled
        return self._profiling

    def _begin(self, plan: dict[str, Any]) -> None:
        try:
            self._recorder = _Profiler(plan) if plan["record"] == "profile" else _StepTimes()
        except Exception as error:  # the server must live on, whatever torch says
            self._done(plan, {"fault": f"cannot start ({error})"})

    def _finish(self, plan: dict[str, Any]) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None, "checked by the caller"
        path = Path(plan["output"]) / plan["names"][str(self.rank)]
        recorder.stopped_ns = time.time_ns()
        try:
            recorder.write(path)
            facts = {"file": path.name, "bytes": path.stat().st_size, "steps": plan["stop"] - plan["start"]}
            self._done(plan, {**facts, "started_ns": recorder.started_ns, "stopped_ns": recorder.stopped_ns})
        except Exception as error:  # a full disk must not take the server down
            self._done(plan, {"fault": f"cannot write {path} ({error})"})

    def _done(self, plan: dict[str, Any], facts: dict[str, Any]) -> None:
        self._plan = None
        _write(
            self.folder / plan["id"] / f"rank-{self.rank}.done.json",
            {"rank": self.rank, "at_ns": time.time_ns(), **facts},
        )

    def _listen(self) -> None:
        served: str | None = None
        while True:
            time.sleep(_POLL_S)
            request = _read(self.folder / "request.json")
            wanted = request.get("id") if request else None
            if not isinstance(wanted, str) or wanted == served:
                continue
            served = wanted
            with contextlib.suppress(OSError):
                self._serve(wanted, float(request.get("seconds", 30.0)) if request else 30.0)

    def _serve(self, wanted: str, seconds: float) -> None:
        folder = self.folder / wanted
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            _write(folder / f"rank-{self.rank}.json", self._facts())
            go = _read(folder / "go.json")
            if go:
                self._plan = {**go, "id": wanted}
                break
            time.sleep(_ARMED_POLL_S)
        while self._plan is not None:  # an abort ends the profile at the rank's next step
            if (folder / "abort").exists():
                self._plan = {**self._plan, "stop": 0, "start": self._plan["start"] if self._recorder else -1}
                return
            time.sleep(_POLL_S)

    def _facts(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "stage": self.stage,
            **self.place,
            "ordinal": self.ordinal,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "clock": paired_reading(8),
            "torch": _torch_facts(),
        }


def _no_profiler() -> bool:
    return False


def _span(name: str) -> AbstractContextManager[object]:
    torch: Any = importlib.import_module("torch")
    return cast("AbstractContextManager[object]", torch.profiler.record_function(name))


def _place_text(rank: int, place: dict[str, int]) -> str:
    sizes = ((k, place.get(f"{k}_rank", 0), place.get(f"{k}_size", 1)) for k in ("pp", "tp"))
    return " ".join((f"rank={rank}", *(f"{k}={at}/{size}" for k, at, size in sizes)))


def _mark(facts: dict[str, Any], stage: int) -> AbstractContextManager[object]:
    tokens = "" if facts["tokens"] is None else f" toks={facts['tokens']}"
    name = (
        f"mb={facts['micro_batch']} stage={stage} {facts['mode']} bs={facts['batch_size']}{tokens} n={facts['ordinal']}"
    )
    return _span(f"traceana.slot[{name}]")


class _Recorder:
    """What happens between the agreed first and last step."""

    started_ns = 0
    stopped_ns = 0

    def slot(self, facts: dict[str, Any], stage: int) -> AbstractContextManager[object]:
        raise NotImplementedError

    def forward(self) -> AbstractContextManager[object]:
        return _OFF

    def write(self, path: Path) -> None:
        raise NotImplementedError


class _Profiler(_Recorder):
    """torch.profiler with the least disturbing settings; every slot is marked with what it is."""

    kept: ClassVar[list[object]] = []  # libkineto of torch 2.11 corrupts the heap when a finished profiler is freed

    def __init__(self, plan: dict[str, Any]) -> None:
        torch: Any = importlib.import_module("torch")

        kinds = torch.profiler.ProfilerActivity
        wanted = [kinds.CPU] if "CPU" in plan["activities"] else []
        if "GPU" in plan["activities"] and torch.cuda.is_available():
            wanted.append(kinds.CUDA)
        self._profile = torch.profiler.profile(
            activities=wanted, with_stack=False, record_shapes=bool(plan.get("record_shapes"))
        )
        self._profile.start()
        self.started_ns = time.time_ns()

    def slot(self, facts: dict[str, Any], stage: int) -> AbstractContextManager[object]:
        return _mark(facts, stage)

    def write(self, path: Path) -> None:
        self._profile.stop()
        _Profiler.kept.append(self._profile)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(
            "." + path.name.removesuffix(".gz") + ".part" + (".gz" if path.suffix == ".gz" else "")
        )
        try:
            self._profile.export_chrome_trace(str(partial))
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


class _StepTimes(_Recorder):
    """Step times without a profiler: host times of the slot, and the forward's span on its stream by two CUDA events
    (resolution half a microsecond), placed on the wall clock by one event at the start."""

    def __init__(self) -> None:
        torch: Any = sys.modules.get("torch")  # an engine without torch has host times only
        self._cuda = torch.cuda if torch is not None and torch.cuda.is_available() else None
        self._rows: list[dict[str, Any]] = []
        if self._cuda is not None:
            self._cuda.synchronize()
            self._origin = self._cuda.Event(enable_timing=True)
            self._origin.record()
            self._origin.synchronize()
        self._origin_ns = self.started_ns = time.time_ns()

    @contextlib.contextmanager
    def _slot(self, facts: dict[str, Any]) -> Any:
        self._rows.append({**facts, "start_ns": time.time_ns()})
        yield
        self._rows[-1]["end_ns"] = time.time_ns()

    def slot(self, facts: dict[str, Any], stage: int) -> AbstractContextManager[object]:
        return self._slot(facts)

    @contextlib.contextmanager
    def _forward(self) -> Any:
        first, last = (self._cuda.Event(enable_timing=True) for _ in range(2)) if self._cuda else (None, None)
        if first is not None:
            first.record()
        begin = time.time_ns()
        yield
        self._rows[-1].update(launch_start_ns=begin, launch_end_ns=time.time_ns())
        if last is not None:
            last.record()
            self._rows[-1]["events"] = (first, last)

    def forward(self) -> AbstractContextManager[object]:
        return self._forward() if self._rows else _OFF

    def write(self, path: Path) -> None:
        if self._cuda is not None:
            self._cuda.synchronize()
        for row in self._rows:
            first, last = row.pop("events", (None, None))
            if first is not None:
                row["gpu_start_ns"] = self._origin_ns + round(self._origin.elapsed_time(first) * 1e6)
                row["gpu_end_ns"] = self._origin_ns + round(self._origin.elapsed_time(last) * 1e6)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, {"steps": self._rows})


def plugin() -> None:
    """SGLang's plugin entry point (group `sglang.srt.plugins`): wraps the pipeline's launch of a micro-batch and the
    forward inside it; with TRACEANA_CAPTURE_NVTX spans are said to nsys. Does nothing unless TRACEANA_CAPTURE_HOOK is
    set."""
    if not os.environ.get(ENVIRONMENT):
        return
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    register, around = registry.HookRegistry.register, registry.HookType.AROUND
    if os.environ.get(nvtx.ENVIRONMENT):
        nvtx.install()
        manager = "sglang.srt.managers.scheduler_components.profiler_manager.SchedulerProfilerManager"
        register(f"{manager}._start_profile", nvtx.around_start, around)
        register(f"{manager}._stop_profile", nvtx.around_stop, around)
    register("sglang.srt.managers.scheduler_pp_mixin.SchedulerPPMixin._pp_launch_batch", _around_launch, around)
    register("sglang.srt.managers.scheduler.Scheduler.run_batch", _around_forward, around)


_hook: RankHook | None = None


def _of(scheduler: Any) -> RankHook:
    global _hook
    if _hook is None:
        place = {k: _rank_of(scheduler, k) for k in ("pp_rank", "tp_rank", "dp_rank", "pp_size", "tp_size")}
        rank = place["pp_rank"] * max(place["tp_size"], 1) + place["tp_rank"]
        _hook = RankHook(Path(os.environ[ENVIRONMENT]), rank=rank, stage=place["pp_rank"], place=place)
    return _hook


def _rank_of(scheduler: Any, name: str) -> int:
    for holder in (getattr(scheduler, "ps", None), scheduler, getattr(scheduler, "server_args", None)):
        value = getattr(holder, name, None)
        if isinstance(value, int):
            return value
    return 1 if name.endswith("_size") else 0


def _around_launch(
    original: Callable[..., Any], scheduler: Any, micro_batch: int, batch: Any, *rest: Any, **named: Any
) -> Any:
    with _of(scheduler).slot(micro_batch, *_shape(batch)):
        return original(scheduler, micro_batch, batch, *rest, **named)


def _around_forward(original: Callable[..., Any], scheduler: Any, batch: Any, *rest: Any, **named: Any) -> Any:
    hook = _of(scheduler)
    if hook.place.get("pp_size", 1) > 1:
        with hook.forward():
            return original(scheduler, batch, *rest, **named)
    with hook.slot(0, *_shape(batch)), hook.forward():  # without a pipeline there is no other launch
        return original(scheduler, batch, *rest, **named)


def _shape(batch: Any) -> tuple[int, str, int | None]:
    mode = str(getattr(getattr(batch, "forward_mode", None), "name", "?"))
    tokens = getattr(batch, "extend_num_tokens", None) if mode != "DECODE" else None
    return len(getattr(batch, "reqs", ())), mode, tokens if isinstance(tokens, int) else None


def _torch_facts() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    facts: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # CUDA not initialised, an older torch without uuid, one that is being loaded
        facts["version"] = str(torch.__version__)
        if torch.cuda.is_initialized():
            index = torch.cuda.current_device()
            facts.update(device=index, gpu_uuid=f"GPU-{torch.cuda.get_device_properties(index).uuid}")
    return facts


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _write(path: Path, document: object) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps(document))
    os.replace(partial, path)

"""SGLang's spans for nsys, which does not see torch's: while it records, they are NVTX ranges too.

torch's own way (`emit_nvtx`) pops a range when an asynchronous gloo send is over, whatever range is on top by then, and so
moves the ends of all spans around it. Here `record_function` pushes and pops in its own block, messages between stages
have ranges with a handle, and NCCL's operations and the waits for them are named as torch.profiler names them.

While the server profiles for nsys, functions of torch are exchanged; before and after it is untouched. SGLang calls
`cudaProfilerStart` and `cudaProfilerStop` on the first rank of a node only, for all its processes; the other ranks begin and
end with their own start and stop of the profile (`around_start`, `around_stop`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["ENVIRONMENT", "NvtxSpans", "around_start", "around_stop", "install"]

ENVIRONMENT = "TRACEANA_CAPTURE_NVTX"
_SENDS, _RECEIVES = ("send", "isend"), ("recv", "irecv")
_COLLECTIVES = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_NCCL = "record_param_comms"
# As torch.profiler writes them.
_TYPES = {
    "bfloat16": "BFloat16", "float16": "Half", "float32": "Float", "float64": "Double", "bool": "Bool", "uint8": "Byte",
    "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long", "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e5m2": "Float8_e5m2",
}  # fmt: skip


class NvtxSpans:
    """The exchange. `begin` and `end` are called on the scheduler's thread; both may be called twice."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._nvtx = torch._C._nvtx
        self._before: list[tuple[Any, str, Any]] = []
        # By id of the work: the work, and its range if it is gloo's.
        self._open: dict[int, tuple[object, int | None]] = {}

    def recording(self) -> bool:
        """Whether spans are NVTX ranges now."""
        return bool(self._before)

    def watch(self, cudart: Any) -> None:
        """Begin and end with the CUDA runtime's profiler range; `cudart` is torch's module of it."""
        for name, react, first in (("cudaProfilerStart", self.begin, True), ("cudaProfilerStop", self.end, False)):
            setattr(cudart, name, _joined(getattr(cudart, name), react, first=first))

    def begin(self) -> None:
        """Exchange torch's functions."""
        if self._before:
            return
        torch = self._torch
        distributed = torch.distributed
        self._exchange_span(torch.profiler.record_function)
        # SGLang asks before it makes `scheduler.*` and `step[..]`, the only spans of a server without a pipeline.
        enabled = torch.autograd._profiler_enabled
        self._exchange(torch.autograd, "_profiler_enabled", lambda: self.recording() or enabled())
        if not distributed.is_available():
            return
        for name in (*_SENDS, *_RECEIVES):
            self._exchange(distributed, name, self._message(getattr(distributed, name), sends=name in _SENDS))
        for name in _COLLECTIVES:
            self._exchange(distributed, name, self._operation(getattr(distributed, name)))
        self._exchange(distributed.Work, "wait", self._wait(distributed.Work.wait))

    def end(self) -> None:
        """Put them back. What is open stays so: a message that nobody has waited for has no end to tell."""
        while self._before:
            setattr(*self._before.pop())
        self._open.clear()

    def _exchange(self, owner: Any, name: str, new: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _exchange_span(self, span: Any) -> None:
        """In the class, not for it: decorators hold objects that were made long before. A `with` looks both methods up
        as it begins, so what is open when recording begins or ends pops what it has pushed and no more."""
        nvtx, enter, leave = self._nvtx, span.__enter__, span.__exit__

        def entered(this: Any) -> Any:
            nvtx.rangePushA(this.name)
            return enter(this)

        def left(this: Any, *error: Any) -> Any:
            try:
                return leave(this, *error)
            finally:
                nvtx.rangePop()

        self._exchange(span, "__enter__", entered)
        self._exchange(span, "__exit__", left)

    def _message(self, original: Callable[..., Any], *, sends: bool) -> Callable[..., Any]:
        """A message of the pipeline: a tensor on the CPU goes through gloo, one on a GPU through NCCL."""
        nvtx, kept = self._nvtx, self._open
        gloo = "gloo:send" if sends else "gloo:recv"

        @functools.wraps(original)
        def message(tensor: Any, *rest: Any, **named: Any) -> Any:
            handle = None if tensor.is_cuda else nvtx.rangeStartA(gloo)
            if handle is None:
                peer = rest[0] if rest else named.get("dst" if sends else "src")
                nvtx.rangePushA(_said(tensor, peer, sends=sends))
            work = None
            try:
                work = original(tensor, *rest, **named)
                return work
            finally:
                if handle is None:
                    nvtx.rangePop()
                if hasattr(work, "wait"):
                    kept[id(work)] = (work, handle)
                elif handle is not None:  # it has been sent or received
                    nvtx.rangeEnd(handle)

        return message

    def _operation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        nvtx = self._nvtx

        @functools.wraps(original)
        def operation(tensor: Any, *rest: Any, **named: Any) -> Any:
            if not tensor.is_cuda:
                return original(tensor, *rest, **named)
            nvtx.rangePushA(_NCCL)
            try:
                return original(tensor, *rest, **named)
            finally:
                nvtx.rangePop()

        return operation

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        nvtx, kept = self._nvtx, self._open

        @functools.wraps(original)
        def wait(work: Any, *rest: Any, **named: Any) -> Any:
            _, handle = kept.pop(id(work), (None, None))
            if handle is None:
                nvtx.rangePushA(_NCCL)
            try:
                return original(work, *rest, **named)
            finally:
                if handle is None:
                    nvtx.rangePop()
                else:
                    nvtx.rangeEnd(handle)

        return wait


def _said(tensor: Any, peer: object, *, sends: bool) -> str:
    """What a trace of torch says of an NCCL message in the arguments of its op."""
    if not isinstance(peer, int):  # it is named by its place in the group
        return _NCCL
    dtype = str(tensor.dtype).removeprefix("torch.")
    way = "send" if sends else "recv"
    return f"traceana.message[{way} peer={peer} elements={tensor.numel()} dtype={_TYPES.get(dtype, dtype)}]"


def _joined(original: Callable[..., Any], react: Callable[[], None], *, first: bool) -> Callable[..., Any]:
    """`original` with `react` after it (`first`: what nsys records begins with it) or before it."""

    def call(*arguments: Any) -> Any:
        if first:
            result = original(*arguments)
            react()
            return result
        react()
        return original(*arguments)

    return call


_spans: NvtxSpans | None = None


def install() -> None:
    """Have this process say its spans to nsys. Without a CUDA build of torch there is nothing to do."""
    global _spans
    torch: Any = importlib.import_module("torch")
    cudart, nvtx = getattr(torch._C, "_cudart", None), getattr(torch._C, "_nvtx", None)
    if _spans is None and cudart is not None and nvtx is not None:
        importlib.import_module("torch.distributed")
        importlib.import_module("torch.profiler")
        _spans = NvtxSpans(torch)
        _spans.watch(cudart)


def around_start(original: Callable[..., Any], manager: Any, *rest: Any, **named: Any) -> Any:
    """SGLang's start of a profile on one rank: where it is for nsys, and has begun, spans begin."""
    result = original(manager, *rest, **named)
    wanted = getattr(manager, "profiler_activities", None) or ()
    if _spans is not None and "CUDA_PROFILER" in wanted and getattr(manager, "profile_in_progress", False):
        _spans.begin()
    return result


def around_stop(original: Callable[..., Any], manager: Any, *rest: Any, **named: Any) -> Any:
    """SGLang's stop of a profile on one rank."""
    if _spans is not None:
        _spans.end()
    return original(manager, *rest, **named)


def recording() -> bool:
    """Whether spans are NVTX ranges now."""
    return _spans is not None and _spans.recording()

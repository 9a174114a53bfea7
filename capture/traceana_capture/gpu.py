"""GPU samples through NVML (libnvidia-ml by ctypes), or through nvidia-smi where that cannot be loaded."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

__all__ = ["COLUMNS", "GpuSampler", "Nvml", "open_nvml"]

COLUMNS = "epoch_ns,gpu,util_gpu,util_mem,power_mw,power_limit_mw,mem_used_b,sm_mhz,mem_mhz,temp_c"
_SMI_FIELDS = (
    "index,utilization.gpu,utilization.memory,power.draw,enforced.power.limit,"
    "memory.used,clocks.sm,clocks.mem,temperature.gpu"
)
_SMI_SCALE = (1, 1, 1, 1000, 1000, 1 << 20, 1, 1, 1)  # to the units of COLUMNS


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong), ("instance", ctypes.c_uint), ("compute", ctypes.c_uint)
    ]  # fmt: skip


class Nvml:
    """The GPUs of this host. A value that NVML refuses is None: a board without a power limit has none."""

    def __init__(self, library: Any) -> None:
        self._library = library
        if library.nvmlInit_v2() != 0:
            raise OSError("nvmlInit failed")
        count = ctypes.c_uint(0)
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            raise OSError("NVML counts no devices")
        self._handles: list[ctypes.c_void_p] = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
                self._handles.append(handle)

    def devices(self) -> list[dict[str, Any]]:
        """Index, name, UUID, and the processes that compute on each GPU (empty in a container that hides them)."""
        return [
            {
                "gpu": i,
                "name": self._text("nvmlDeviceGetName", h),
                "uuid": self._text("nvmlDeviceGetUUID", h),
                "pids": self._pids(h),
            }
            for i, h in enumerate(self._handles)
        ]

    def driver(self) -> str | None:
        """The driver's version."""
        text = ctypes.create_string_buffer(96)
        return text.value.decode() if self._library.nvmlSystemGetDriverVersion(text, 96) == 0 else None

    def rows(self, now: Callable[[], int]) -> Iterator[str]:
        """One CSV row per GPU, as COLUMNS says, each with its own time."""
        for index, handle in enumerate(self._handles):
            use, memory = _Utilization(), _Memory()
            at = now()
            used = self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) == 0
            held = self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
            values = (
                use.gpu if used else None,
                use.memory if used else None,
                self._number("nvmlDeviceGetPowerUsage", handle),
                self._number("nvmlDeviceGetEnforcedPowerLimit", handle),
                memory.used if held else None,
                self._number("nvmlDeviceGetClockInfo", handle, 1),
                self._number("nvmlDeviceGetClockInfo", handle, 2),
                self._number("nvmlDeviceGetTemperature", handle, 0),
            )
            yield ",".join([str(at), str(index), *("" if v is None else str(v) for v in values)])

    def close(self) -> None:
        """Release the library."""
        self._library.nvmlShutdown()

    def _number(self, function: str, handle: ctypes.c_void_p, *arguments: int) -> int | None:
        value = ctypes.c_uint(0)
        status = getattr(self._library, function)(handle, *map(ctypes.c_uint, arguments), ctypes.byref(value))
        return value.value if status == 0 else None

    def _text(self, function: str, handle: ctypes.c_void_p) -> str | None:
        text = ctypes.create_string_buffer(96)
        return (
            text.value.decode("utf-8", "replace") if getattr(self._library, function)(handle, text, 96) == 0 else None
        )

    def _pids(self, handle: ctypes.c_void_p) -> list[int]:
        count, processes = ctypes.c_uint(64), (_Process * 64)()
        function = getattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if function is None or function(handle, ctypes.byref(count), processes) != 0:
            return []
        return [int(processes[i].pid) for i in range(min(count.value, 64))]


def open_nvml() -> Nvml | None:
    """NVML of this host, or None where there is no NVIDIA driver."""
    try:
        return Nvml(ctypes.CDLL("libnvidia-ml.so.1"))
    except (OSError, AttributeError):
        return None


class GpuSampler:
    """Writes samples of every GPU to a CSV file at a fixed pace from a thread of its own. `source` says where they come
    from: nvml, nvidia-smi, or none."""

    def __init__(self, path: Path, *, period_s: float = 0.1, nvml: Nvml | None = None) -> None:
        self.path = path
        self.period_s = period_s
        self.source = "none"
        self.rows = 0
        self._nvml = nvml if nvml is not None else open_nvml()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._smi: subprocess.Popen[str] | None = None

    def start(self) -> GpuSampler:
        """Begin. Without a GPU nothing is written and nothing fails."""
        target: Callable[[TextIO], None] | None = None
        if self._nvml is not None:
            self.source, target = "nvml", self._sample
        elif program := shutil.which("nvidia-smi"):
            command = [
                program,
                f"--query-gpu={_SMI_FIELDS}",
                "--format=csv,noheader,nounits",
                f"-lms={int(self.period_s * 1000)}",
            ]
            try:
                self._smi = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                self.source, target = "nvidia-smi", self._follow
            except OSError:
                pass
        if target is not None:
            self._thread = threading.Thread(target=self._run, args=(target,), name="gpu-samples", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """End, with the last rows on disk. May be called twice."""
        self._stop.set()
        if self._smi is not None:
            self._smi.terminate()
        if self._thread is not None:
            self._thread.join(5.0)
        if self._smi is not None:
            self._smi.wait(5.0)
            if self._smi.stdout:
                self._smi.stdout.close()

    def _run(self, target: Callable[[TextIO], None]) -> None:
        try:
            with self.path.open("w") as out:
                out.write(COLUMNS + "\n")
                target(out)
        except OSError:  # a full disk loses samples, not the capture; `rows` says how many there are
            pass

    def _sample(self, out: TextIO) -> None:
        assert self._nvml is not None, "only started with NVML"
        due = time.monotonic()
        while not self._stop.is_set():
            for row in self._nvml.rows(time.time_ns):
                out.write(row + "\n")
                self.rows += 1
            out.flush()
            due = max(due + self.period_s, time.monotonic())
            self._stop.wait(due - time.monotonic())
        self._nvml.close()

    def _follow(self, out: TextIO) -> None:
        assert self._smi is not None and self._smi.stdout is not None, "only started with nvidia-smi"
        for line in self._smi.stdout:
            now = time.time_ns()
            fields = [f.strip() for f in line.split(",")]
            if len(fields) != len(_SMI_SCALE):
                continue
            out.write(",".join([str(now), *map(_scaled, fields, _SMI_SCALE)]) + "\n")
            out.flush()
            self.rows += 1


def _scaled(text: str, factor: int) -> str:
    try:
        return str(round(float(text) * factor))
    except (ValueError, OverflowError):  # [N/A], inf
        return ""

"""GPU samples, from a library that answers as NVML does."""

from __future__ import annotations

import ctypes
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from traceana_capture.gpu import COLUMNS, GpuSampler, Nvml

WATTS = {0: 349_123, 1: 120_000}


class Library:
    """libnvidia-ml with two GPUs; the second has no power limit, as some boards."""

    def __init__(self) -> None:
        self.closed = 0

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        self.closed += 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        handle._obj.value = 1000 + index.value
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, length: int) -> int:
        text.value = b"580.159.04"
        return 0

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p, text: Any, length: int) -> int:
        text.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetUUID(self, handle: ctypes.c_void_p, text: Any, length: int) -> int:
        text.value = f"GPU-{handle.value}".encode()
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: ctypes.c_void_p, count: Any, processes: Any) -> int:
        count._obj.value = 1
        processes[0].pid = handle.value
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, use: Any) -> int:
        use._obj.gpu, use._obj.memory = 97, 40
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.used = 90 << 30
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: ctypes.c_void_p, value: Any) -> int:
        value._obj.value = WATTS[(handle.value or 0) - 1000]
        return 0

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: ctypes.c_void_p, value: Any) -> int:
        value._obj.value = 700_000
        return 0 if handle.value == 1000 else 3  # NVML_ERROR_NOT_SUPPORTED

    def nvmlDeviceGetClockInfo(self, handle: ctypes.c_void_p, kind: ctypes.c_uint, value: Any) -> int:
        value._obj.value = {1: 1980, 2: 3201}[kind.value]
        return 0

    def nvmlDeviceGetTemperature(self, handle: ctypes.c_void_p, kind: ctypes.c_uint, value: Any) -> int:
        value._obj.value = 41
        return 0


def test_rows_hold_what_nvml_says_and_nothing_where_it_refuses() -> None:
    rows = list(Nvml(Library()).rows(lambda: 17))
    assert rows == [
        f"17,0,97,40,349123,700000,{90 << 30},1980,3201,41",
        f"17,1,97,40,120000,,{90 << 30},1980,3201,41",
    ]
    assert all(len(r.split(",")) == len(COLUMNS.split(",")) for r in rows)


def test_devices_name_uuid_and_processes() -> None:
    nvml = Nvml(Library())
    assert nvml.devices() == [
        {"gpu": 0, "name": "NVIDIA H200", "uuid": "GPU-1000", "pids": [1000]},
        {"gpu": 1, "name": "NVIDIA H200", "uuid": "GPU-1001", "pids": [1001]},
    ]
    assert nvml.driver() == "580.159.04"


def test_the_sampler_writes_until_it_is_stopped(tmp_path: Path) -> None:
    library = Library()
    sampler = GpuSampler(tmp_path / "gpu.csv", period_s=0.01, nvml=Nvml(library)).start()
    end = time.monotonic() + 5
    while sampler.rows < 6 and time.monotonic() < end:
        time.sleep(0.01)
    sampler.stop()
    sampler.stop()
    lines = (tmp_path / "gpu.csv").read_text().splitlines()
    assert lines[0] == COLUMNS and len(lines) == sampler.rows + 1 >= 7
    assert (sampler.source, library.closed) == ("nvml", 1)
    stamps = [int(line.split(",")[0]) for line in lines[1:]]
    assert stamps == sorted(stamps) and abs(stamps[0] - time.time_ns()) < 60 * 10**9


def test_nvidia_smi_without_the_library_and_only_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    rows = (
        "0, 97, 40, 349.12, 700.00, 1024, 1980, 3201, 41\\n1, 5, 1, [N/A], [N/A], 10, 345, 3201, 30\\n"
        "=cmd|calc!A1, 97, 40, inf, +1+1, @SUM(1), 1980, 3201, 41\\n"
    )
    program.write_text(f"#!/bin/sh\nwhile :; do printf '{rows}'; sleep 0.02; done\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("traceana_capture.gpu.open_nvml", lambda: None)
    sampler = GpuSampler(tmp_path / "gpu.csv").start()
    end = time.monotonic() + 5
    while sampler.rows < 6 and time.monotonic() < end:
        time.sleep(0.01)
    sampler.stop()
    lines = [line.split(",", 1)[1] for line in (tmp_path / "gpu.csv").read_text().splitlines()[1:4]]
    assert sampler.source == "nvidia-smi" and sampler.rows >= 6
    # What is no number, and what a spreadsheet would take for a formula, is left empty.
    assert lines == [
        f"0,97,40,349120,700000,{1024 << 20},1980,3201,41", f"1,5,1,,,{10 << 20},345,3201,30", ",97,40,,,,1980,3201,41"
    ]  # fmt: skip


def test_no_gpu_writes_nothing_and_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("traceana_capture.gpu.open_nvml", lambda: None)
    sampler = GpuSampler(tmp_path / "gpu.csv").start()
    sampler.stop()
    assert sampler.source == "none" and not (tmp_path / "gpu.csv").exists()

"""One capture per server; what a killed one leaves for the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from traceana_capture.errors import CaptureError
from traceana_capture.lock import CaptureLock

URL = "http://127.0.0.1:30000"
HOLDER = """
import sys, time
from pathlib import Path
from traceana_capture.lock import CaptureLock
with CaptureLock("http://127.0.0.1:30000", folder=Path(sys.argv[1])) as lock:
    lock.note(folder="/captures/first", profile_id="17.5", restore={"pp_max_micro_batch_size": 8})
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_capture_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    with CaptureLock(URL, folder=tmp_path) as first:
        first.note(folder="/captures/first")
        with pytest.raises(CaptureError) as raised, CaptureLock(URL, folder=tmp_path):
            pass
        assert f"process {os.getpid()} of " in raised.value.what and "/captures/first" in raised.value.what
        with CaptureLock("http://127.0.0.1:30001", folder=tmp_path) as other:
            assert other.left_behind is None
    with CaptureLock(URL, folder=tmp_path) as again:
        assert again.left_behind is None


def test_a_killed_capture_frees_the_lock_and_leaves_its_notes(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        with pytest.raises(CaptureError, match=f"process {holder.pid} "), CaptureLock(URL, folder=tmp_path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with CaptureLock(URL, folder=tmp_path) as lock:
        assert lock.left_behind is not None
        kept = {k: lock.left_behind[k] for k in ("pid", "folder", "profile_id", "restore")}
        assert kept == {
            "pid": holder.pid,
            "folder": "/captures/first",
            "profile_id": "17.5",
            "restore": {"pp_max_micro_batch_size": 8},
        }
    with CaptureLock(URL, folder=tmp_path) as lock:
        assert lock.left_behind is None


def test_a_note_of_none_is_forgotten(tmp_path: Path) -> None:
    lock = CaptureLock(URL, folder=tmp_path)
    with lock:
        lock.note(profile_id="17.5")
        lock.note(profile_id=None)
        assert "profile_id" not in (tmp_path / "127.0.0.1_30000.lock").read_text()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match="cannot lock"), CaptureLock(URL, folder=tmp_path / "file" / "x"):
        pass

"""Names, completeness and moving of trace files."""

from __future__ import annotations

import errno
import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traceana_capture.errors import CaptureError
from traceana_capture.files import TraceName, atomic_write, fetch, incomplete, parse_name

WHOLE = gzip.compress(json.dumps({"traceEvents": [{"ts": i, "name": "x" * (i % 7)} for i in range(300)]}).encode())


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("1795969813.5867767-TP-0-PP-1.trace.json.gz", TraceName("1795969813.5867767", 0, 1, None, None, None)),
        ("1795969813.58-TP-3.trace.json.gz", TraceName("1795969813.58", 3, 0, None, None, None)),
        ("run-7-17.5-TP-1-DP-2-PP-3-EP-4-DECODE.trace.json.gz", TraceName("17.5", 1, 3, 2, 4, "DECODE")),
        ("STEP-5-EP-9-17.5-TP-0-PP-1-prefill.trace.json", TraceName("17.5", 0, 1, None, None, "prefill")),
        ("merged-1795969813.58.trace.json.gz", None),
        ("merged-1795969813.58-TP-0.trace.json.gz", None),
        ("1795969813.58-TP-0-memory.pickle", None),
        ("rpd-1795969813.58-TP-0.trace.json.gz.tmp", None),
    ],
)
def test_names(name: str, parts: TraceName | None) -> None:
    assert parse_name(name) == parts


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keep=st.integers(0, len(WHOLE) - 1))
def test_any_truncation_is_seen(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(WHOLE[:keep])
    assert incomplete(path) is not None


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(20, len(WHOLE) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_seen(tmp_path: Path, at: int, bit: int) -> None:
    damaged = bytearray(WHOLE)
    damaged[at] ^= 1 << bit
    path = tmp_path / "t.json.gz"
    path.write_bytes(bytes(damaged))
    assert incomplete(path) is not None


def test_whole_files_are_whole(tmp_path: Path) -> None:
    for name, data in {
        "a.gz": WHOLE,
        "b.gz": gzip.compress(b"[") + gzip.compress(b"]\n"),
        "c.json": b'{"a": []}\n ',
    }.items():
        (tmp_path / name).write_bytes(data)
        assert incomplete(tmp_path / name) is None
    (tmp_path / "d.json").write_bytes(b'{"a": [')
    assert incomplete(tmp_path / "d.json") == "truncated: the JSON is not closed"
    assert incomplete(tmp_path / "absent") == "cannot be read (No such file or directory)"


def test_fetch_renames_or_copies_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(WHOLE)
    fetch(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == WHOLE and not (tmp_path / "a").exists()

    def other_disk(source: object, target: object) -> None:
        raise OSError(errno.EXDEV, "cross-device link")

    monkeypatch.setattr(os, "rename", other_disk)
    fetch(tmp_path / "b", tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == WHOLE
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def test_a_full_disk_keeps_the_source_and_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(WHOLE)

    def full(*_: object, **__: object) -> None:
        (tmp_path / ".b.part").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.rename", full)
    with pytest.raises(CaptureError, match="no space left") as raised:
        fetch(tmp_path / "a", tmp_path / "b")
    assert raised.value.hint and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_existing_target_is_never_replaced(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    with pytest.raises(CaptureError, match="exists already"):
        fetch(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "b"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    atomic_write(path, b"old")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CaptureError, match="no space left"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1

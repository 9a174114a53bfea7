"""How much of a capture is read at once."""

from __future__ import annotations

import gzip
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from traceana.tables.memory import Memory, text_bytes


def test_tables_are_held_up_to_the_bound() -> None:
    memory = Memory(tables=10)
    assert [memory.take(n) for n in (6, 5, 4, 1)] == [True, False, True, False]


def test_no_more_text_is_read_at_once_than_the_bound_or_one_trace() -> None:
    memory, lock = Memory(text=100), threading.Lock()
    now, most, together = [0], [0], threading.Barrier(3, timeout=10)

    def read(size: int, *, meet: bool = False) -> None:
        with memory.reading(size):
            with lock:
                now[0] += size
                most[0] = max(most[0], now[0])
            if meet:
                together.wait()
            with lock:
                now[0] -= size

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: read(30, meet=True), range(3)))  # three of them do fit
        assert most == [90]
        list(pool.map(read, [60, 50, 70, 100, 20, 10] * 20))
        assert most[0] <= 100
        list(pool.map(read, [1000, 30, 1000, 70]))  # one alone may be larger
    assert (most, now) == ([1000], [0])


def test_what_is_large_is_spread() -> None:
    memory = Memory(text=100)
    spread = []
    for size in (25, 26):
        with memory.reading(size) as alone:
            spread.append(alone)
    assert spread == [False, True]


def test_text_is_as_long_as_the_file_or_as_the_gz_says(tmp_path: Path) -> None:
    for name, data in (("a", b"[]"), ("b", b"x" * 5000), ("c", b"\x1f\x8b")):
        (tmp_path / name).write_bytes(data)
        assert text_bytes(tmp_path / name) == len(data)
    (tmp_path / "d.gz").write_bytes(gzip.compress(b"x" * 100_000))
    assert text_bytes(tmp_path / "d.gz") == 100_000
    noise = bytes(range(256)) * 2
    (tmp_path / "e.gz").write_bytes(gzip.compress(noise)[:-4] + bytes(4))  # as after 4 GB: too small to be true
    assert text_bytes(tmp_path / "e.gz") == 4 * (tmp_path / "e.gz").stat().st_size

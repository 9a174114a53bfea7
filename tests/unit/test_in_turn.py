"""Several threads that write to one stream in turn."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from traceana.outputs.in_turn import InTurn

BLOCK = b"0123456789"


@pytest.mark.parametrize("most", [0, 25, 1 << 20])
def test_writers_come_out_in_order_whoever_is_first(most: int) -> None:
    out: list[bytes | memoryview] = []
    turns = InTurn(out.append, most)

    def run(number: int) -> None:
        write = turns.writer(number)
        for part in range(number % 3 * 2):
            write(b"%d.%d " % (number, part))
        turns.done(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(40)))
    assert b"".join(out) == b"".join(b"%d.%d " % (n, part) for n in range(40) for part in range(n % 3 * 2))


def test_those_behind_are_held_back_only_so_far() -> None:
    out: list[bytes | memoryview] = []
    turns = InTurn(out.append, 25)
    first, second = turns.writer(0), turns.writer(1)
    reached = Event()

    def behind() -> None:
        second(BLOCK)
        second(BLOCK)
        reached.set()
        second(BLOCK)  # beyond what may be held: waits for its turn
        turns.done(1)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(behind)
        assert reached.wait(10)
        first(b"first")
        assert out == [b"first"]
        assert not future.done()
        turns.done(0)
        future.result(10)
    assert b"".join(out) == b"first" + 3 * BLOCK


def test_who_waits_is_let_go_when_another_fails() -> None:
    def full(data: bytes | memoryview) -> None:
        raise OSError(28, "No space left on device")

    turns = InTurn(full, 0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(turns.writer(1), BLOCK)
        with pytest.raises(OSError, match="No space") as caught:
            turns.writer(0)(BLOCK)
        turns.stop(caught.value)
        turns.stop(ValueError("later"))
        with pytest.raises(OSError, match="No space"):
            waiting.result(10)
        turns.done(0)
        with pytest.raises(OSError, match="No space"):
            turns.writer(1)(BLOCK)

"""The clock on real captures (two H200, eight V100), whose ranks share a host and hence a clock: every offset is known.

Needs the captures beside the project (TRACEANA_CAPTURES, TRACEANA_PUBLIC); skipped aloud where they are not.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import polars as pl
import pytest

from traceana import schema
from traceana.clock.align import solve_clock
from traceana.clock.bounds import gather
from traceana.clock.model import ClockModel
from traceana.clock.prior import Assume, Prior
from traceana.matching.collectives import match_collectives
from traceana.matching.match import match
from traceana.tables import CaptureTables, RankTables
from traceana.tables.read import read_capture

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
CAPTURES = Path(os.environ.get("TRACEANA_CAPTURES", SHARED / "real"))
PUBLIC = Path(os.environ.get("TRACEANA_PUBLIC", SHARED / "public"))
NAMES = ("A-pp2-cap8", "D-pp2-cap8-nograph", "G-pp2-prefill", "H-pp2-cap16")
NONE = Assume("none")

needs_captures = pytest.mark.skipif(not (CAPTURES / NAMES[0]).is_dir(), reason=f"no captures in {CAPTURES}")
needs_public = pytest.mark.skipif(not (PUBLIC / "dlrm8").is_dir(), reason=f"no dlrm8 in {PUBLIC}")


@cache
def read(folder: Path) -> CaptureTables:
    return read_capture(folder)


def shifted(rank: RankTables, by_ns: int = 0, ppm: int = 0, origin: int = 0) -> RankTables:
    """As if the clock of `rank` were ahead by `by_ns` and `ppm` of the time since `origin`."""

    def moved(frame: pl.DataFrame) -> pl.DataFrame:
        stretch = [pl.col(c) + by_ns + (pl.col(c) - origin) * ppm // 1_000_000 for c in ("ts_ns", "end_ns")]
        return frame.with_columns(stretch)

    return replace(
        rank,
        device=moved(rank.device),
        calls=moved(rank.calls),
        annotations=moved(rank.annotations),
        gpu_annotations=moved(rank.gpu_annotations),
        ops=moved(rank.ops),
        overheads=moved(rank.overheads),
    )


def solve(capture: CaptureTables, assume: Assume | None = NONE) -> ClockModel:
    matched = match(capture, slack_ns=None)
    collectives, _ = match_collectives(capture.ranks)
    return solve_clock(capture.ranks, matched.messages, matched.controls, collectives, assume=assume)


def interval(model: ClockModel) -> tuple[int, int]:
    low, high = model.pairs.select("low_ns", "high_ns").row(0)
    return low, high


@needs_captures
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("by_ns", "ppm"), [(0, 0), (-(10**9), 0), (-5_000_000, 0), (-80_000, 0), (3_000, 0), (5_000_000, 0), (0, 20)]
)
def test_shifts_and_stretches_of_rank_1_are_recovered(name: str, by_ns: int, ppm: int) -> None:
    capture = read(CAPTURES / name)
    origin = int(str(capture.ranks[0].device.get_column("ts_ns").min()))
    moved = replace(capture, ranks=(capture.ranks[0], shifted(capture.ranks[1], by_ns, ppm, origin)))
    model = solve(moved)
    true = by_ns + (model.mid_ns - origin) * ppm // 1_000_000
    low, high = interval(model)
    assert low <= true <= high
    assert model.violations == ()
    assert (
        model.ranks.get_column("uncertainty_ns")[1] <= {"H": 10_000, "A": 50_000, "G": 120_000, "D": 320_000}[name[0]]
    )
    # The chains of messages that make it so wide are there to be printed, and they explain it to the nanosecond.
    for side, end in (("high", high), ("low", -low)):
        chain = model.binding.filter((pl.col("rank") == 1) & (pl.col("side") == side))
        if chain.height and ppm == 0:
            told = int(chain.get_column("upper_ns").sum())
            span = moved.ranks[0].device.select(pl.col("end_ns").max() - pl.col("ts_ns").min()).item()
            assert 0 <= end - told <= span * 60 // 1_000_000


@needs_captures
@pytest.mark.parametrize("name", NAMES)
def test_the_default_prior_is_one_host(name: str) -> None:
    model = solve(read(CAPTURES / name), None)
    assert model.prior.kind == "same-host"
    assert model.ranks.get_column("offset_ns").to_list() == [0, 0]
    assert model.ranks.get_column("uncertainty_ns")[1] <= 5_000
    assert model.violations == ()


@needs_captures
@pytest.mark.parametrize("name", [*NAMES, "B-pp2-cap32", "F-tp2", "M-pp2-cap16-2clients", "p2p-nccl"])
def test_no_real_message_contradicts_equal_clocks(name: str) -> None:
    capture = read(CAPTURES / name)
    matched = match(capture, slack_ns=None)
    collectives, _ = match_collectives(capture.ranks)
    told, _ = gather(capture.ranks, matched.messages, matched.controls, collectives, prior=Prior("none", "test"))
    assert told.height
    least = dict(told.group_by(pl.col("source").cast(pl.String)).agg(pl.col("upper_ns").min()).iter_rows())
    assert min(least.values()) > 0, least
    # Without its allowance of 2 us for the send's tail, a receive still never ends before its send.
    assert least.get("p2p", 10**6) > 2_000


@needs_public
@pytest.mark.parametrize("assume", [None, NONE])
def test_eight_ranks_by_their_collectives(assume: Assume | None) -> None:
    capture = read(PUBLIC / "dlrm8")
    model = solve(capture, assume)
    assert model.identifiable
    assert max(model.ranks.get_column("uncertainty_ns")) < 10_000
    assert model.pairs.filter((pl.col("low_ns") > 0) | (pl.col("high_ns") < 0)).height == 0


@needs_public
@pytest.mark.parametrize("assume", [None, NONE])
def test_eight_shifted_ranks_are_recovered(assume: Assume | None) -> None:
    shifts = [0, 5_000_000, -80_000, 999_999_999, -1_000_000_000, 3_141_593, -2_000, 123_456_789]
    capture = read(PUBLIC / "dlrm8")
    moved = replace(capture, ranks=tuple(shifted(r, s) for r, s in zip(capture.ranks, shifts, strict=True)))
    model = solve(moved, assume)
    for a, b, low, high in model.pairs.iter_rows():
        assert low <= shifts[b] - shifts[a] <= high
    assert max(model.ranks.get_column("uncertainty_ns")) < 10_000
    assert model.ranks.schema == schema.CLOCK_RANKS.polars_schema

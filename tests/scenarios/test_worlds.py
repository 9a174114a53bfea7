"""Every generated world: the analyser's table of causes against the generator's, nanosecond by nanosecond.

The generator (fixtures/tracegen) shares no code with traceana and knows what each GPU truly waited for.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from traceana import schema
from traceana.matching.collectives import match_collectives
from traceana.matching.match import match
from traceana.model.build import build_trace
from traceana.model.model import Model, explain
from traceana.pipeline import Options, load_model
from traceana.tables.read import read_capture
from tracegen import build, names
from tracegen.model import PLACES
from tracegen.scenarios import MODELS, build_model
from tracegen.world import World

KEYS = ["state", "cause", "root", "crossed"]


@cache
def world(name: str, folder: Path) -> World:
    """The world of a name, generated once."""
    return build(name, folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the worlds of this module are."""
    return tmp_path_factory.mktemp("worlds")


def exact_model(path: Path) -> Model:
    """The model of a world whose clocks are known to be equal."""
    capture = read_capture(path, cache=False)
    collectives, _ = match_collectives(capture.ranks)
    clock = schema.CLOCK_RANKS.frame(
        [
            {"rank": r.info.rank, "offset_ns": 0, "drift_ppm": 0.0, "uncertainty_ns": 0, "method": "known"}
            for r in capture.ranks
        ]
    )
    return explain(build_trace(capture, match(capture), collectives, clock))


def found(model: Model) -> pl.DataFrame:
    """Rows that tile every rank's window: rank, ts, end, state, cause, root, crossed, detail."""
    trace = model.trace
    states = pl.concat([s.states for s in model.states.values()]).filter(pl.col("state") != "bubble")
    none = pl.lit(None, dtype=pl.String)
    busy = states.select(
        "rank", pl.col("ts_ns").alias("ts"), pl.col("end_ns").alias("end"), "state", none.alias("cause"),
        pl.lit(None, dtype=pl.Int64).alias("root"), pl.lit(False).alias("crossed"), none.alias("detail"),
    )  # fmt: skip
    idle = model.blame.attribution.select(
        "rank", pl.col("ts_ns").alias("ts"), pl.col("end_ns").alias("end"), pl.lit("bubble").alias("state"), "cause",
        pl.col("root_rank").cast(pl.Int64).alias("root"), pl.col("crossed_token_return").alias("crossed"), "detail",
    )  # fmt: skip
    assert trace.ranks
    return pl.concat([busy, idle]).sort("rank", "ts")


def true(of: World, start: int, end: int) -> pl.DataFrame:
    """The generator's rows, likewise."""
    rows = [
        {
            "rank": r.rank, "ts": r.ts_ns, "end": r.end_ns, "state": r.state, "cause": r.cause, "root": r.root_rank,
            "crossed": r.crossed_token_return, "detail": r.detail,
        }
        for r in of.truth(start, end)
    ]  # fmt: skip
    kinds = {"rank": pl.Int32, "cause": pl.String, "root": pl.Int64, "detail": pl.String}
    return pl.DataFrame(rows, schema_overrides=kinds).sort("rank", "ts")


def compared(mine: pl.DataFrame, theirs: pl.DataFrame) -> pl.DataFrame:
    """Stretches cut at the boundaries of both tables, with both sides' columns (`t_` for the truth) and `ns`."""
    parts: list[pl.DataFrame] = []
    for rank in mine.get_column("rank").unique().sort():
        a, b = mine.filter(pl.col("rank") == rank), theirs.filter(pl.col("rank") == rank)
        cuts = np.unique(np.concatenate([f.get_column(c).to_numpy() for f in (a, b) for c in ("ts", "end")]))
        at = cuts[:-1]
        at = at[(at >= a.get_column("ts")[0]) & (at < a.get_column("end")[-1])]
        i = np.searchsorted(a.get_column("ts").to_numpy(), at, side="right") - 1
        j = np.searchsorted(b.get_column("ts").to_numpy(), at, side="right") - 1
        left, right = a[i], b[j].rename({c: f"t_{c}" for c in b.columns})
        parts.append(
            pl.concat(
                [left, right, pl.DataFrame({"at": at, "ns": np.append(at[1:], a.get_column("end")[-1]) - at})],
                how="horizontal",
            )
        )
    return pl.concat(parts)


def differences(table: pl.DataFrame) -> pl.DataFrame:
    """Stretches whose state, cause, root or token return differ, summed by what they are."""
    differs = pl.any_horizontal(pl.col(k).ne_missing(pl.col(f"t_{k}")) for k in KEYS)
    keys = ["rank", *KEYS, *(f"t_{k}" for k in KEYS)]
    return table.filter(differs).group_by(keys).agg(pl.col("ns").sum(), pl.col("at").min()).sort("ns", descending=True)


@pytest.mark.parametrize("name", names())
def test_every_nanosecond_has_its_true_cause_and_root(name: str, folder: Path) -> None:
    truth = world(name, folder)
    model = exact_model(folder / name)
    window = model.trace.window
    assert (window.start_ns, window.end_ns) == tuple(truth.window)
    table = compared(found(model), true(truth, window.start_ns, window.end_ns))
    wrong = differences(table)
    assert wrong.height == 0, wrong
    # The span the host was in, and why a slot held no batch.
    told = pl.col("cause").is_in(["host_schedule", "no_work"])
    details = table.filter(told & pl.col("detail").ne_missing(pl.col("t_detail")))
    assert details.height == 0, details


@pytest.mark.parametrize("name", ["pp4_mixed", "pp8_decode"])
def test_messages_that_cross_the_edge_of_the_traces_are_no_warning(name: str, folder: Path) -> None:
    world(name, folder)
    capture = read_capture(folder / name, cache=False)
    found = match(capture)
    assert found.losses.filter(pl.col("severity") != "info").height == 0
    assert found.losses.filter(name="p2p_unmatched_edge").height > 0
    # One send less in mid-trace is one.
    first = capture.ranks[0]
    sends = first.device.with_row_index("row").filter(pl.col("collective").cast(pl.String) == "send")
    gone = int(sends.get_column("row")[sends.height // 2])
    fewer = first.device.with_row_index("row").filter(pl.col("row") != gone).drop("row")
    damaged = replace(capture, ranks=(replace(first, device=schema.DEVICE.frame(fewer)), *capture.ranks[1:]))
    assert match(damaged).losses.filter(name="p2p_unmatched", severity="warning").get_column("count").to_list() == [1]


def test_without_a_log_or_metrics_nothing_tells_why_a_slot_is_empty(folder: Path) -> None:
    world("pp2_one_slot", folder)
    table = exact_model(folder / "pp2_one_slot" / "trace").blame.attribution.filter(pl.col("cause") == "no_work")
    assert table.get_column("detail").unique().to_list() == ["slot_empty_queue_unknown"]


# Delays of 2 ms planted in every visit: where, on which rank of two, and what the idle stages then wait for.
BASE = replace(MODELS["pp2_decode"], steps=10, warm=24, lean=True)
HELD = {
    "get_next_batch_to_run": ("host_schedule", "get_next_batch_to_run"), "recv_proxy": ("host_schedule", "between spans"),
    "run_batch": ("host_launch", "run_batch"), "process_batch_result": ("host_schedule", "process_batch_result"),
    "send_proxy_dict_to_next_stage": ("host_schedule", "send_proxy_dict_to_next_stage"),
}  # fmt: skip
ONLY_ON = {"recv_proxy": 1, "send_proxy_dict_to_next_stage": 0}


@pytest.mark.parametrize(("place", "rank"), [(p, r) for p in PLACES for r in (0, 1) if ONLY_ON.get(p, r) == r])
def test_a_delay_of_a_host_is_blamed_where_it_was_planted(place: str, rank: int, tmp_path: Path) -> None:
    truth = build_model(replace(BASE, delays={(rank, place): 2_000_000}), tmp_path)
    model = exact_model(tmp_path)
    window = model.trace.window
    table = compared(found(model), true(truth, window.start_ns, window.end_ns))
    assert differences(table).height == 0, differences(table)
    cause, detail = HELD[place]
    mine = table.filter((pl.col("root") == rank) & (pl.col("cause") == cause) & (pl.col("detail") == detail))
    steps = model.window_forwards().filter(pl.col("rank") == rank).height
    blamed = int(mine.get_column("ns").sum())
    # Some of it hides behind busy time or another wait, but never all; both stages may wait for the same delay.
    assert steps * 500_000 < blamed < 2 * (steps + 2) * 3_000_000


@pytest.mark.parametrize(("place", "rank"), [("ahead", 0), ("among", 1), ("behind", 1)])
def test_a_kernel_that_spins_is_compute_of_its_stage(place: str, rank: int, tmp_path: Path) -> None:
    truth = build_model(replace(BASE, spins={(rank, place): 2_000_000}), tmp_path)
    model = exact_model(tmp_path)
    window = model.trace.window
    wrong = differences(compared(found(model), true(truth, window.start_ns, window.end_ns)))
    assert wrong.height == 0, wrong


@pytest.mark.parametrize(
    ("name", "offsets"),
    [
        ("pp2_decode", (0, 2_000)), ("pp2_decode", (-1_300, 2_262)), ("pp2_depth2", (1_435, -1_658)),
        ("pp2_backpressure", (-1_632, 1_596)), ("pp2_prefill_decode", (-1_581, -878)),
        ("pp4_decode", (2_035, -2_325, 722, -626)), ("pp2_collective", (431, -509, -608, 1_365)),
        ("tp2_pp4", (0, 2_000, 0, 0, 0, 0, 0, 0)), ("tp2_pp4", (709, -681, -1_632, 1_596, -2_168, 793, 1_145, -2_383)),
    ],
)  # fmt: skip
def test_with_clock_errors_no_nanosecond_is_wrong(name: str, offsets: tuple[int, ...], tmp_path: Path) -> None:
    truth = build(name, tmp_path, offsets_ns=offsets)
    model, clock, _ = load_model(tmp_path, Options(assume="same-host", cache=False))
    found_ns = dict(clock.ranks.select("rank", "offset_ns").iter_rows())
    # What the clock did not take off of a rank's stamps, its rows are late by; trace time is the first rank's.
    late = {rank: offsets[rank] - offsets[0] - found_ns[rank] for rank in found_ns}
    assert all(abs(ns) <= (model.trace.uncertainty_ns[rank] or 0) for rank, ns in late.items())
    shift = pl.col("rank").replace_strict(late, return_dtype=pl.Int64) + offsets[0]
    start, end = truth.window
    mine = found(model).with_columns(pl.col("ts") - shift, pl.col("end") - shift)
    table = compared(mine, true(truth, start, end)).filter((pl.col("at") >= start) & (pl.col("at") < end - 10_000))
    wrong = differences(table.filter(pl.col("cause").ne_missing("ambiguous")))
    assert wrong.height == 0, wrong
    ambiguous = int(table.filter(pl.col("cause") == "ambiguous").get_column("ns").sum())
    assert ambiguous < int(table.filter(pl.col("state") == "bubble").get_column("ns").sum())
    assert ambiguous > 0


def test_the_result_does_not_depend_on_a_windows_cut(folder: Path) -> None:
    world("pp2_decode", folder)
    whole, _, _ = load_model(folder / "pp2_decode", Options(cache=False))
    half = whole.trace.window.duration_ns // 2
    causes = ["rank", "cause", "root_rank"]
    total = pl.col("end_ns") - pl.col("ts_ns")

    def sums(window: tuple[int, int] | None) -> pl.DataFrame:
        model, _, _ = load_model(folder / "pp2_decode", Options(cache=False, window=window))
        return model.blame.attribution.group_by(causes).agg(total.sum().alias("ns"))

    parts = pl.concat([sums((0, half)), sums((half, whole.trace.window.duration_ns))])
    both = parts.group_by(causes).agg(pl.col("ns").sum()).sort(causes, nulls_last=True)
    assert both.equals(sums(None).sort(causes, nulls_last=True))

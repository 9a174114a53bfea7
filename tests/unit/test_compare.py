"""`compare`: parts and split sum to the change whatever the numbers, sides merge, noise is what the runs show."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import polars as pl
import pytest
from captures import real, report_of
from hypothesis import given
from hypothesis import strategies as st

from traceana.compare import compare
from traceana.compare.layout import Layout, layout_of
from traceana.compare.side import COMPONENTS, Side, measure_side, merge_sides
from traceana.errors import ModelError

METRICS = {"latency_p50": None, "latency_p99": 2.0, "utilisation": 0.5, "bubble": 0.4, "period": None}


def side(parts: dict[str, int], measured: int | None = None, forwards: int = 4, tokens: int = 32) -> Side:
    """A side whose window is what its parts say."""
    whole = dict.fromkeys(COMPONENTS, 0) | parts
    window = sum(whole.values()) * tokens
    return Side("s", 0, window, forwards, tokens, whole, measured, {"k": 5}, METRICS, ("do this",))


@st.composite
def sides(draw: st.DrawFn) -> Side:
    parts = {c: draw(st.integers(0, 10**7)) for c in draw(st.sets(st.sampled_from(COMPONENTS), min_size=1))}
    parts["transfer"] = draw(st.integers(1, 10**6))
    forwards = draw(st.integers(1, 500))
    measured = draw(st.none() | st.integers(1, 10**8))
    return side(parts, measured, forwards, forwards * draw(st.integers(1, 64)))


@given(st.lists(sides(), min_size=1, max_size=4), st.lists(sides(), min_size=1, max_size=4))
def test_parts_and_split_sum_to_the_change(left: list[Side], right: list[Side]) -> None:
    found = compare(left, right)
    before, after = found.token_ns
    assert sum(row[1] for row in found.parts) == before
    assert sum(row[2] for row in found.parts) == after
    assert sum(found.split.values()) == after - before


def test_time_outside_the_profile_counts_only_where_both_sides_know_it() -> None:
    a, b = side({"transfer": 1_000}, measured=700), side({"transfer": 2_000})
    assert compare([a], [b]).token_ns == (1_000, 2_000)
    assert compare([a], [replace(b, measured_ns=1_500)]).token_ns == (700, 1_500)
    # One capture of several that does not know it is enough for a side not to.
    assert compare([a, replace(a, measured_ns=None)], [replace(b, measured_ns=1_500)]).token_ns == (1_000, 2_000)


def test_batch_size_alone_explains_twice_the_tokens_in_the_same_forward() -> None:
    a = side({"busy: moe": 800}, forwards=4, tokens=32)
    b = side({"busy: moe": 400}, forwards=4, tokens=64)
    assert compare([a], [b]).split == {"batch_size": -400, "forward_time": 0, "profiler": 0}
    slower = side({"busy: moe": 1_000}, forwards=4, tokens=32)
    assert compare([a], [slower]).split == {"batch_size": 0, "forward_time": 200, "profiler": 0}


def test_batch_size_explains_nothing_where_it_is_the_same() -> None:
    # Two captures of a side with windows of other lengths and speeds, and one with a window that its tokens do not divide.
    short, long = side({"transfer": 900}, forwards=2, tokens=16), side({"transfer": 700}, forwards=30, tokens=240)
    assert compare([short, long], [long]).split == {"batch_size": 0, "forward_time": -100, "profiler": 0}
    assert compare([replace(short, window_ns=short.window_ns + 15)], [long]).split["batch_size"] == 0


def test_noise_is_six_percent_until_both_sides_have_three_runs() -> None:
    def runs(*times: int) -> list[Side]:
        return [side({"transfer": t}) for t in times]

    assert compare(runs(1_000), runs(1_050)).significant is False
    assert compare(runs(1_000), runs(1_070)).significant is True
    assert compare(runs(1_000, 1_001), runs(1_050, 1_051)).noise == 0.06
    assert compare(runs(1_000, 1_001, 1_002), runs(1_050, 1_051, 1_052)).significant is True
    assert compare(runs(1_000, 1_100, 1_050), runs(1_100)).noise == pytest.approx(0.1)


def test_merged_sides_are_means_and_unknown_stays_unknown() -> None:
    merged = merge_sides([side({"transfer": 10}), replace(side({"transfer": 21}), kernels={"j": 3})])
    assert (merged.profiled_ns, merged.tokens, merged.forwards) == (15, 64, 8)
    assert merged.kernels == {"k": 2, "j": 1}
    assert merged.metrics["latency_p50"] is None and merged.metrics["latency_p99"] == 2.0


def test_a_side_is_the_window_of_the_rank_that_computes_most() -> None:
    report = report_of(real("demo"))
    found = measure_side("A", report.model, report.document)
    assert found.profiled_ns == found.window_ns // found.tokens
    assert found.rank == 0 and found.tokens == 8 * found.forwards
    # The mean of the log is 965 tokens per second.
    assert found.measured_ns is not None and round(1e9 / found.measured_ns) == 965
    assert max(found.kernels, key=lambda k: found.kernels[k]).startswith("nccl")


def test_one_way_of_spreading_against_another() -> None:
    a = replace(side({"busy: moe": 700, "idle: host_launch": 300}), layout=Layout(pp=2, clients=32))
    b = replace(side({"busy: moe": 600, "busy: collective": 90, "transfer": 10}), layout=Layout(tp=2, clients=32))
    assert compare([a], [replace(b, layout=a.layout)]).spread is None
    found, back = compare([a], [b]).spread, compare([b], [a]).spread
    assert found is not None and back is not None
    assert found["title"] == back["title"] == "TP2 serves 43 % more than PP2 here"
    text = "\n".join(cast("list[str]", found["evidence"]))
    assert "of a token in PP2 (rank 0, profiled): computing 700 ns, idle 300 ns" in text
    assert "of a token in TP2 (rank 0, profiled): computing 600 ns, collectives 90 ns, transfers 10 ns" in text
    assert "like with like" not in text
    # On twice the GPUs the same is no gain, and another load is said.
    four = compare([a], [replace(b, layout=Layout(tp=4, ep=4, clients=16))]).spread
    assert four is not None and four["title"] == "PP2 serves 40 % more for each GPU than TP4 EP4 here"
    assert any("32 and 16 requests" in e for e in cast("list[str]", four["evidence"]))
    near = compare([a], [replace(side({"busy: moe": 980}), layout=Layout(tp=2))]).spread
    assert near is not None and near["title"] == "PP2 and TP2 serve the same, within noise of 6 %"


def test_the_layout_comes_from_the_facts_else_from_the_ranks() -> None:
    server = {"pp_size": 2, "tp_size": 4, "dp_size": 1, "arguments": {"ep_size": 4}, "clients": {"concurrency": 8}}
    assert layout_of({"server": server, "stages": [{}] * 8}) == Layout(2, 4, 1, 4, 8)
    assert layout_of({"server": {}, "pipeline": {"pp_size": 2}, "stages": [{}] * 8}) == Layout(2, 4)
    assert (Layout(2, 4, 1, 4).words, Layout().words, Layout(tp=2, dp=2).gpus) == ("PP2 TP4 EP4", "one GPU", 2)


def test_forwards_without_tokens_are_an_error_not_a_longer_token() -> None:
    report = report_of(real("A"))
    trace = report.model.trace
    blank = replace(trace, forwards=trace.forwards.with_columns(pl.lit(None, pl.Int64).alias("tokens")))
    with pytest.raises(ModelError, match="do not say their tokens"):
        measure_side("A", replace(report.model, trace=blank), report.document)
    none = replace(trace, forwards=trace.forwards.clear())
    with pytest.raises(ModelError, match="no decode forward"):
        measure_side("A", replace(report.model, trace=none), report.document)

"""Real SGLang captures on two H200: sums, coverage, and what the people who made them know."""

from __future__ import annotations

from typing import Any, cast

import polars as pl
import pytest
from captures import PIPELINES, real, report_of

EVERY = (*PIPELINES, "F", "H2", "J", "U", "X")


def _stages(letter: str) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", report_of(real(letter)).document["stages"])


@pytest.mark.parametrize("letter", EVERY)
def test_every_nanosecond_is_accounted_for(letter: str) -> None:
    report = report_of(real(letter))
    window = report.model.trace.window.duration_ns
    blame = cast("list[dict[str, Any]]", report.document["blame"])
    assert len(_stages(letter)) == 2
    for stage in _stages(letter):
        causes = stage["causes_ns"]
        assert stage["busy_ns"] + stage["transfer_ns"] + sum(causes.values()) == window
        assert sum(stage["busy_by_class_ns"].values()) == stage["busy_ns"]
        assert sum(causes.values()) == stage["bubble_ns"]
        row = [b for b in blame if b["rank"] == stage["rank"]]
        assert sum(b["ns"] for b in row) == stage["bubble_ns"]
        for cause, ns in causes.items():
            assert sum(b["ns"] for b in row if b["cause"] == cause) == ns


@pytest.mark.parametrize("letter", PIPELINES)
def test_two_percent_of_the_bubble_at_most_stay_unexplained(letter: str) -> None:
    for stage in _stages(letter):
        causes = stage["causes_ns"]
        assert causes["unknown"] == 0
        assert 50 * causes["ambiguous"] <= stage["bubble_ns"]


@pytest.mark.parametrize(("letter", "batch"), [("demo", 8), ("A", 8), ("H", 16)])
def test_batches_and_messages_of_a_balanced_pipe(letter: str, batch: int) -> None:
    report = report_of(real(letter))
    trace = report.model.trace
    steps = report.model.window_visits()
    assert set(steps.get_column("batch_size")) == {batch}
    assert set(steps.get_column("mode")) == {"decode"}
    assert cast("dict[str, Any]", report.document["micro_batches"])["merged_between_stages"] is False
    links = {(m["src"], m["dst"], m["kind"]): m for m in cast("list[dict[str, Any]]", report.document["p2p"])}
    assert set(links) == {(0, 1, "proxy"), (0, 1, "output"), (1, 0, "output")}
    assert links[0, 1, "proxy"]["bytes"] == batch * 2048 * 2
    assert links[0, 1, "proxy"]["dtype"] == "BFloat16"
    per_visit = trace.messages.filter(pl.col("kind") == "proxy").group_by("visit").len()
    assert set(per_visit.get_column("len")) == {2}
    for key in ((0, 1, "output"), (1, 0, "output")):
        src, dst, kind = key
        pick = (pl.col("src") == src) & (pl.col("dst") == dst) & (pl.col("kind") == kind)
        assert set(trace.messages.filter(pick).group_by("visit").len().get_column("len")) == {1}
    assert all(link["unmatched"] == 0 for link in links.values())


def test_profiler_tails_are_no_bubble() -> None:
    report = report_of(real("A"))
    trimmed = cast("dict[str, Any]", report.document["window"])["trimmed"]
    tails = {t["rank"]: t["ns"] for t in trimmed if t["side"] == "tail"}
    assert tails[1] > 400_000_000
    assert all(stage["gaps"]["max_ns"] < 20_000_000 for stage in _stages("A"))


def test_planted_host_sleep_is_blamed_where_it_was_planted() -> None:
    """Q is H with a sleep of 3 ms in get_next_batch_to_run of stage 0; part of it hides behind other waits."""

    def per_step(letter: str) -> float:
        report = report_of(real(letter))
        rows = cast("list[dict[str, Any]]", report.document["blame"])
        ns = sum(
            r["ns"] for r in rows
            if r["rank"] == 0 and r["root_rank"] == 0 and r["cause"] == "host_schedule" and r["detail"] == "get_next_batch_to_run"
        )  # fmt: skip
        period = cast("dict[str, Any]", report.document["model"])["measured_period_ns"]
        return float(ns * period / report.model.trace.window.duration_ns)

    assert 1.9e6 <= per_step("Q") - per_step("H") <= 2.6e6


def test_without_cuda_graphs_launching_is_the_largest_cause() -> None:
    for stage in _stages("D"):
        causes = stage["causes_ns"]
        assert max(causes, key=causes.__getitem__) == "host_launch"


def test_prefill_is_launch_bound_on_both_stages() -> None:
    for stage in _stages("G"):
        causes = stage["causes_ns"]
        assert max(causes, key=causes.__getitem__) == "host_launch"
    losses = cast("list[dict[str, Any]]", report_of(real("G")).document["losses"])
    assert any("merge" in str(row["name"]) for row in losses)


def test_ring_term_explains_the_period_of_the_capped_pipe() -> None:
    model = cast("dict[str, Any]", report_of(real("A")).document["model"])
    assert abs(model["terms_ns"]["ring"] - model["measured_period_ns"]) * 20 <= model["measured_period_ns"]
    for stage in model["per_stage"]:
        parts = ("imbalance_ns", "host_ns", "under_filled_ns", "variance_ns")
        assert sum(stage[p] for p in parts) == model["measured_period_ns"] - stage["t_ns"]


@pytest.mark.parametrize(
    ("letter", "finding"),
    [
        ("demo", "micro_batch_cap"),
        ("A", "micro_batch_cap"),
        ("B", "greedy_slots"),
        ("D", "cuda_graphs_off"),
        ("M", "few_requests"),
        ("Q", "host_span"),
    ],
)
def test_first_finding(letter: str, finding: str) -> None:
    findings = cast("list[dict[str, Any]]", report_of(real(letter)).document["findings"])
    assert findings[0]["id"] == finding


def test_two_slots_of_31_and_1_in_words() -> None:
    answers = cast("list[dict[str, Any]]", report_of(real("B")).document["answers"])
    assert "The pipe holds one useful micro-batch" in answers[0]["answer"]


def test_tensor_parallel_capture_says_that_there_is_no_pipeline() -> None:
    document = report_of(real("F")).document
    answers = cast("list[dict[str, Any]]", document["answers"])
    assert "no pipeline" in answers[0]["answer"]
    assert cast("dict[str, Any]", document["model"])["tau_ns"] is None
    # Rank 0 computes longer than rank 1: said, without a gain that nobody can promise.
    findings = cast("list[dict[str, Any]]", document["findings"])
    assert [(f["id"], f["recoverable_fraction"], f["predicted"]) for f in findings] == [("late_rank", 0, None)]


def test_gpu_only_capture_says_what_it_cannot_know() -> None:
    document = report_of(real("U")).document
    names = {row["name"] for row in cast("list[dict[str, Any]]", document["losses"])}
    assert "p2p_direction_unknown" in names
    answers = cast("list[dict[str, Any]]", document["answers"])
    assert [a["known"] for a in answers] == [False, True, False, True, False, False, False]
    for stage in cast("list[dict[str, Any]]", document["stages"]):
        assert stage["causes_ns"]["unknown"] > stage["bubble_ns"] // 2
        assert stage["busy_by_class_ns"]["collective"] == 0


def test_profile_by_stage_leaves_a_short_window() -> None:
    report = report_of(real("J"))
    assert report.model.trace.window.duration_ns < 20_000_000
    assert set(report.model.trace.forwards.get_column("mode")) == {"extend"}


def test_every_stretch_of_a_chain_names_the_events_that_bound_it() -> None:
    table = report_of(real("A")).results["attribution"].tables["attribution"].filter(pl.col("gap") >= 0)
    for column in ("first_event", "last_event"):
        assert table.get_column(column).null_count() == 0
    inside = table.filter(
        (pl.col("cause") == "launch_latency") & (pl.col("chain") == 0) & pl.col("visit").is_not_null()
    )
    assert inside.height > 10_000
    assert inside.get_column("last_event").str.contains(" on rank ").all()
    # Inside a CUDA graph a kernel of the same forward is on the other side too; else a call or another rank is.
    assert inside.filter(pl.col("first_event").str.contains(" on rank ")).height > 0.98 * inside.height

"""Changes as users write them: what is understood, and what is refused in words."""

from __future__ import annotations

import pytest

from traceana.errors import TraceanaError
from traceana.simulate.changes import (
    Change,
    conflicts,
    parse_host,
    parse_link,
    parse_remove,
    parse_scale,
    parse_set,
    parse_words,
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("pp_max_micro_batch_size=16", [("pp_max_micro_batch_size", 16)]),
        ("--max-running-requests=64", [("max_running_requests", 64)]),
        (
            "max_running_requests=64,pp_max_micro_batch_size=32",
            [("max_running_requests", 64), ("pp_max_micro_batch_size", 32)],
        ),
        ("pp_layer_partition=16,48", [("pp_layer_partition", (16, 48))]),
        ("pp_layer_partition=16,48, concurrency=2", [("pp_layer_partition", (16, 48)), ("concurrency", 2)]),
        ("pp_async_batch_depth=0", [("pp_async_batch_depth", 0)]),
        ("disable_cuda_graph=True", [("disable_cuda_graph", 1)]),
        ("merge_waiting=false", [("merge_waiting", 0)]),
    ],
)
def test_settings_have_sglangs_names(text: str, values: list[tuple[str, int]]) -> None:
    assert [(c.key, c.value) for c in parse_set(text)] == values


@pytest.mark.parametrize(
    "text",
    [
        "", "pp_size=2", "pp_max_micro_batch_size", "pp_max_micro_batch_size=0", "pp_max_micro_batch_size=-1",
        "pp_max_micro_batch_size=1.5", "max_running_requests=99999999", "pp_layer_partition=", "pp_layer_partition=16,x",
        "pp_layer_partition=0,64", "disable_cuda_graph=maybe", "concurrency=", "pp_async_batch_depth=257",
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_with_a_hint(text: str) -> None:
    with pytest.raises(TraceanaError) as refused:
        parse_set(text)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("text", "stage", "ns"),
    [
        ("0=-3ms", "0", -3_000_000),
        ("1=+2.5", "1", 2_500_000),
        ("0=-250us", "0", -250_000),
        ("3=7ns", "3", 7),
        ("0=-0.123ms", "0", -123_000),
        ("0@process_batch_result=+2ms", "0@process_batch_result", 2_000_000),
    ],
)
def test_host_time_is_in_milliseconds_unless_it_says_otherwise(text: str, stage: str, ns: int) -> None:
    change = parse_host(text)
    assert (change.key, change.value) == (stage, ns)


@pytest.mark.parametrize(
    "text", ["", "0", "0=", "x=3", "0=3s", "-1=3", "0=1e3", "0=--3", "0@=+3", "0@nowhere=+3", "0@run_batch=-3"]
)
def test_host_time_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(TraceanaError):
        parse_host(text)


def test_kernels_classes_and_causes_are_told_apart() -> None:
    assert parse_remove("fused_moe_kernel") == Change("scale", "name:fused_moe_kernel", 0, "remove fused_moe_kernel")
    assert parse_scale("class:moe=0.5").key == "class:moe"
    assert parse_scale("cause:host_schedule=2").value == 2_000_000
    assert parse_scale("a=b=.25") == Change("scale", "name:a=b", 250_000, "scale a=b=.25")
    assert parse_link("0-1=0.5") == Change("link", "0-1", 500_000, "link 0-1=0.5")


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_remove, ""), (parse_remove, "["), (parse_remove, "class:nothing"), (parse_remove, "class:collective"),
        (parse_remove, "cause:upstream_compute"), (parse_remove, "cause:no_work"), (parse_scale, "moe"),
        (parse_scale, "moe=-1"), (parse_scale, "moe=many"), (parse_scale, "moe=5000"), (parse_link, "0=1"), (parse_link, "0-1=x"),
    ],
)  # fmt: skip
def test_targets_that_cannot_change_are_refused_with_a_hint(parse: object, text: str) -> None:
    assert callable(parse)
    with pytest.raises(TraceanaError) as refused:
        parse(text)
    assert refused.value.hint


def test_the_words_of_findings_are_the_words_of_changes() -> None:
    words = ("host 0=-2.5ms", "pp_max_micro_batch_size=4", "link 1-2=0.5", "remove spin", "scale class:moe=0.9")
    changes = parse_words(words)
    assert [c.kind for c in changes] == ["host", "set", "link", "scale", "scale"]
    assert parse_words([c.text for c in changes]) == changes


def test_one_setting_cannot_have_two_values() -> None:
    conflicts(parse_set("concurrency=2,concurrency=2"))
    with pytest.raises(TraceanaError):
        conflicts(parse_set("concurrency=2,concurrency=3"))

"""What is known about SGLang's and torch's versions, as data: what a profile request may hold, and what breaks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Known", "known", "parse", "supports"]

Version = tuple[int, ...]


@dataclass(frozen=True)
class Known:
    """A fact about the versions in `[first, before)` of one component, told to the user when it applies."""

    name: str
    component: str  # sglang or torch
    severity: str  # info or warning
    text: str
    first: Version = ()
    before: Version | None = None
    pipeline_only: bool = False


# From reading and running the versions: see docs/howto/capture-one-host.md for what each means in practice.
_KNOWN: tuple[Known, ...] = (
    Known(
        "profiler_heap_corruption", "torch", "warning",
        "libkineto of torch 2.11 corrupts the heap when a finished profiler is freed: the server may crash some time "
        "after the profile. The throw-away profile is left out, so that it is done only once",
        first=(2, 11), before=(2, 12),
    ),
    Known(
        "cupti_stays", "torch", "info",
        "the first profile leaves CUPTI loaded in the server: decoding stayed 0 to 12 % slower until the restart. Take "
        "throughput from the windows before the profile",
        first=(2,),
    ),
    Known(
        "stop_is_serial", "sglang", "info",
        "each stage exports its trace inside its event loop and the stages behind it wait: expect a stall of seconds "
        "after the profile; with many ranks, raise --watchdog-timeout",
        pipeline_only=True,
    ),
    Known(
        "merge_is_incomplete", "sglang", "info",
        "merge_profiles under pipeline parallelism merges the first stage only; the capture never asks for it",
        pipeline_only=True,
    ),
    Known(
        "running_requests_are_per_slot", "sglang", "info",
        "#running-req, num_running_reqs and /v1/loads count one micro-batch, not the server",
        pipeline_only=True,
    ),
    Known(
        "no_stage_spans", "sglang", "warning",
        "this version predates the pipeline's own annotations: traces cannot be told apart by micro-batch",
        before=(0, 5, 0), pipeline_only=True,
    ),
    Known(
        "device_timer_is_nan", "sglang", "info",
        "the device timer's `fwd occupancy` is nan under pipeline parallelism",
        first=(0, 5, 16), before=(0, 5, 17), pipeline_only=True,
    ),
)  # fmt: skip

# Field of the profile request -> the first version that knows it. Older ones ignore it; it is not sent to them.
_FIELDS: dict[str, Version] = {"detailed_annotations": (0, 5, 17)}
# Versions whose start with `start_step` is refused, without harm, while a profile runs (a plain start destroys it).
_GUARDED_START: Version = (0, 5, 0)


def parse(text: str | None) -> Version:
    """`0.5.16.post1` as (0, 5, 16); () where the text holds no version."""
    found = re.match(r"\D*(\d+)\.(\d+)(?:\.(\d+))?", text or "")
    return tuple(int(p) for p in found.groups() if p is not None) if found else ()


def known(component: str, version: str | None, *, pipeline: bool) -> Sequence[Known]:
    """What is known about this version; nothing where the version is unknown."""
    at = parse(version)
    if not at:
        return []
    return [
        k
        for k in _KNOWN
        if k.component == component
        and k.first <= at
        and (k.before is None or at < k.before)
        and (pipeline or not k.pipeline_only)
    ]


def supports(version: str | None, what: str) -> bool:
    """Whether SGLang `version` knows a field of the profile request, or `guarded_start`."""
    first = _GUARDED_START if what == "guarded_start" else _FIELDS[what]
    return parse(version) >= first

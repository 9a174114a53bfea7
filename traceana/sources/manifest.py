"""What the recorder of a capture says: manifest.json, a capture script's result.json, the server's command line."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from traceana.sources.losses import SEVERITIES, Loss, Severity, loss
from traceana.sources.server_info import split_command
from traceana.sources.sidecar import Sidecar, plain, to_ns

_OUTLIVED = frozenset({"profiler_heap_corruption"})  # warns of the server's end: no fault of a whole capture

__all__ = ["Launch", "Recording", "Window", "read_launch", "read_recording"]


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server was started. Secrets are still in it: mask before anything leaves the program."""

    command: str
    env: Mapping[str, object]
    source: str


class Window(NamedTuple):
    """A stretch without the profiler, and the tokens that the server counted in it."""

    ns: int
    decode_tokens: int | None
    prefill_tokens: int | None


@dataclass(frozen=True, slots=True)
class Recording:
    """What the recorder knows. Times are epoch nanoseconds on its own clock; None or empty where it does not say.

    `gpus` and `pids` are by rank; `cost` is what it measured of the profile's disturbance, as it wrote it.
    """

    source: str
    steady_ns: tuple[int, int] | None = None
    since_ns: int | None = None  # what a log says before this is of an earlier time of the server
    settings: Mapping[str, object] = field(default_factory=dict[str, object])  # set while the server ran
    windows: tuple[Window, ...] = ()
    command: str | None = None
    env: Mapping[str, object] = field(default_factory=dict[str, object])
    hosts: tuple[str, ...] = ()
    gpus: Mapping[int, int] = field(default_factory=dict[int, int])
    pids: Mapping[int, int] = field(default_factory=dict[int, int])
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    profile_request: Mapping[str, object] | None = None
    cost: Mapping[str, object] | None = None


def read_recording(sidecar: Sidecar) -> tuple[Recording, list[Loss]]:
    """A manifest, or a capture script's result whose `windows` hold `steady`: {start, end} in seconds. What the
    recorder itself found wrong (`problems`) comes back as losses."""
    document = _mapping(sidecar.json)
    windows = document.get("windows")
    steady = _mapping(_mapping(windows).get("steady")) or _mapping(document.get("steady_window"))
    window: tuple[int, int] | None = None
    losses = [*_problems(document.get("problems"), whole=document.get("status") == "complete")]
    if steady:
        start, end = _moment(steady, "start"), _moment(steady, "end")
        if start is not None and end is not None and start < end:
            window = (start, end)
        else:
            losses.append(loss("steady_window_malformed", "warning", 1, f"{sidecar.path.name}: no start before an end"))
    command = document.get("command")
    if isinstance(command, list):
        command = shlex.join(str(c) for c in cast("list[object]", command))
    rows = _mappings(document.get("ranks"))
    request = _mapping(document.get("profile_request"))
    cost = _mapping(document.get("throughput"))
    versions = {k: str(v) for k, v in _mapping(document.get("versions")).items() if isinstance(v, (str, int))}
    recording = Recording(
        source=sidecar.path.name,
        steady_ns=window,
        since_ns=window[0] if window and _integer(document.get("created_ns")) is not None else None,
        settings=_mapping(_mapping(document.get("settings")).get("set")),
        windows=tuple(_window(w) for w in _mappings(windows) if str(w.get("name")).startswith("steady")),
        command=command if isinstance(command, str) and command else None,
        env=_mapping(_mapping(document.get("server")).get("environment")),
        gpus=_by_rank(rows, "gpu"),
        pids=_by_rank(rows, "pid"),
        hosts=tuple(sorted({h for r in rows if isinstance(h := r.get("host"), str)})),
        versions=versions,
        profile_request=cast("Mapping[str, object]", plain(request)) if request else None,
        cost=cast("Mapping[str, object]", plain(cost)) if cost else None,
    )
    return recording, losses


def read_launch(sidecar: Sidecar) -> Launch:
    """A command line in a text file, with the environment that stands before it or in a JSON object after `env:`."""
    text = sidecar.text.strip()
    env: dict[str, object] = {}
    if found := re.search(r"(?m)^\s*env(?:ironment)?\s*[:=]\s*(?=\{)", text):
        try:
            env = _mapping(json.loads(text[found.end() :]))
        except (ValueError, RecursionError):
            env = {}
        text = text[: found.start()].strip()
    before, command = split_command(re.sub(r"[ \t]*\\?\n\s*", " ", text))
    return Launch(command, env | before, sidecar.path.name)


def _mapping(value: object) -> dict[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _mappings(value: object) -> list[dict[str, object]]:
    return [_mapping(v) for v in cast("list[object]", value)] if isinstance(value, list) else []


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _by_rank(rows: Sequence[Mapping[str, object]], key: str) -> dict[int, int]:
    pairs = ((_integer(row.get("rank")), _integer(row.get(key))) for row in rows)
    return {rank: value for rank, value in pairs if rank is not None and value is not None}


def _window(window: Mapping[str, object]) -> Window:
    start, end = _moment(window, "start"), _moment(window, "end")
    ns = end - start if start is not None and end is not None else 0
    return Window(ns, _integer(window.get("decode_tokens")), _integer(window.get("prefill_tokens")))


def _problems(rows: object, *, whole: bool) -> Iterator[Loss]:
    """The recorder's rows that are shaped like losses. In a `whole` capture the server did not end."""
    for row in _mappings(rows):
        severity: Severity | None = next((s for s in SEVERITIES if row.get("severity") == s), None)
        if severity is not None and isinstance(row.get("name"), str):
            rank = _integer(row.get("rank"))
            count = _integer(row.get("count"))
            detail = f"while capturing: {row.get('detail')}"
            known = rank if rank is not None and rank < 2**31 else None
            severity = "info" if whole and row["name"] in _OUTLIVED else severity
            yield loss(str(row["name"]), severity, 1 if count is None else count, detail, known)


def _moment(window: Mapping[str, object], name: str) -> int | None:
    exact = window.get(f"{name}_ns")
    return exact if isinstance(exact, int) and not isinstance(exact, bool) else to_ns(window.get(name))

"""What the recorder of a capture says: manifest.json, a capture script's result.json, the server's command line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from traceana.sources.losses import Loss, loss
from traceana.sources.server_info import split_command
from traceana.sources.sidecar import Sidecar, plain, to_ns

__all__ = ["Launch", "Recording", "read_launch", "read_recording"]


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server was started. Secrets are still in it: mask before anything leaves the program."""

    command: str
    env: Mapping[str, object]
    source: str


@dataclass(frozen=True, slots=True)
class Recording:
    """What the recorder knows. Times are epoch nanoseconds on its own clock; None where it does not say."""

    source: str
    steady_ns: tuple[int, int] | None = None
    command: str | None = None
    hosts: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    profile_request: Mapping[str, object] | None = None
    document: Mapping[str, object] = field(default_factory=dict[str, object])


def read_recording(sidecar: Sidecar) -> tuple[Recording, list[Loss]]:
    """A manifest (`steady`: {start_ns, end_ns}) or a result with `windows` (`steady`: {start, end} in seconds)."""
    document = _mapping(sidecar.json)
    windows = _mapping(document.get("windows"))
    steady = (
        _mapping(windows.get("steady")) or _mapping(document.get("steady")) or _mapping(document.get("steady_window"))
    )
    window: tuple[int, int] | None = None
    losses: list[Loss] = []
    if steady:
        start, end = _moment(steady, "start"), _moment(steady, "end")
        if start is not None and end is not None and start < end:
            window = (start, end)
        else:
            losses.append(loss("steady_window_malformed", "warning", 1, f"{sidecar.path.name}: no start before an end"))
    command = document.get("command")
    if isinstance(command, list):
        command = " ".join(str(c) for c in cast("list[object]", command))
    ranks = document.get("ranks")
    rows = [_mapping(r) for r in cast("list[object]", ranks)] if isinstance(ranks, list) else []
    request = _mapping(document.get("profile_request"))
    versions = {k: str(v) for k, v in _mapping(document.get("versions")).items() if isinstance(v, (str, int))}
    recording = Recording(
        source=sidecar.path.name,
        steady_ns=window,
        command=command if isinstance(command, str) else None,
        hosts=tuple(sorted({h for r in rows if isinstance(h := r.get("host"), str)})),
        versions=versions,
        profile_request=cast("Mapping[str, object]", plain(request)) if request else None,
        document=cast("Mapping[str, object]", plain(document)),
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


def _moment(window: Mapping[str, object], name: str) -> int | None:
    exact = window.get(f"{name}_ns")
    return exact if isinstance(exact, int) and not isinstance(exact, bool) else to_ns(window.get(name))

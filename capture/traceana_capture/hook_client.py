"""The capture's side of the in-process hook: loading it into a server, arming all ranks, collecting their files."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import traceana_capture
from traceana_capture.errors import CaptureError
from traceana_capture.files import disk_error, write_json
from traceana_capture.hook import ENVIRONMENT

__all__ = ["HookClient", "hook_environment"]

_MARGIN_S = 1.0  # between the agreement and the first recorded step


def hook_environment(control: Path, site: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that make an SGLang server load the hook: the control folder, and a PYTHONPATH on which this package
    and a plugin entry point (written into `site`) are found. Nothing is installed."""
    package = Path(traceana_capture.__file__).parent.parent
    facts = site / "traceana_capture_hook-0.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: traceana-capture-hook\nVersion: 0\n")
    (facts / "entry_points.txt").write_text("[sglang.srt.plugins]\ntraceana = traceana_capture.hook:plugin\n")
    control.mkdir(parents=True, exist_ok=True)
    paths = [str(site), str(package), *filter(None, [environment.get("PYTHONPATH")])]
    return {ENVIRONMENT: str(control), "PYTHONPATH": os.pathsep.join(paths)}


class HookClient:
    """Talks to the ranks through their control folder. One recording at a time."""

    def __init__(self, folder: Path, *, pause: Callable[[float], None] = time.sleep) -> None:
        self.folder = folder
        self._pause = pause
        self._id = ""

    def record(
        self,
        ranks: Sequence[int],
        names: Mapping[int, str],
        output: Path,
        *,
        steps: int,
        round_to: int,
        record: str,
        activities: Sequence[str] = ("CPU", "GPU"),
        answer_s: float = 10.0,
    ) -> dict[int, dict[str, Any]]:
        """Arm `ranks`, agree on the first step, and return what each rank said of itself. `record` is `profile` or
        `steps`. Raises CaptureError where a rank does not answer."""
        self._id = f"{time.time_ns()}"
        try:
            (self.folder / self._id).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, self.folder) from None
        write_json(self.folder / "request.json", {"id": self._id, "seconds": answer_s + 20})
        first = self._answers(ranks, answer_s)
        self._pause(0.3)
        again = self._answers(ranks, answer_s)
        rate = max((again[r]["ordinal"] - first[r]["ordinal"]) / 0.3 for r in ranks)
        start = max(a["ordinal"] for a in again.values()) + int(rate * _MARGIN_S) + round_to
        start += -start % round_to
        plan = {
            "start": start,
            "stop": start + steps,
            "record": record,
            "activities": list(activities),
            "output": str(output),
            "names": {str(r): n for r, n in names.items()},
        }
        write_json(self.folder / self._id / "go.json", plan)
        return again

    def results(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """What the ranks that are done say: a `file`, or a `fault`."""
        found: dict[int, dict[str, Any]] = {}
        for rank in ranks:
            document = _read(self.folder / self._id / f"rank-{rank}.done.json")
            if document is not None:
                found[rank] = document
        return found

    def wait(
        self, ranks: Sequence[int], *, timeout_s: float, died: Callable[[], str | None], tick: Callable[[], object]
    ) -> dict[int, dict[str, Any]]:
        """Wait until all ranks are done, the server has died, or time is over; then abort what still runs."""
        end = time.monotonic() + timeout_s
        while len(found := self.results(ranks)) < len(ranks):
            if died() is not None:
                break
            if time.monotonic() > end:
                self.abort()
                self._pause(2.0)
                found = self.results(ranks)
                break
            tick()
            self._pause(0.2)
        return found

    def abort(self) -> None:
        """End a recording at each rank's next step; it then writes what it has."""
        if self._id:
            with contextlib.suppress(OSError):
                (self.folder / self._id / "abort").touch()

    def _answers(self, ranks: Sequence[int], seconds: float) -> dict[int, dict[str, Any]]:
        begin = time.time_ns()
        end = time.monotonic() + seconds
        while True:
            found = {r: _read(path) for r in ranks if _newer(path := self.folder / self._id / f"rank-{r}.json", begin)}
            answers = {r: a for r, a in found.items() if a is not None}
            if len(answers) == len(ranks):
                return answers
            if time.monotonic() > end:
                absent = ", ".join(str(r) for r in ranks if r not in answers)
                raise CaptureError(
                    f"the hook of rank {absent} does not answer",
                    where=str(self.folder),
                    hint=f"start the server with {ENVIRONMENT} set to this folder (see docs/howto/capture-offline.md)",
                )
            self._pause(0.05)


def _newer(path: Path, ns: int) -> bool:
    try:
        return path.stat().st_mtime_ns >= ns - 50_000_000
    except OSError:
        return False


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document: object = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", document) if isinstance(document, dict) else None

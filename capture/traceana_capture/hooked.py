"""A recording through the in-process hook, in the shape of any other: files by rank, and what ended it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traceana_capture.errors import CaptureError
from traceana_capture.facts import LocalServer
from traceana_capture.files import incomplete
from traceana_capture.hook import ENVIRONMENT
from traceana_capture.hook_client import HookClient
from traceana_capture.measure import Poller
from traceana_capture.profile import Outcome, RankFile
from traceana_capture.server import RankKey

__all__ = ["HookRecording", "find_control"]


def find_control(given: Path | None, local: LocalServer) -> Path:
    """The hook's control folder: given, in this environment, or in the server's. Raises CaptureError without one."""
    named = given or os.environ.get(ENVIRONMENT) or local.environment.get(ENVIRONMENT)
    if not named:
        raise CaptureError(
            "the server was started without the hook",
            where=f"{ENVIRONMENT} is not set",
            hint="start it with `traceana capture --hook -- COMMAND`, or set the variable for both",
        )
    return Path(named)


class HookRecording:
    """Records through the hook whose control folder is `control`: step times without a profiler, or a profile."""

    def __init__(
        self,
        control: Path,
        keys: tuple[RankKey, ...],
        output: Path,
        *,
        steps: int,
        slots: int,
        pause: Callable[[float], None],
    ) -> None:
        self._client = HookClient(control, pause=pause)
        self._keys = keys
        self._output = output
        self._steps = steps
        self._slots = slots

    def step_times(self, *, timeout_s: float, died: Callable[[], str | None]) -> list[Path]:
        """Host and GPU time of every step of every rank without a profiler: the files steps-rank-R.json."""
        ranks = [k.rank for k in self._keys]
        names = {r: f"steps-rank-{r}.json" for r in ranks}
        self._client.record(ranks, names, self._output, steps=self._steps, round_to=self._slots, record="steps")
        found = self._client.wait(ranks, timeout_s=timeout_s, died=died, tick=lambda: None)
        return [self._output / str(f["file"]) for f in found.values() if f.get("file")]

    def run(
        self, poller: Poller, *, timeout_s: float, died: Callable[[], str | None]
    ) -> tuple[Outcome, dict[str, Any], dict[int, dict[str, Any]]]:
        """The profile: its outcome, the request, and what every rank said of itself."""
        ranks = [k.rank for k in self._keys]
        stamp = f"{time.time():.7f}"
        names = {
            k.rank: f"{stamp}-TP-{k.tp}{'' if k.dp is None else f'-DP-{k.dp}'}-PP-{k.pp}.trace.json.gz"
            for k in self._keys
        }
        requested = time.time_ns()
        answers = self._client.record(
            ranks, names, self._output, steps=self._steps, round_to=self._slots, record="profile"
        )
        try:
            found = self._client.wait(ranks, timeout_s=timeout_s, died=died, tick=poller.poll)
        except BaseException:
            self._client.abort()
            raise
        files = [self._rank(key, found.get(key.rank)) for key in self._keys]
        ended = "complete" if all(f.fault is None for f in files) else died() or "not every rank's hook has finished"
        started = max((int(f.get("started_ns") or 0) for f in found.values()), default=0) or requested
        outcome = Outcome(files, ended_by=ended, requested_ns=requested, replied_ns=started, complete_ns=time.time_ns())
        return (
            outcome,
            {"num_steps": self._steps, "activities": ["CPU", "GPU"], "with_stack": False, "record_shapes": False},
            answers,
        )

    def _rank(self, key: RankKey, done: dict[str, Any] | None) -> RankFile:
        if done is None:
            return RankFile(key, fault="the hook has not finished")
        if not done.get("file"):
            return RankFile(key, fault=str(done.get("fault", "no file")))
        path = self._output / str(done["file"])
        size = path.stat().st_size if path.exists() else 0
        return RankFile(key, path if size else None, size, incomplete(path) if size else "missing")

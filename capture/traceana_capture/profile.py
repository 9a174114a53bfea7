"""One torch profile through the server's own /start_profile: start it once, watch its files, never leave it running."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceana_capture.errors import CaptureError, Unreachable
from traceana_capture.files import incomplete, parse_name
from traceana_capture.http import HttpServer
from traceana_capture.measure import Poller
from traceana_capture.server import RankKey, ServerInfo

__all__ = ["Outcome", "Profile", "RankFile", "round_steps"]

_NEVER = 1 << 62  # a start_step that no server reaches: asks whether a profile runs without starting one
_POLL_S = 0.2
_UNSEEN_S = 60.0


@dataclass
class RankFile:
    """A rank's trace as far as it has come: complete, truncated, or missing; `fault` says why it is not complete."""

    key: RankKey
    path: Path | None = None
    size: int = 0
    fault: str | None = "missing"
    ep: int | None = None

    @property
    def state(self) -> str:
        return "complete" if self.fault is None else "missing" if self.path is None else "truncated"


@dataclass
class Outcome:
    """What a profile gave: the files by rank, other files it left, and what ended the watch."""

    ranks: list[RankFile]
    others: list[Path] = field(default_factory=list[Path])
    ended_by: str = "complete"
    requested_ns: int = 0
    replied_ns: int = 0
    complete_ns: int = 0

    @property
    def complete(self) -> bool:
        return all(r.fault is None for r in self.ranks)


def round_steps(steps: int, slots: int) -> int:
    """`steps` up to a whole number of rounds over all slots, so that every slot is recorded equally often."""
    return -(-max(steps, 1) // slots) * slots


class Profile:
    """A request for a profile and the folder its files appear in. `seen` is that folder as this process sees it (the
    same folder, a mount of it, or the server process's own root)."""

    def __init__(
        self,
        server: HttpServer,
        info: ServerInfo,
        *,
        server_folder: str,
        seen: Sequence[Path],
        steps: int,
        activities: Sequence[str] = ("CPU", "GPU"),
        with_stack: bool = False,
        record_shapes: bool = False,
        default_settings: bool = False,
        grace_s: float = 30.0,
    ) -> None:
        self.server = server
        self.info = info
        self.seen = list(seen)
        self.grace_s = grace_s  # how long a stage may take to export after the first has finished
        self.profile_id = f"{time.time():.7f}"
        self.request: dict[str, Any] = {
            "output_dir": server_folder,
            "num_steps": steps,
            "activities": list(activities),
            "profile_id": self.profile_id,
        }
        if not default_settings:  # the server's own default records stacks and shapes: the heaviest there is
            self.request.update(with_stack=with_stack, record_shapes=record_shapes)
            if info.supports("detailed_annotations"):
                self.request["detailed_annotations"] = True
        self.running = False

    def already_running(self, timeout_s: float = 60.0) -> bool | None:
        """Whether somebody profiles the server now; None where this version cannot be asked without doing harm.

        A start with a `start_step` is refused while a profile runs, and otherwise starts nothing before that step. A
        plain start would destroy the running profile.
        """
        if not self.info.supports("guarded_start"):
            return None
        probe = {"start_step": _NEVER, "output_dir": self.request["output_dir"], "activities": ["CPU"]}
        return self.server.post("/start_profile", probe, timeout_s=timeout_s).status >= 500

    def start(self) -> None:
        """Ask for the profile. Raises CaptureError where one runs already or the server refuses."""
        if self.already_running():
            raise CaptureError(
                "somebody is profiling this server already",
                where=self.server.url,
                hint="wait until it is done, or end it with: curl -X POST " + self.server.url + "/stop_profile",
            )
        self.running = True
        reply = self.server.post("/start_profile", self.request, timeout_s=60.0)
        if reply.status == 404:
            self.running = False
            raise CaptureError(
                "the server has no /start_profile",
                where=self.server.url,
                hint="start it through `traceana capture --hook -- COMMAND`",
            )
        if reply.status in (401, 403):
            self.running = False
            raise CaptureError(
                "the server wants its admin key for /start_profile",
                where=self.server.url,
                hint="set TRACEANA_API_KEY to the admin key",
            )
        if not reply.ok:
            self.stop()
            raise CaptureError(
                f"the server refused to profile (HTTP {reply.status}: {reply.text.strip()[:200]})",
                where=self.server.url,
                hint="its log says why",
            )

    def stop(self) -> bool:
        """End the profile if it still runs; True where the server said that it did. An answer that none runs is as
        good. The answer comes when the first stage has exported."""
        if not self.running:
            return False
        try:
            return self.server.post("/stop_profile", {}, timeout_s=120.0).ok
        except Unreachable:
            return False
        finally:
            self.running = False

    def look(self, keys: Sequence[RankKey], known: dict[Path, tuple[int, str | None]]) -> Outcome:
        """The files as they are now. `known` caches (size, fault) by path, so that a whole file is read once."""
        ranks = {k.rank: RankFile(k) for k in keys}
        others: list[Path] = []
        for path in self._listing():
            name = parse_name(path.name)
            key = next(
                (k for k in keys if name and (k.pp, k.tp) == (name.pp, name.tp) and k.dp in (None, name.dp)), None
            )
            if key is None or name is None:
                others.append(path)
                continue
            try:
                size = path.stat().st_size
            except OSError:
                continue
            before = known.get(path)
            if before is None or before[0] != size:
                known[path] = (size, "still growing")
                fault: str | None = "still growing"
            elif before[1] == "still growing":
                fault = incomplete(path)
                known[path] = (size, fault)
            else:
                fault = before[1]
            rank = ranks[key.rank]
            if rank.path is None or (rank.fault is not None and fault is None):
                others += [rank.path] if rank.path else []
                ranks[key.rank] = RankFile(key, path, size, fault, name.ep)
            else:
                others.append(path)
        return Outcome([ranks[k.rank] for k in keys], others)

    def wait(
        self,
        keys: Sequence[RankKey],
        *,
        timeout_s: float,
        poller: Poller,
        pause: Callable[[float], None],
        died: Callable[[], str | None],
        progress: Callable[[str], None],
    ) -> Outcome:
        """Watch until every rank of `keys` has a complete file, or nothing more can come. `poller` reads counters on
        the way; `died` says why the server's process is gone. The reply to the request tells nothing of this: it comes
        at the start, and the stages write one after the other."""
        known: dict[Path, tuple[int, str | None]] = {}
        begin = changed = asked = time.monotonic()
        before: list[tuple[int, str]] = []
        idle_since: float | None = None
        patience = self.grace_s / 6
        while True:
            outcome = self.look(keys, known)
            now = time.monotonic()
            state = [(r.size, r.state) for r in outcome.ranks]
            if state != before:
                before, changed = state, now
                done = sum(r.fault is None for r in outcome.ranks)
                progress(f"traces: {done} of {len(keys)} complete, {sum(r.size for r in outcome.ranks)} bytes")
            if outcome.complete:
                self.running = False
                return outcome
            quiet = now - changed
            ended = died()
            answers = poller.poll() if ended is None else False
            if ended is not None or (not answers and not self.server.alive()):
                if quiet > 2.0:
                    return _ended(self, outcome, ended or "the server does not answer any more")
            elif now - begin > timeout_s:
                stopped = self.stop()
                if stopped:
                    outcome = self._after_stop(keys, known, pause)
                return _ended(
                    self,
                    outcome,
                    f"{timeout_s:.0f} s were over" + ("; the profiler still ran and was stopped" if stopped else ""),
                )
            elif now - asked > patience and quiet > self.grace_s / 6:
                asked, patience = now, patience * 1.5  # each refusal is a traceback in the server's log
                running: bool | None = None
                with contextlib.suppress(Unreachable):  # it exports, or has died: the next poll tells
                    running = self.already_running(timeout_s=5.0)
                idle_since = (idle_since or now) if running is False else None
                seen_any = any(r.path is not None for r in outcome.ranks)
                if idle_since is not None and now - max(idle_since, changed) > (
                    self.grace_s if seen_any else self.grace_s / 2
                ):
                    return _ended(self, outcome, "the server has finished, and no more files came")
                if running and not seen_any and now - begin > _UNSEEN_S and not poller.moves():
                    self.stop()
                    outcome = self._after_stop(keys, known, pause)
                    return _ended(self, outcome, "the server ran no steps (no traffic), and the profiler was stopped")
            pause(_POLL_S)

    def _after_stop(
        self, keys: Sequence[RankKey], known: dict[Path, tuple[int, str | None]], pause: Callable[[float], None]
    ) -> Outcome:
        end = time.monotonic() + self.grace_s
        outcome = self.look(keys, known)
        while not outcome.complete and time.monotonic() < end:
            pause(_POLL_S)
            outcome = self.look(keys, known)
        return outcome

    def _listing(self) -> list[Path]:
        found: dict[str, Path] = {}
        for folder in self.seen:
            with contextlib.suppress(OSError):
                for name in os.listdir(folder):
                    if self.profile_id in name and (folder / name).is_file():
                        found.setdefault(name, folder / name)
        return [found[n] for n in sorted(found)]


def _ended(profile: Profile, outcome: Outcome, why: str) -> Outcome:
    profile.running = False
    outcome.ended_by = why
    for rank in outcome.ranks:  # nothing grows any more: say what is wrong with the file as it lies there
        if rank.path is not None and rank.fault == "still growing":
            rank.fault = incomplete(rank.path)
    return outcome

"""One capture of a running server: measure, profile, measure again, bring everything into one folder."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traceana_capture import facts
from traceana_capture.clock import host_clock
from traceana_capture.errors import CaptureError, Unreachable
from traceana_capture.files import fetch, write_json
from traceana_capture.gpu import GpuSampler, open_nvml
from traceana_capture.hooked import HookRecording, find_control
from traceana_capture.http import HttpServer
from traceana_capture.incoming import Incoming, check_room
from traceana_capture.lock import CaptureLock
from traceana_capture.logs import keep_log
from traceana_capture.manifest import Manifest
from traceana_capture.measure import Poller
from traceana_capture.nsys import NsysRecording
from traceana_capture.options import CaptureOptions
from traceana_capture.processes import Child
from traceana_capture.profile import Outcome, Profile, round_steps
from traceana_capture.roundtrip import probe
from traceana_capture.server import RankKey, ServerInfo, discover, parse_ranks
from traceana_capture.settings import Settings
from traceana_capture.versions import known
from traceana_capture.windows import Measurements

__all__ = ["Session"]

_ROUNDS = 20
_RESCUE_S = 5.0


class Session:
    """A capture in the making. `child` is the server where the capture started it; `say` shows progress."""

    def __init__(
        self,
        server: HttpServer,
        options: CaptureOptions,
        folder: Path,
        *,
        say: Callable[[str], None],
        child: Child | None = None,
        control: Path | None = None,
        nsys: NsysRecording | None = None,
    ) -> None:
        self.server = server
        self.options = options
        self.folder = folder
        self.manifest = Manifest(folder)
        self._child = child
        self._control = control  # the hook's folder
        self._nsys = nsys
        self._say = say
        self._pause: Callable[[float], None] = time.sleep
        self._local = facts.LocalServer()
        self._log = Path(options.server_log) if options.server_log else child.log if child else None
        self._log_start = self._log.stat().st_size if self._log and self._log.is_file() else 0
        self._incoming: list[Incoming] = []
        self._followed: tuple[Profile, tuple[RankKey, ...]] | None = None
        self._may_sweep = True  # false while a server may still write: it dies if its folder is gone when it exports
        self._rows: dict[int, dict[str, Any]] = {}
        self._measured = Measurements(
            server, options, folder, self.manifest, pause=self._pause, died=self.died, say=say
        )

    def run(self, lock: CaptureLock) -> Manifest:
        """The whole capture. It always leaves a manifest; on an error or Ctrl-C the server is left as it was found."""
        settings: Settings | None = None
        outcome: Outcome | None = None
        sampler = GpuSampler(self.folder / "gpu.csv")
        status = "failed"
        info = discover(self.server)  # before anything is written: no folder is left where there is no server
        try:
            self._prepare(lock)
            settings = Settings(self.server, info, self.options.pairs("set"), lock)
            if settings.apply():
                info = discover(self.server)  # every fact that is kept is of the server as it is recorded
            keys = self._look(info)
            self._clock("before")
            sampler.start()
            self._measured.start_load(info)
            self._measured.wait_steady()
            self._throw_away(info)
            self._measured.before()
            outcome = self._record(info, keys, lock)
            self._clock("during")
            self._after(outcome)
            names = self._fetch(outcome)
            self._clock("after")
            status = "complete" if outcome.complete else "partial" if names else "failed"
        except KeyboardInterrupt:
            status = "interrupted"
            self._rescue()
            raise
        except CaptureError as error:
            self.manifest.problem("capture_failed", "error", str(error))
            raise
        finally:
            self._leave(sampler, settings, outcome, status)
        return self.manifest

    def died(self) -> str | None:
        """Why the server is gone, where its process can be seen; None while it runs, or where it cannot be seen."""
        if self._child is not None:
            return self._child.died()
        if self._local.pid is not None and not os.path.exists(f"/proc/{self._local.pid}"):
            return f"process {self._local.pid} is gone"
        return None

    def _prepare(self, lock: CaptureLock) -> None:
        for name in ("ranks", "server"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        lock.note(folder=str(self.folder))
        shown = {
            k: v
            for k, v in vars(self.options).items()
            if v not in (None, (), False) and k not in ("command", "grace_s")
        }
        self.manifest.document["arguments"] = shown
        self.manifest.start()

    def _look(self, info: ServerInfo) -> tuple[RankKey, ...]:
        local = self._local = facts.look_at(self.server)
        keys = parse_ranks(self.options.ranks, info)
        if facts.profile_v2(local) and not self.options.hook:
            raise CaptureError(
                "SGLANG_PROFILE_V2 is set in the server: a plain profile would end it",
                where=self.server.url,
                hint="restart it without, or with --hook",
            )
        if self.options.hook:
            find_control(self._control, local)  # before the load and the windows are paid for
        document, nvml = self.manifest.document, open_nvml()
        versions = {
            "sglang": info.version,
            "torch": local.torch,
            "python": facts.python_version(local),
            "driver": nvml.driver() if nvml else None,
        }
        document["versions"] = {k: v for k, v in versions.items() if v}
        document["server"] = facts.server_row(self.server, info, local, started=self._child is not None)
        document["command"] = facts.command_row(local, self.options.command)
        document["gpus"] = [{k: v for k, v in d.items() if k != "pids"} for d in nvml.devices()] if nvml else []
        self._rows = facts.rank_rows(keys, info, local, nvml)
        document["ranks"] = [{**row, "file": None, "state": "missing"} for row in self._rows.values()]
        if nvml:
            nvml.close()
        for component, version in (("sglang", info.version), ("torch", local.torch)):
            for fact in known(component, version, pipeline=info.pp_size > 1):
                self.manifest.problem(fact.name, fact.severity, f"{component} {version}: {fact.text}")
        if len(keys) < len(info.ranks):
            self.manifest.problem(
                "ranks_not_selected", "info", f"--ranks {self.options.ranks}", count=len(info.ranks) - len(keys)
            )
        facts.save_answers(self.server, self.folder / "server")
        facts.save_model_config(info, local, self.folder / "server")
        cap = info.micro_batch_cap or "?"
        self._say(f"{self.server.url}: {len(info.ranks)} ranks, {info.slots} slots of at most {cap} requests")
        return keys

    def _throw_away(self, info: ServerInfo) -> None:
        wanted = self.options.throw_away
        risky = any(p["name"] == "profiler_heap_corruption" for p in self.manifest.document["problems"])
        if self._nsys or self.options.hook or wanted == "no" or (wanted == "auto" and risky):
            return
        profile = self._new_profile(info, info.slots)
        self._say("a short profile first, so that the profiler's start-up is not in the capture")
        outcome = self._follow(profile, Poller(self.server, []), info.ranks)
        self.manifest.add_profile(profile.request, outcome, via="http", throw_away=True)
        for path in [*(r.path for r in outcome.ranks), *outcome.others]:
            if path is not None:
                with contextlib.suppress(OSError):
                    path.unlink()
        self._measured.settle()

    def _record(self, info: ServerInfo, keys: tuple[RankKey, ...], lock: CaptureLock) -> Outcome:
        steps = round_steps(self.options.steps or _ROUNDS * info.slots, info.slots)
        if self.options.steps and steps != self.options.steps:
            self.manifest.problem(
                "steps_rounded",
                "info",
                f"{self.options.steps} steps are recorded as {steps}: whole rounds over {info.slots} slots",
            )
        profile = self._new_profile(info, steps)
        stacks = bool(profile.request.get("with_stack"))
        check_room(
            (self._incoming[-1].seen[0], self.folder),
            steps=steps,
            ranks=len(info.ranks),
            stacks=stacks,
            local=self._local.pid is not None,
        )
        self._say(f"profiling {steps} steps of {len(info.ranks)} ranks")
        via = "nsys" if self._nsys else "hook" if self.options.hook else "http"
        request: dict[str, Any] = profile.request
        if self._nsys is not None:
            outcome = self._nsys.run(profile, self._measured.poller, timeout_s=self.options.timeout, died=self.died)
        elif self.options.hook:
            control, seen = find_control(self._control, self._local), self._incoming[-1].seen[0]
            self._measured.poller.poll_now()
            recording = HookRecording(control, keys, seen, steps=steps, slots=info.slots, pause=self._pause)
            for path in recording.step_times(timeout_s=self.options.timeout, died=self.died):
                fetch(path, self.folder / "server" / path.name)
            outcome, request, answers = recording.run(
                self._measured.poller, timeout_s=self.options.timeout, died=self.died
            )
            for rank, answer in answers.items():
                self._rows[rank].update({k: answer.get(k) for k in ("pid", "host") if answer.get(k)})
        else:
            lock.note(profile_id=profile.profile_id)
            try:
                outcome = self._follow(profile, self._measured.poller, keys)
            finally:  # it has ended or was stopped; only a capture that is killed leaves the note
                lock.note(profile_id=None)
        self.manifest.add_profile(request, outcome, via=via, throw_away=False)
        self.manifest.document["profile_request"] = request
        if outcome.ranks and not any(r.path for r in outcome.ranks) and self.died() is None and self.server.alive():
            self.manifest.problem(
                "traces_not_visible",
                "error",
                f"the server was told to write into {profile.request['output_dir']} and no file is visible here "
                f"({outcome.ended_by}). If it runs in a container or on another host, name a folder that both see: "
                "--server-dir SERVER_PATH:LOCAL_PATH",
            )
        return outcome

    def _new_profile(self, info: ServerInfo, steps: int) -> Profile:
        incoming = Incoming.new(self.folder, self._local, self.options.server_dir, one_host=info.nnodes == 1)
        self._incoming.append(incoming)
        profile = Profile(
            self.server,
            info,
            server_folder=incoming.told,
            seen=incoming.seen,
            steps=steps,
            grace_s=self.options.grace_s,
        )
        profile.request.update(self.options.pairs("request"))
        if isinstance(profile.request["activities"], str):
            profile.request["activities"] = [profile.request["activities"]]
        return profile

    def _follow(self, profile: Profile, poller: Poller, keys: tuple[RankKey, ...]) -> Outcome:
        requested = time.time_ns()
        self._may_sweep, self._followed = False, (profile, keys)
        try:
            poller.poll_now()
            profile.start()
            replied = time.time_ns()
            outcome = profile.wait(
                keys,
                timeout_s=self.options.timeout,
                poller=poller,
                pause=self._pause,
                died=self.died,
                progress=self._say,
            )
        finally:
            if profile.running:
                self._say("stopping the profiler")
                profile.stop()
        outcome.requested_ns, outcome.replied_ns, outcome.complete_ns = requested, replied, time.time_ns()
        poller.poll_now()
        self._may_sweep = outcome.complete and len(keys) == len(profile.info.ranks)
        return outcome

    def _rescue(self) -> None:
        """After Ctrl-C: bring in the traces that are whole already. The others stay where the server writes them."""
        if self._followed is None or self.manifest.document["profiles"]:
            return
        profile, keys = self._followed
        known: dict[Path, tuple[int, str | None]] = {}
        end = time.monotonic() + _RESCUE_S
        outcome = profile.look(keys, known)
        while not outcome.complete and self.died() is None and time.monotonic() < end:  # later stages still export
            self._pause(0.3)
            outcome = profile.look(keys, known)
        outcome.ended_by = "interrupted"
        outcome.others = []
        for found in outcome.ranks:
            if found.fault is not None:
                found.path = None
        with contextlib.suppress(CaptureError):
            self._fetch(outcome)

    def _after(self, outcome: Outcome) -> None:
        try:
            if self.died() is None and self.server.alive():
                self._measured.after()
                facts.save_answers(self.server, self.folder / "server", "_end")
                return
            reason = self.died() or outcome.ended_by
        except Unreachable as error:
            reason = str(error)
        except CaptureError as error:  # a disk that is full now: what the server wrote is still to be brought in
            self.manifest.problem("file_not_written", "error", str(error))
            return
        self.manifest.problem("server_died", "error", reason)

    def _fetch(self, outcome: Outcome) -> dict[int, str]:
        names: dict[int, str] = {}
        if self._nsys is not None:
            self.manifest.problem(
                "measured_under_nsys",
                "info",
                "nsys was around the server all the time, which costs up to 11 % also while it does not record: take "
                "throughput from a server without it",
            )
            exported = self._nsys.export()
            self.manifest.document["nsys"] = self._nsys.document
            for row in self._rows.values():  # one export holds every rank
                row.update(file=exported, state="complete")
                names[row["rank"]] = exported
            self.manifest.document["ranks"] = [self._rows[k] for k in sorted(self._rows)]
            return names
        for found in outcome.ranks:
            if found.path is not None and found.size:
                fetch(found.path, self.folder / "ranks" / found.path.name)
                names[found.key.rank] = f"ranks/{found.path.name}"
        self.manifest.add_ranks(self._rows, outcome, names)
        if outcome.others:
            left = ", ".join(p.name for p in outcome.others[:8])
            self.manifest.problem("files_left_out", "info", left, count=len(outcome.others))
        return names

    def _leave(self, sampler: GpuSampler, settings: Settings | None, outcome: Outcome | None, status: str) -> None:
        if settings is not None:
            settings.restore()
            self.manifest.document["settings"] = settings.document()
            if not settings.restored:
                self.manifest.problem("setting_not_restored", "error", f"still set: {settings.document()['set']}")
        log = (self._log, self._log_start) if self._log is not None and self._log.is_file() else None
        begin = (outcome.replied_ns if self.options.hook else outcome.requested_ns) if outcome else None
        self._attempt(lambda: self._measured.finish(begin, outcome.complete_ns if outcome else None, log))
        sampler.stop()
        self.manifest.document["gpu_samples"] = {
            "source": sampler.source,
            "rows": sampler.rows,
            "period_ns": round(sampler.period_s * 1e9),
        }
        if sampler.source == "none":
            self.manifest.problem(
                "gpu_samples_missing", "info", "no NVIDIA driver is visible here: power and clocks were not sampled"
            )
        client = self._measured.client_document()
        if client is not None:
            self._attempt(lambda: write_json(self.folder / "client.json", client))
        if log is not None:
            self._attempt(lambda: self._keep_log(*log))
        if self._may_sweep:
            for incoming in self._incoming:
                incoming.sweep(self.folder)
        self.manifest.finish(status)

    def _keep_log(self, log: Path, start: int) -> None:
        left = keep_log(log, self.folder / "server" / "server.log", since=start)
        if left:
            self.manifest.problem("log_shortened", "info", f"{log}", count=left)

    def _attempt(self, action: Callable[[], object]) -> None:
        """One of the last things to do: a full disk loses that one, and the manifest says so, not the rest."""
        try:
            action()
        except CaptureError as error:
            self.manifest.problem("file_not_written", "error", str(error))

    def _clock(self, when: str) -> None:
        clock = self.manifest.document["clock"]
        clock["hosts"].append(host_clock(when))
        for target in self.options.clock_host:
            try:
                clock["round_trips"].append(probe(target, when=when))
            except CaptureError as error:
                self.manifest.problem("clock_host_silent", "warning", str(error))

"""The measuring part of a capture: load, steady state, windows before and after, and what the profile cost."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traceana_capture import cost, measure, steady
from traceana_capture.errors import CaptureError
from traceana_capture.http import HttpServer
from traceana_capture.load import Load, parse_load
from traceana_capture.logs import decode_rates
from traceana_capture.manifest import Manifest
from traceana_capture.options import CaptureOptions
from traceana_capture.processes import Child
from traceana_capture.server import ServerInfo, vocabulary

__all__ = ["Measurements"]

_LEAST_S, _LONGEST_S, _USUAL_S = 0.5, 60.0, 5.0


class Measurements:
    """Owns the load. `pause` sleeps; `died` says why the server is gone, or None."""

    def __init__(
        self,
        server: HttpServer,
        options: CaptureOptions,
        folder: Path,
        manifest: Manifest,
        *,
        pause: Callable[[float], None],
        died: Callable[[], str | None],
        say: Callable[[str], None],
    ) -> None:
        self.poller = measure.Poller(server, [])
        self.load: Load | None = None
        self.windows: list[dict[str, Any]] = []
        self._server = server
        self._options = options
        self._folder = folder
        self._manifest = manifest
        self._pause = pause
        self._died = died
        self._say = say
        self._command: Child | None = None

    def start_load(self, info: ServerInfo) -> None:
        """Start what --load or --load-command asks for."""
        document: dict[str, Any] = {"spec": self._options.load, "command": None}
        spec = parse_load(self._options.load)
        if self._options.load_command:
            words = shlex.split(self._options.load_command)
            self._command = Child(words, self._folder / "server" / "load_command.log")
            document["command"] = words
        elif spec is not None:
            model = info.raw.get("served_model_name") or info.model_path
            api = "sglang" if info.is_sglang else "openai"
            self.poller.period_s = 1.0
            self.load = Load(self._server, spec, vocabulary=vocabulary(info), model=model, api=api).start()
        self._manifest.document["load"] = document

    def wait_steady(self) -> None:
        """Until the load is steady; a load that never is gets a warning, none at all is an error."""
        state = steady.wait_steady(
            self._server, self.load, timeout_s=self._options.steady_timeout, pause=self._pause, died=self._gone
        )
        self._manifest.document["load"].update(state)
        if not state["steady"]:
            self._manifest.problem("load_not_steady", "warning", str(state["why"]))
        self._say(f"load: {state['why']}")

    def before(self) -> None:
        """The windows without the profiler, then, with a load of its own, the moment in mid-decode."""
        count = self._options.windows
        if count and self.load is None:  # how long a request takes is only known from the server's counters
            first = self._measure("first", 2.0, keep=False)
            cycle = first.get("server_latency_ns_mean")
        else:
            cycle = measure.cycle_ns(self.load, None, None)
        for index in range(count):
            self._say(f"window {index + 1} of {count} without the profiler, {_seconds(cycle):.1f} s")
            self.windows.append(self._measure(f"steady_{index + 1}", _seconds(cycle)))
        if self.windows:
            span = {"start_ns": self.windows[0]["start_ns"], "end_ns": self.windows[-1]["end_ns"]}
            self._manifest.document["steady_window"] = span
        if self.load is not None and not steady.mid_request(self.load, cycle, pause=self._pause):
            self._manifest.problem("not_mid_request", "info", "no answer of the streaming client was in its middle")

    def settle(self) -> None:
        """Let a stall pass: one request's life, ten seconds at most."""
        self._pause(min((measure.cycle_ns(self.load, None, None) or 0) / 1e9, 10.0))

    def after(self) -> None:
        """One more window without the profiler."""
        if self._options.windows:
            self.windows.append(self._measure("after", _seconds(measure.cycle_ns(self.load, None, None))))

    def finish(self, start_ns: int | None, end_ns: int | None, log: tuple[Path, int] | None = None) -> None:
        """Stop the load; write the counters of the profile, and the figures into the manifest. `log` is the server's
        log and the byte at which this capture began."""
        if self._command is not None:
            code = self._command.wait(0.0)
            if code not in (None, 0):
                self._manifest.problem(
                    "load_command_failed", "warning", f"it ended with exit status {code}; see server/load_command.log"
                )
            self._command.stop(grace_s=5.0)
        if self.load is not None:
            self.load.stop()
            requests = self.load.snapshot()
            failed = self.load.failures()
            if failed:
                self._manifest.problem("requests_failed", "warning", str(failed[0].error), count=len(failed))
            for window in self.windows:  # requests that were open at a window's end have ended by now
                window.update(measure.client_figures(requests, window["start_ns"], window["end_ns"]))
        self._manifest.document["windows"] = self.windows
        if start_ns and end_ns:
            spans = [(w["start_ns"], w["end_ns"]) for w in self.windows if str(w["name"]).startswith("steady")]
            logged = decode_rates(*log, spans) if log else []
            figures = cost.disturbance(
                self.windows, start_ns, end_ns, load=self.load, series=self.poller.series, logged=logged
            )
            self._manifest.document["throughput"] = figures
        self.poller.write(self._folder / "server" / "tokens_during.csv")

    def client_document(self) -> dict[str, Any] | None:
        """client.json, where the capture made the load itself."""
        return {**self.load.document(), "windows": self.windows} if self.load is not None else None

    def _measure(self, name: str, seconds: float, *, keep: bool = True) -> dict[str, Any]:
        folder = self._folder / "server" if keep else None
        return measure.measure(self._server, name, seconds, folder, load=self.load, pause=self._pause)

    def _gone(self) -> str | None:
        if self._command is not None and (reason := self._command.died()):
            raise CaptureError(
                "the load command ended before the load was steady", where=reason, hint="see server/load_command.log"
            )
        return self._died()


def _seconds(cycle: int | None) -> float:
    return min(max(cycle / 1e9 if cycle else _USUAL_S, _LEAST_S), _LONGEST_S)

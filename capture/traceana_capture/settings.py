"""Settings of a running server, changed through /set_internal_state for one capture and put back after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from traceana_capture.errors import CaptureError
from traceana_capture.http import HttpServer
from traceana_capture.lock import CaptureLock
from traceana_capture.server import ServerInfo, discover

__all__ = ["LIVE", "Settings", "change", "check_live"]

LIVE = ("pp_max_micro_batch_size",)  # what SGLang 0.5 changes while it runs and a capture can read back


class Settings:
    """`wanted` by SGLang's own names. What was there before is noted in the lock, so that a capture that is killed is
    put right by the next one."""

    def __init__(self, server: HttpServer, info: ServerInfo, wanted: Mapping[str, Any], lock: CaptureLock) -> None:
        check_live(list(wanted))
        self._server = server
        self._lock = lock
        self._wanted = dict(wanted)
        self._before: dict[str, Any] = {"pp_max_micro_batch_size": info.micro_batch_cap} if wanted else {}
        self._limit = max((info.max_running_requests or 0) // info.pp_size, 1)
        self.restored = True

    def apply(self) -> bool:
        """Set them, and check that the server has taken them: whether there was anything to set. Raises CaptureError
        where it has not."""
        if not self._wanted:
            return False
        cap = self._wanted.get("pp_max_micro_batch_size")
        if not isinstance(cap, int) or not 1 <= cap <= self._limit:
            raise CaptureError(
                f"this server takes 1 to {self._limit} (max_running_requests // pp_size)",
                where=f"--set pp_max_micro_batch_size={cap}",
            )
        self._lock.note(restore=self._before)
        self.restored = False
        change(self._server, self._wanted)
        return True

    def restore(self) -> None:
        """Put back what was there. `restored` tells whether that worked."""
        if self.restored:
            return
        try:
            change(self._server, self._before)
        except CaptureError:
            return
        self.restored = True
        self._lock.note(restore=None)

    def document(self) -> dict[str, Any]:
        """For the manifest."""
        return {"set": self._wanted, "before": self._before, "restored": self.restored} if self._wanted else {}


def check_live(keys: Sequence[str]) -> None:
    """Raises CaptureError for a setting that a running server does not change."""
    for key in keys:
        if key not in LIVE:
            raise CaptureError(
                "cannot be changed on a running server",
                where=f"--set {key}",
                hint=f"restart the server with it; live are: {', '.join(LIVE)}",
            )


def change(server: HttpServer, values: Mapping[str, Any]) -> None:
    """POST /set_internal_state, and read back what the server then uses. Raises CaptureError where it differs."""
    reply = server.post("/set_internal_state", {"server_args": dict(values)}, timeout_s=60.0)
    answer = reply.json()
    if not reply.ok or answer is False or (isinstance(answer, list) and not all(answer)):
        raise CaptureError(
            f"the server refused (HTTP {reply.status}: {reply.text.strip()[:200]})",
            where=f"/set_internal_state {dict(values)}",
            hint="its log says why",
        )
    now = discover(server).micro_batch_cap
    wanted = values.get("pp_max_micro_batch_size")
    if wanted is not None and now != wanted:
        raise CaptureError(
            f"the server still uses {now}",
            where=f"/set_internal_state {dict(values)}",
            hint="this version takes the change without effect",
        )

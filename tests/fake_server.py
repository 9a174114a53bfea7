"""A stand-in for SGLang's HTTP server, in this process: endpoints, scheduler loop and profiler of 0.5.16 and 0.5.23.

Its traps are those of the real one (see `Traps`). A thread plays the scheduler: each forward takes `step_s`, serves one
slot, and feeds the streams of that slot's requests. A profile counts forwards, and then writes one gzipped trace per
rank, stage after stage, each holding up the loop while it exports, as the real server does.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["FakeServer", "Traps"]


@dataclass
class Traps:
    """What goes wrong. Ranks are pipeline ranks."""

    late_s: dict[int, float] = field(default_factory=dict[int, float])  # a rank's file comes this much later
    truncated: frozenset[int] = frozenset()  # a rank's gzip file has no end
    absent: frozenset[int] = frozenset()  # a rank writes nothing
    stage_suffix: str = ""  # for instance -DECODE on files that hold something else
    merged: bool = False  # a merged file of the first rank appears as well
    dies_after_steps: int | None = None  # the server is gone in mid-profile
    export_s: float = 0.0  # the export takes so long; its folder must still be there at its end, or the server dies
    never_ends: bool = False  # num_steps is never reached
    slow_write_s: float = 0.0  # a file stands half written for so long
    profile_status: int = 200
    admin_key: str | None = None
    request_status: int = 200
    refuse_settings: bool = False
    ignore_settings: bool = False
    profiled_step_factor: float = 1.0  # how much slower a step is under the profiler


class FakeServer:
    """Use as `with FakeServer(...) as server:`; `server.url` is its address. What it was asked is in `asked`."""

    def __init__(
        self,
        *,
        version: str = "0.5.16",
        pp_size: int = 2,
        tp_size: int = 1,
        max_running_requests: int = 16,
        step_s: float = 0.002,
        traps: Traps | None = None,
        openai_only: bool = False,
        legacy_info: bool = False,
        metrics: bool = True,
        api_key: str | None = None,
        port: int = 0,
    ) -> None:
        self.version = version
        self.pp_size = pp_size
        self.tp_size = tp_size
        self.max_running_requests = max_running_requests
        self.cap = max(max_running_requests // pp_size, 1)
        self.step_s = step_s
        self.traps = traps or Traps()
        self.openai_only = openai_only
        self.legacy_info = legacy_info
        self.metrics = metrics
        self.api_key = api_key
        self.asked: list[tuple[str, Any]] = []
        self.forwards = 0
        self.decode_tokens = 0
        self.requests_done = 0
        self.lost_profiles = 0  # a running profile that a second plain start destroyed
        self.written: list[Path] = []
        self._profile: dict[str, Any] | None = None
        self._pending: dict[str, Any] | None = None  # started by start_step
        self._slots: list[list[_Request]] = [[] for _ in range(pp_size)]
        self._waiting: queue.Queue[_Request] = queue.Queue()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._http = _Server(("127.0.0.1", port), _Handler)
        self._http.fake = self
        self._threads = [
            threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True),
            threading.Thread(target=self._loop, daemon=True),
        ]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def profiling(self) -> bool:
        return self._profile is not None

    def __enter__(self) -> FakeServer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        for thread in self._threads:
            thread.join(5.0)

    def die(self) -> None:
        """Stop answering: the listening socket is closed and every connection cut."""
        if self._over.is_set():
            return
        self._over.set()
        self._http.shutdown()
        self._http.server_close()
        self._http.cut()
        for request in [r for slot in self._slots for r in slot]:
            request.stream.put(None)

    # the scheduler

    def _loop(self) -> None:
        slot = 0
        while not self._over.is_set():
            with self._lock:
                requests = self._slots[slot]
                while len(requests) < self.cap and not self._waiting.empty():
                    requests.append(self._waiting.get())
                if requests:
                    self._forward(requests)
                    self._slots[slot] = [r for r in requests if r.left > 0]
            time.sleep(self.step_s * (self.traps.profiled_step_factor if self._profile else 1.0) if requests else 0.001)
            slot = (slot + 1) % self.pp_size

    def _forward(self, requests: list[_Request]) -> None:
        self.forwards += 1
        pending = self._pending
        if pending is not None and self.forwards >= pending["start_step"]:
            self._pending, self._profile = None, pending
        self.decode_tokens += len(requests)
        for request in requests:
            request.left -= 1
            request.stream.put(request.output - request.left)
            if request.left <= 0:
                self.requests_done += 1
                request.stream.put(None)
        profile = self._profile
        if profile is None:
            return
        profile["ran"] += 1
        dies = self.traps.dies_after_steps
        if dies is not None and profile["ran"] >= dies:
            threading.Thread(target=self.die, daemon=True).start()
        elif profile["num_steps"] is not None and profile["ran"] > profile["num_steps"] and not self.traps.never_ends:
            self._export(profile)

    def _export(self, profile: dict[str, Any]) -> None:
        self._profile = None
        if "CUDA_PROFILER" in (profile["body"].get("activities") or ()):  # nsys writes, not the server
            return
        folder = Path(profile["output_dir"] or "/tmp")
        folder.mkdir(parents=True, exist_ok=True)
        time.sleep(self.traps.export_s)
        if not folder.is_dir():  # an exception in the scheduler ends the whole server
            threading.Thread(target=self.die, daemon=True).start()
            return
        for pp in range(self.pp_size):
            for tp in range(self.tp_size):
                late = self.traps.late_s.get(pp, 0.0)
                if pp in self.traps.absent:
                    continue
                if late:
                    threading.Timer(late, self._write, (folder, profile, pp, tp)).start()
                else:
                    self._write(folder, profile, pp, tp)
        if self.traps.merged:
            path = folder / f"merged-{profile['profile_id']}.trace.json.gz"
            path.write_bytes(gzip.compress(b'{"traceEvents": []}'))

    def _write(self, folder: Path, profile: dict[str, Any], pp: int, tp: int) -> None:
        stage = f"-PP-{pp}" if self.pp_size > 1 else ""
        path = folder / f"{profile['profile_id']}-TP-{tp}{stage}{self.traps.stage_suffix}.trace.json.gz"
        rank = pp * self.tp_size + tp
        data = gzip.compress(_trace(rank, self.pp_size * self.tp_size, profile))
        if pp in self.traps.truncated:
            data = data[: len(data) // 2]
        with contextlib.suppress(OSError):
            if self.traps.slow_write_s:
                path.write_bytes(data[: len(data) // 2])
                time.sleep(self.traps.slow_write_s)
            path.write_bytes(data)
            self.written.append(path)

    # the endpoints

    def start_profile(self, body: dict[str, Any]) -> tuple[int, str]:
        """As the V1 profiler: a start with start_step is refused while one runs, a plain one destroys it."""
        if self.traps.profile_status != 200:
            return self.traps.profile_status, "refused"
        request = {
            "output_dir": body.get("output_dir"),
            "num_steps": body.get("num_steps"),
            "profile_id": body.get("profile_id") or str(time.time()),
            "body": body,
            "ran": 0,
        }
        with self._lock:
            if body.get("start_step"):
                if self._profile is not None:
                    return 500, "Internal Server Error"
                self._pending = {**request, "start_step": max(int(body["start_step"]), self.forwards + 1)}
                return 200, "Start profiling.\n"
            if self._profile is not None:
                self._profile = None
                self.lost_profiles += 1
                return 500, "Internal Server Error"
            self._profile = request
        return 200, "Start profiling.\n"

    def stop_profile(self) -> tuple[int, str]:
        with self._lock:
            profile = self._profile
            if profile is None:
                return 500, "Internal Server Error"
            self._export(profile)
        return 200, "Stop profiling. This will take some time.\n"

    def set_internal_state(self, body: dict[str, Any]) -> tuple[int, Any]:
        value = body.get("server_args", {}).get("pp_max_micro_batch_size")
        limit = self.max_running_requests // self.pp_size
        if self.traps.refuse_settings or not isinstance(value, int) or not 1 <= value <= limit:
            return 200, [False]
        if not self.traps.ignore_settings:
            self.cap = value
        return 200, [True]

    def server_info(self) -> dict[str, Any]:
        return {
            "model_path": "/srv/model", "skip_tokenizer_init": True, "pp_size": self.pp_size, "tp_size": self.tp_size,
            "dp_size": 1, "ep_size": 1, "nnodes": 1, "pp_async_batch_depth": 0, "pp_max_micro_batch_size": None,
            "max_running_requests": self.max_running_requests, "enable_metrics": self.metrics, "base_gpu_id": 0,
            "gpu_id_step": 1, "api_key": "sk-very-secret-0123456789abcdef", "version": self.version,
            "launch_command": "python -m sglang.launch_server --api-key sk-very-secret-0123456789abcdef --pp-size 2",
            "internal_states": [{
                "pp_max_micro_batch_size": self.cap, "effective_max_running_requests_per_dp": self.max_running_requests,
            }],
        }  # fmt: skip

    def loads(self) -> dict[str, Any]:
        running = max((len(s) for s in self._slots), default=0)  # one slot's, as the real server
        load = {"dp_rank": 0, "num_running_reqs": running, "num_waiting_reqs": self._waiting.qsize()}
        return {"version": self.version, "loads": [load]}

    def metrics_text(self) -> str:
        lines = ["# TYPE sglang:realtime_tokens_total counter"]
        for pp in range(self.pp_size):
            labels = f'{{mode="decode",pp_rank="{pp}",tp_rank="0"}}'
            lines.append(f"sglang:realtime_tokens_total{labels} {float(self.decode_tokens)}")
        lines.append(f"sglang:num_requests_total {float(self.requests_done)}")
        return "\n".join(lines) + "\n"

    def submit(self, tokens: int) -> _Request:
        request = _Request(tokens)
        self._waiting.put(request)
        return request


class _Request:
    def __init__(self, output: int) -> None:
        self.output = output
        self.left = output
        self.stream: queue.Queue[int | None] = queue.Queue()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    fake: FakeServer

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sockets: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._sockets.discard(request)
        super().shutdown_request(request)

    def cut(self) -> None:
        for one in list(self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def fake(self) -> FakeServer:
        server = self.server
        assert isinstance(server, _Server), "only this module makes handlers"
        return server.fake

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        fake, path = self.fake, urlsplit(self.path).path
        fake.asked.append((path, None))
        if not self._allowed():
            return
        native = {"/model_info": {"model_path": "/srv/model", "is_generation": True}, "/v1/loads": fake.loads()}
        if path == "/health":
            self._answer(200, "")
        elif path == "/v1/models":
            self._answer(200, {"object": "list", "data": [{"id": "model"}]})
        elif fake.openai_only:
            self._answer(404, "Not Found")
        elif path == "/get_server_info" or (path == "/server_info" and not fake.legacy_info):
            self._answer(200, fake.server_info())
        elif path in native:
            self._answer(200, native[path])
        elif path == "/metrics" and fake.metrics:
            self._answer(200, fake.metrics_text())
        else:
            self._answer(404, "Not Found")

    def do_POST(self) -> None:
        fake, path = self.fake, urlsplit(self.path).path
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        fake.asked.append((path, body))
        if not self._allowed():
            return
        if path in ("/start_profile", "/stop_profile") and fake.traps.admin_key not in (None, self._key()):
            self._answer(401, "Unauthorized")
        elif path == "/start_profile" and not fake.openai_only:
            self._answer(*fake.start_profile(body))
        elif path == "/stop_profile" and not fake.openai_only:
            self._answer(*fake.stop_profile())
        elif path == "/set_internal_state":
            self._answer(*fake.set_internal_state(body))
        elif path == "/generate" and not fake.openai_only:
            self._generate(body["sampling_params"]["max_new_tokens"], body.get("stream", False), openai=False)
        elif path == "/v1/completions":
            self._generate(body["max_tokens"], body.get("stream", False), openai=True)
        else:
            self._answer(404, "Not Found")

    def _generate(self, tokens: int, stream: bool, *, openai: bool) -> None:
        fake = self.fake
        if fake.traps.request_status != 200:
            self._answer(fake.traps.request_status, {"error": "no"})
            return
        request = fake.submit(tokens)
        if stream:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
        count = 0
        while (got := request.stream.get()) is not None:
            count = got
            if stream:
                part = {"choices": [{"text": "x"}]} if openai else {"meta_info": {"completion_tokens": count}}
                self._chunk(b"data: " + json.dumps(part).encode() + b"\n\n")
        if request.left > 0:
            raise ConnectionError("the server died")
        if stream:
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        else:
            done = {"usage": {"completion_tokens": count}} if openai else {"meta_info": {"completion_tokens": count}}
            self._answer(200, done)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _key(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def _allowed(self) -> bool:
        if self.fake.api_key in (None, self._key()):
            return True
        self._answer(401, "Unauthorized")
        return False

    def _answer(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _trace(rank: int, world: int, profile: dict[str, Any]) -> bytes:
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "run_batch", "pid": 1, "tid": 1, "ts": 1000.0 * i, "dur": 500.0}
        for i in range(profile["ran"])
    ]
    head = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}}
    return json.dumps({**head, "traceEvents": events}).encode()


def main() -> None:
    """Serve on `--port` until SIGTERM, as a process of its own: what `-- COMMAND` starts in tests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--start-s", type=float, default=0.0)
    parser.add_argument("--fails", action="store_true")
    given = parser.parse_args()
    if given.fails:
        sys.exit("the model does not fit")
    time.sleep(given.start_s)
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: over.set())
    with FakeServer(port=given.port) as server:
        sys.stdout.write(f"[2026-11-30 04:00:00] {server.url} is ready, api_key='sk-very-secret-0123456789abcdef'\n")
        sys.stdout.flush()
        over.wait()


if __name__ == "__main__":
    main()

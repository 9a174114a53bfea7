"""A load of its own: closed loop (clients that each wait for their answer) or open loop (a rate of arrivals).

One client streams its answer and stamps every token: all micro-batches take turns, so its tokens show the server's loop
time, with and without the profiler, for the price of one stream.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import random
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from traceana_capture.errors import CaptureError
from traceana_capture.http import HttpServer

__all__ = ["Load", "LoadSpec", "Request", "parse_load"]

_REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class LoadSpec:
    """`concurrency` clients (the most at a time, with a `rate` in requests per second), tokens in and out as ranges,
    `requests` in all or None for as long as it takes; `api` is sglang (/generate) or openai (/v1/completions). Without
    a `seed` the prompts differ from run to run: the same ones would be answered from the server's prefix cache."""

    concurrency: int
    input: tuple[int, int] = (256, 256)
    output: tuple[int, int] = (256, 256)
    requests: int | None = None
    rate: float | None = None
    api: str | None = None
    seed: int | None = None


@dataclass
class Request:
    """One request as the client saw it. Times are epoch nanoseconds; `token_ns` only where it streamed."""

    worker: int
    index: int
    start_ns: int
    end_ns: int
    status: int
    input_tokens: int
    output_tokens: int | None
    error: str | None = None
    token_ns: list[int] = field(default_factory=list[int])

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.error is None


def parse_load(text: str) -> LoadSpec | None:
    """`none`, or `concurrency=32,input=256,output=128-256[,requests=N][,rate=R][,api=openai]`. Raises CaptureError."""
    if text.strip().lower() == "none":
        return None
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        try:
            if not equals:
                raise ValueError
            if name in ("concurrency", "requests", "seed"):
                values[name] = int(value)
            elif name in ("input", "output"):
                low, _, high = value.partition("-")
                values[name] = (int(low), int(high or low))
            elif name == "rate":
                values[name] = float(value)
            elif name == "api" and value in ("sglang", "openai"):
                values[name] = value
            else:
                raise ValueError
        except ValueError:
            raise CaptureError(
                "not a load",
                where=f"--load {text} ({part.strip()})",
                hint="for instance --load concurrency=32,input=256,output=256",
            ) from None
    values.setdefault("concurrency", 0)
    spec = LoadSpec(**values)
    ranges = (spec.input, spec.output)
    if (
        spec.concurrency < 1
        or any(not 0 < low <= high for low, high in ranges)
        or (spec.rate is not None and not spec.rate > 0)
        or (spec.requests or 1) < 1
    ):
        raise CaptureError(
            "not a load: concurrency, input, output, requests and rate are positive",
            where=f"--load {text}",
            hint="for instance --load concurrency=32,input=256,output=256",
        )
    return spec


class Load:
    """A running load. Threads, because a server's Python needs nothing more; each client has its own connection."""

    def __init__(
        self, server: HttpServer, spec: LoadSpec, *, vocabulary: int, model: str | None = None, api: str = "sglang"
    ) -> None:
        self.spec = spec if spec.seed is not None else replace(spec, seed=time.time_ns() & 0x7FFFFFFF)
        self.finished: list[Request] = []
        self._server = server
        self._model = model
        self._api = spec.api or api
        self._vocabulary = vocabulary
        self._random = random.Random(self.spec.seed)
        self._lock = threading.Lock()
        self._left = spec.requests
        self._count = 0
        self._stop = threading.Event()
        self._arrivals: queue.Queue[int] | None = queue.Queue() if spec.rate else None
        self._open: dict[int, http.client.HTTPConnection] = {}
        self._threads: list[threading.Thread] = []
        self._streaming: Request | None = None

    def start(self) -> Load:
        """Start all clients."""
        if self._arrivals is not None:
            self._threads.append(threading.Thread(target=self._arrive, name="load-arrivals", daemon=True))
        self._threads += [
            threading.Thread(target=self._client, args=(w,), name=f"load-{w}", daemon=True)
            for w in range(self.spec.concurrency)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def stop(self, *, drain_s: float = 0.0) -> None:
        """No new requests; what runs has `drain_s` to end, then its connections are cut and the server drops it."""
        self._stop.set()
        end = time.monotonic() + drain_s
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0))
        end = time.monotonic() + 5.0
        while any(t.is_alive() for t in self._threads) and time.monotonic() < end:
            for connection in list(self._open.values()):  # again and again: one may just be connecting
                with contextlib.suppress(OSError, AttributeError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            time.sleep(0.02)

    @property
    def done(self) -> bool:
        """All of a limited number of requests have ended."""
        return bool(self._threads) and not any(t.is_alive() for t in self._threads)

    def streamed(self) -> float | None:
        """How far the streaming client's present request is, 0 to 1; None while it waits for its first token."""
        request = self._streaming
        if request is None or not request.token_ns:
            return None
        return len(request.token_ns) / self.spec.output[1]

    def streams(self) -> list[Request]:
        """The streaming client's requests so far, the present one included."""
        present = self._streaming
        found = [r for r in self.snapshot() if r.token_ns]
        return [*found, present] if present is not None and present not in found else found

    def snapshot(self) -> list[Request]:
        """The requests that have ended, in order of their end."""
        with self._lock:
            return list(self.finished)

    def failures(self) -> Sequence[Request]:
        """Requests that failed while the load was meant to run."""
        return [r for r in self.snapshot() if not r.ok]

    def document(self) -> dict[str, Any]:
        """client.json: the load, and every request; token times where a request streamed."""
        spec = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self.spec).items()}
        return {"load": {**spec, "api": self._api}, "requests": [_row(r) for r in self.snapshot()]}

    def _arrive(self) -> None:
        assert self._arrivals is not None and self.spec.rate, "only started for a rate"
        due = time.monotonic()
        while not self._stop.is_set():
            due += self._random.expovariate(self.spec.rate)
            if self._stop.wait(max(due - time.monotonic(), 0)):
                break
            self._arrivals.put(1)

    def _client(self, worker: int) -> None:
        connection = self._server.connection(_REQUEST_TIMEOUT_S)
        self._open[worker] = connection
        try:
            while not self._stop.is_set():
                if self._arrivals is not None:
                    try:
                        self._arrivals.get(timeout=0.1)
                    except queue.Empty:
                        continue
                with self._lock:
                    if self._left is not None and self._left <= 0:
                        return
                    self._left = None if self._left is None else self._left - 1
                    index, self._count = self._count, self._count + 1
                    length, output = self._random.randint(*self.spec.input), self._random.randint(*self.spec.output)
                    ids = [self._random.randrange(3, self._vocabulary) for _ in range(length)]
                request = self._send(connection, worker, index, ids, output, stream=worker == 0)
                if self._stop.is_set() and not request.ok:
                    return  # cut by stop(), not failed
                with self._lock:
                    self.finished.append(request)
                if not request.ok:
                    connection.close()
                    self._stop.wait(0.2)
        finally:
            connection.close()
            self._open.pop(worker, None)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        worker: int,
        index: int,
        ids: list[int],
        output: int,
        *,
        stream: bool,
    ) -> Request:
        request = Request(worker, index, time.time_ns(), 0, -1, len(ids), None)
        self._streaming = request if stream else self._streaming
        try:
            path, body = self._body(ids, output, stream)
            connection.request("POST", self._server.path + path, json.dumps(body), self._server.headers)
            answer = connection.getresponse()
            request.status = answer.status
            document: Any
            if stream and answer.status == 200:
                document = _follow(answer, request)
            else:
                document = json.loads(answer.read() or b"null")
            if answer.status != 200:
                request.error = json.dumps(document)[:300]
            request.output_tokens = _output_tokens(document)
            if request.output_tokens is None and request.token_ns:
                request.output_tokens = len(request.token_ns)
        except (OSError, http.client.HTTPException, ValueError) as error:
            request.error = f"{type(error).__name__}: {error}"[:300]
        request.end_ns = time.time_ns()
        return request

    def _body(self, ids: list[int], output: int, stream: bool) -> tuple[str, dict[str, Any]]:
        if self._api == "openai":
            body = {"model": self._model or "default", "prompt": ids, "max_tokens": output, "temperature": 1.0}
            return "/v1/completions", {**body, "ignore_eos": True, "stream": stream}
        sampling = {"temperature": 1.0, "max_new_tokens": output, "ignore_eos": True}
        return "/generate", {"input_ids": ids, "sampling_params": sampling, "stream": stream}


def _follow(answer: http.client.HTTPResponse, request: Request) -> Any:
    last: Any = None
    ended = False
    for line in answer:
        if not line.startswith(b"data:"):
            continue
        now = time.time_ns()
        text = line[5:].strip()
        if text == b"[DONE]":
            ended = True  # the body is read to its end all the same, so that the connection can be used again
            continue
        last = json.loads(text)
        request.token_ns.append(now)
    if not ended:
        raise ConnectionError("the stream was cut")
    return last


def _output_tokens(document: Any) -> int | None:
    if not isinstance(document, Mapping):
        return None
    for part, name in (("meta_info", "completion_tokens"), ("usage", "completion_tokens")):
        inner: Any = document.get(part)
        if isinstance(inner, Mapping) and isinstance(inner.get(name), int):
            return int(inner[name])
    return None


def _row(request: Request) -> dict[str, Any]:
    row = {k: v for k, v in vars(request).items() if k != "token_ns"}
    return {**row, "token_ns": request.token_ns} if request.token_ns else row

"""Round trips between hosts: a responder that stamps what it receives, and a prober that keeps the fastest answers.

Of one round trip with stamps t0 (sent), t1 (received there), t2 (answered there), t3 (received here), the remote clock
minus the local clock lies in [t2 - t3, t1 - t0], whatever the paths took. The shortest round trips bound it best.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from traceana_capture.clock import host_clock
from traceana_capture.errors import CaptureError

__all__ = ["DEFAULT_PORT", "probe", "respond"]

DEFAULT_PORT = 18923
_ASK = struct.Struct("!8sQq")  # magic, sequence, t0
_ANSWER = struct.Struct("!8sQqqq")  # magic, sequence, t0, t1, t2
_MAGIC, _FACTS = b"traceana", b"tracfact"


def respond(
    bind: str = "0.0.0.0",
    port: int = DEFAULT_PORT,
    *,
    seconds: float | None = None,
    ready: Callable[[int], None] | None = None,
    wall: Callable[[], int] = time.time_ns,
) -> None:
    """Answer probes over UDP and TCP on one port until interrupted, or for `seconds`. It only ever sends this host's
    clock and name. `ready` is told the port that was bound (0 takes a free one)."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with contextlib.ExitStack() as stack:
        udp = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        tcp = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tcp.bind((bind, port))
            port = int(tcp.getsockname()[1])
            udp.bind((bind, port))
        except OSError as error:
            raise CaptureError(
                f"cannot listen ({error.strerror})", where=f"{bind}:{port}", hint="--port with a free one"
            ) from None
        tcp.listen(8)
        poll = stack.enter_context(selectors.DefaultSelector())
        poll.register(udp, selectors.EVENT_READ)
        poll.register(tcp, selectors.EVENT_READ)
        if ready is not None:
            ready(port)
        end = None if seconds is None else time.monotonic() + seconds
        while end is None or time.monotonic() < end:
            for key, _ in poll.select(None if end is None else max(end - time.monotonic(), 0)):
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is udp:
                    with contextlib.suppress(OSError):
                        data, address = udp.recvfrom(64)
                        t1 = wall()
                        answer = _answer(data, t1, wall)
                        if answer:
                            udp.sendto(answer, address)
                elif source is tcp:
                    connection, _ = tcp.accept()
                    connection.settimeout(1.0)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    stack.enter_context(connection)
                    poll.register(connection, selectors.EVENT_READ)
                else:
                    try:
                        data = source.recv(_ASK.size)
                        t1 = wall()
                        answer = _answer(data, t1, wall)
                        if answer:
                            source.sendall(answer)
                    except OSError:
                        answer = b""
                    if not answer:
                        poll.unregister(source)
                        source.close()


def _answer(data: bytes, t1: int, wall: Callable[[], int]) -> bytes:
    if len(data) != _ASK.size:
        return b""
    magic, sequence, t0 = _ASK.unpack(data)
    if magic == _FACTS:
        return json.dumps(host_clock("answer")).encode()
    return _ANSWER.pack(_MAGIC, sequence, t0, t1, wall()) if magic == _MAGIC else b""


def probe(
    target: str,
    *,
    when: str,
    count: int = 200,
    keep: int = 8,
    timeout_s: float = 0.5,
    wall: Callable[[], int] = time.time_ns,
) -> dict[str, Any]:
    """Round trips to a responder at HOST[:PORT]: the `keep` fastest, and the interval that all of them allow for the
    remote clock minus the local one. UDP first, then TCP. Raises CaptureError where neither answers."""
    host, port = _target(target)
    local = socket.gethostname()
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        trips, facts = _trips(host, port, kind, count, timeout_s, wall)
        if trips:
            break
    else:
        raise CaptureError(
            "no clock responder answers",
            where=f"{host}:{port}",
            hint="start `python -m traceana_capture clock-responder` there",
        )
    fastest = sorted(trips, key=lambda t: (t[3] - t[0]) - (t[2] - t[1]))[:keep]
    lows, highs = [t2 - t3 for _, _, t2, t3 in fastest], [t1 - t0 for t0, t1, _, _ in fastest]
    low, high = max(lows), min(highs)
    return {
        "when": when,
        "local": local,
        "remote": facts.get("host", host),
        "transport": "udp" if kind == socket.SOCK_DGRAM else "tcp",
        "at_ns": fastest[0][3],
        "low_ns": low,
        "high_ns": high,
        "consistent": low <= high,
        "sent": count,
        "answered": len(trips),
        "delay_ns": (fastest[0][3] - fastest[0][0]) - (fastest[0][2] - fastest[0][1]),
        "trips": [
            {"sent_ns": a, "received_there_ns": b, "answered_there_ns": c, "received_ns": d} for a, b, c, d in fastest
        ],
        "remote_clock": facts,
    }


def _trips(
    host: str, port: int, kind: socket.SocketKind, count: int, timeout_s: float, wall: Callable[[], int]
) -> tuple[list[tuple[int, int, int, int]], dict[str, Any]]:
    trips: list[tuple[int, int, int, int]] = []
    facts: dict[str, Any] = {}
    try:
        found = socket.getaddrinfo(host, port, type=kind)[0]
        with socket.socket(found[0], kind) as link:
            link.settimeout(timeout_s)
            link.connect(found[4])
            if kind == socket.SOCK_STREAM:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            missed = 0
            for sequence in range(count):
                t0 = wall()
                link.send(_ASK.pack(_MAGIC, sequence, t0))
                try:
                    data = link.recv(_ANSWER.size)
                except TimeoutError:
                    missed += 1
                    if missed > 3 and not trips:
                        break
                    continue
                t3 = wall()
                if len(data) == _ANSWER.size:
                    magic, answered, sent, t1, t2 = _ANSWER.unpack(data)
                    if (magic, answered, sent) == (
                        _MAGIC,
                        sequence,
                        t0,
                    ):  # a late answer belongs to an earlier question
                        trips.append((t0, t1, t2, t3))
            if trips:
                link.send(_ASK.pack(_FACTS, 0, 0))
                with contextlib.suppress(TimeoutError, ValueError):
                    facts = json.loads(link.recv(65536))
    except OSError:
        pass
    return trips, facts


def _target(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or ("]" not in host and ":" in host):
        return text.strip("[]"), DEFAULT_PORT
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise CaptureError("not a host and port", where=f"--clock-host {text}", hint="--clock-host HOST[:PORT]")
    return host.strip("[]"), int(port)

"""A small HTTP client for one server: urllib, no proxies, every failure a CaptureError or a status."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any, cast

from traceana_capture.errors import CaptureError, Unreachable

__all__ = ["HttpServer", "Reply"]


@dataclass(frozen=True)
class Reply:
    """An HTTP status and its body."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON; None where it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


class HttpServer:
    """One server by its base URL. Requests go straight to it: a proxy in the environment never sees them."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 10.0) -> None:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CaptureError("not a server URL", where=url, hint="--url http://HOST:PORT")
        if parts.username or parts.password:
            raise CaptureError("the URL holds a password", where="--url", hint="set TRACEANA_API_KEY instead")
        try:
            self.port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise CaptureError("not a server URL", where=url, hint="--url http://HOST:PORT") from None
        self.host = parts.hostname
        self.scheme = parts.scheme
        bracketed = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{parts.scheme}://{bracketed}:{self.port}{parts.path.rstrip('/')}"
        self.path = parts.path.rstrip("/")
        self.timeout_s = timeout_s
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, *, timeout_s: float | None = None) -> Reply:
        """GET. Raises Unreachable where no HTTP answer comes."""
        return self._send("GET", path, None, timeout_s)

    def post(self, path: str, body: object, *, timeout_s: float | None = None) -> Reply:
        """POST `body` as JSON. Raises Unreachable where no HTTP answer comes."""
        return self._send("POST", path, json.dumps(body).encode(), timeout_s)

    def alive(self) -> bool:
        """Whether anything answers within two seconds."""
        try:
            self.get("/health", timeout_s=2.0)
        except Unreachable:
            return False
        return True

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection of its own, for one worker of a load."""
        kind = http.client.HTTPSConnection if self.scheme == "https" else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout_s)

    def _send(self, method: str, path: str, data: bytes | None, timeout_s: float | None) -> Reply:
        request = urllib.request.Request(self.url + path, data=data, headers=self.headers, method=method)
        try:
            with self._opener.open(request, timeout=timeout_s or self.timeout_s) as answer:
                return Reply(int(answer.status), cast(bytes, answer.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, error.read())
        except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
            reason: object = getattr(error, "reason", None) or error
            raise Unreachable(
                f"no answer ({reason})", where=self.url + path, hint="is the server up, and the URL right?"
            ) from None

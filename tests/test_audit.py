"""The audit of dependencies: what it says for each answer; and the audit itself, skipped aloud where nobody answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "audit.py"


def audit(service: str | None) -> subprocess.CompletedProcess[str]:
    env = os.environ | ({"TRACEANA_ADVISORIES": service} if service else {})
    return subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False, env=env)


class _Service(BaseHTTPRequestHandler):
    bad = ""
    garbled = False

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        results = [{"vulns": [{"id": "X-1"}]} if q["package"]["name"] == self.bad else {} for q in queries]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>" if self.garbled else json.dumps({"results": results}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Service) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_known_vulnerability_fails(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert audit(service).returncode == 0
    monkeypatch.setattr(_Service, "bad", "polars")
    done = audit(service)
    assert done.returncode == 1
    assert done.stdout.startswith("polars ") and "X-1" in done.stdout


def test_no_answer_is_skipped_aloud(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Service, "garbled", True)
    for where in (service, "http://127.0.0.1:9"):
        done = audit(where)
        assert done.returncode == 77
        assert done.stderr.startswith("SKIPPED: no advisory service answers at")


def test_no_dependency_has_a_known_vulnerability() -> None:
    done = audit(None)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout

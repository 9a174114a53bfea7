"""`open_trace`: one file to one page, and nothing to anyone else."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import socket
import threading
import urllib.parse
import webbrowser
from pathlib import Path

import pytest

import traceana.outputs.open_ui as open_ui
from traceana.errors import OutputError, SourceError
from traceana.outputs.open_ui import Facts, Opened, facts_of, open_trace

UI = "https://ui.perfetto.dev"
Answer = tuple[int, dict[str, str], bytes]


class Session:
    """`open_trace` in a thread, and a client that asks its server."""

    def __init__(self, path: Path, *, offline: bool, timeout_s: float = 20) -> None:
        self.said: list[str] = []
        self.result: list[Opened] = []
        self.ready = threading.Event()

        def say(text: str) -> None:
            self.said.append(text)
            self.ready.set()

        def run() -> None:
            done = open_trace(path, browser=False, offline=offline, port=0, timeout_s=timeout_s, say=say)
            self.result.append(done)

        self.thread = threading.Thread(target=run)
        self.thread.start()
        assert self.ready.wait(10)
        self.url = self.said[0].removeprefix("Open ")
        query = urllib.parse.parse_qs(self.url.split("#!/?", 1)[1])
        self.trace = urllib.parse.urlsplit(query["url"][0])
        self.query = query

    def ask(self, method: str = "GET", path: str | None = None, **headers: str) -> Answer:
        client = http.client.HTTPConnection("127.0.0.1", self.trace.port or 0, timeout=10)
        try:
            client.request(method, self.trace.path if path is None else path, headers=headers)
            answer = client.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            client.close()

    def end(self) -> Opened:
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.result[0]


@pytest.fixture()
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "merged tr&ce.pftrace"
    path.write_bytes(b'..., made by traceana; ranks: 0,1,10"..figures are about: 1000..2000 ns' + b"x" * 100_000)
    return path


def test_the_public_page_gets_the_file_once_and_the_server_ends(trace: Path) -> None:
    session = Session(trace, offline=False)
    assert session.url.startswith(UI + "/#!/?url=http%3A%2F%2F127.0.0.1%3A")
    status, headers, body = session.ask(Origin=UI)
    assert (status, body) == (200, trace.read_bytes())
    assert headers["Access-Control-Allow-Origin"] == UI
    assert headers["Content-Length"] == str(len(body))
    done = session.end()
    assert (done.path, done.fetched, done.url) == (trace, True, session.url)
    assert any(str(trace) in line for line in session.said)
    with pytest.raises(ConnectionError):
        session.ask(Origin=UI)


def test_the_address_expands_the_useful_tracks_and_shows_the_window(trace: Path) -> None:
    session = Session(trace, offline=False)
    commands = json.loads(session.query["startupCommands"][0])
    pin, expand = (re.compile(c["args"][0]) for c in commands)
    assert [c["id"] for c in commands] == ["dev.perfetto.PinTracksByRegex", "dev.perfetto.ExpandTracksByRegex"]
    assert [x for x in ("stage 3", "rank 07", "stage 0 · gpu 0", "rank 0 · stage 0", "rank 30") if pin.search(x)] == [
        "stage 3",
        "rank 07",
    ]
    groups = ("Cluster", "rank 0 · stage 0", "rank 01 · stage 1", "rank 10 · stage 2", "rank 1", "GPU power")
    assert [x for x in groups if expand.search(x)] == ["Cluster", "rank 0 · stage 0", "rank 01 · stage 1"]
    assert (session.query["visStart"], session.query["visEnd"]) == (["980"], ["2020"])
    session.ask(Origin=UI)
    session.end()


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {},
        {"Origin": UI, "Host": "evil.example"},
        {"Origin": UI, "Host": "evil.example:9001"},
    ],
)
def test_other_pages_and_other_names_of_this_host_get_nothing(trace: Path, headers: dict[str, str]) -> None:
    session = Session(trace, offline=False)
    status, _, body = session.ask(**headers)
    assert status == 403
    assert b"xxxx" not in body
    assert session.ask(Origin=UI)[0] == 200
    session.end()


def test_nothing_but_the_trace_is_served(trace: Path) -> None:
    (trace.parent / "secret.txt").write_text("secret")
    session = Session(trace, offline=False)
    folder = session.trace.path.rsplit("/", 1)[0]
    for path in ("/", "/status", folder + "/secret.txt", folder + "/../secret.txt", "/" + trace.name, "/etc/passwd"):
        assert session.ask(path=urllib.parse.quote(path), Origin=UI)[0] == 404
    assert session.ask("HEAD", Origin=UI)[0] == 405
    assert session.ask("POST", Origin=UI)[0] == 501
    status, headers, _ = session.ask("OPTIONS", Origin=UI)
    assert (status, headers["Access-Control-Allow-Private-Network"]) == (204, "true")
    assert not session.result
    session.ask(Origin=UI)
    session.end()


def test_it_ends_by_itself_and_says_what_to_do_instead(trace: Path) -> None:
    session = Session(trace, offline=False, timeout_s=0.2)
    done = session.end()
    assert not done.fetched
    assert "did not fetch the trace within 0.2 s" in session.said[-1]
    assert str(trace) in session.said[-1]


def test_a_page_that_goes_away_in_mid_transfer_can_come_back(tmp_path: Path) -> None:
    big = tmp_path / "big.pftrace"
    big.write_bytes(bytes(30_000_000))
    session = Session(big, offline=False)
    with socket.create_connection(("127.0.0.1", session.trace.port or 0)) as client:
        request = f"GET {session.trace.path} HTTP/1.1\r\nHost: 127.0.0.1:{session.trace.port}\r\nOrigin: {UI}\r\n\r\n"
        client.sendall(request.encode())
        assert client.recv(1000).startswith(b"HTTP/1.0 200")
    assert not session.result
    assert len(session.ask(Origin=UI)[2]) == 30_000_000
    assert session.end().fetched


def test_the_local_ui_comes_from_the_same_port(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_ui, "_QUIET_S", 0.2)
    session = Session(trace, offline=True)
    assert session.url.startswith(f"http://127.0.0.1:{session.trace.port}/#!/?url=")
    commands = json.loads(session.query["startupCommands"][0])
    assert [c["args"][0] for c in commands[:4]] == ["^Cluster$", r"^rank 0*0\b", r"^rank 0*1\b", r"^rank 0*10\b"]
    status, headers, page = session.ask(path="/")
    assert (status, headers["Content-type"]) == (200, "text/html")
    assert b"<html" in page
    version = re.search(rb"v\d+\.\d+-[0-9a-f]+", page)
    assert version is not None
    status, headers, _ = session.ask(path=f"/{version[0].decode()}/trace_processor.wasm")
    assert (status, headers["Content-type"]) == (200, "application/wasm")
    assert "Access-Control-Allow-Origin" not in headers
    assert session.ask(path="/", Origin="https://evil.example")[0] == 403
    assert session.ask(path=f"/{version[0].decode()}/")[0] in (200, 404)
    assert b"root:" not in session.ask(path="/../../../../../../../../etc/passwd")[2]
    assert session.ask()[2] == trace.read_bytes()
    assert session.end().fetched


def test_a_taken_port_is_an_error_online_and_no_problem_locally(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said: list[str] = []
        with pytest.raises(OutputError) as caught:
            open_trace(trace, browser=False, offline=False, port=port, say=said.append)
        assert str(port) in caught.value.what
        assert caught.value.hint is not None
        assert str(trace) in caught.value.hint
        said.clear()
        assert not open_trace(trace, browser=False, offline=True, port=port, timeout_s=0.05, say=said.append).fetched
        assert f":{port}/" not in said[0]


def test_what_is_missing_is_said(tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="no such file"):
        open_trace(tmp_path / "none.pftrace", browser=False)

    def absent(_name: str) -> None:
        return None

    monkeypatch.setattr("importlib.util.find_spec", absent)
    assert open_ui.offline_ui() is None
    with pytest.raises(SourceError, match="not installed"):
        open_trace(trace, browser=False, offline=True)


@pytest.mark.parametrize("works", [True, False])
def test_the_browser_is_asked_once_and_its_absence_is_said(
    trace: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    asked: list[str] = []

    def fake(url: str) -> bool:
        asked.append(url)
        return works

    monkeypatch.setattr(webbrowser, "open_new_tab", fake)
    said: list[str] = []
    done = open_trace(trace, offline=False, port=0, timeout_s=0.05, say=said.append)
    assert asked == [done.url]
    assert any("no browser" in line for line in said) is not works


def test_ranks_and_window_are_read_from_plain_and_packed_traces(tmp_path: Path, trace: Path) -> None:
    packed = tmp_path / "m.pftrace.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert facts_of(trace) == facts_of(packed) == Facts((0, 1, 10), (1000, 2000))
    for name, data in (("cut.gz", packed.read_bytes()[:20]), ("other", b"{}"), ("empty", b"")):
        (tmp_path / name).write_bytes(data)
        assert facts_of(tmp_path / name) == Facts()
    assert facts_of(tmp_path / "absent") == Facts()

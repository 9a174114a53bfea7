"""A headless Chromium for tests, spoken to over pipes: no driver, no package, no port.

    with Browser() as browser:
        page = browser.open(Path("report.html"))
        page.run("document.title")

Everything the page asks for, says on its console, or throws is kept in `requests` and `complaints`.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

__all__ = ["Browser", "Page", "chromium_or_skip"]

_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-default-browser-check",
    "--mute-audio",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
# The browser speaks on descriptors 3 and 4: put the pipes there, out of each other's way, and become the browser.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_PATIENCE_S = 120.0
_CONTROL = 2


def chromium_or_skip() -> str:
    """The path of a Chromium. Without one a test is skipped, except where CI=1: there it fails, for CI must have one."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        found = shutil.which(name)
        if found:
            return found
    if os.environ.get("CI"):
        pytest.fail("no Chromium on this machine: CI has to install one, the report is tested in it")
    pytest.skip("no Chromium on this machine")


class Browser:
    """One browser process with its own empty profile; a context manager."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="traceana-browser-", ignore_cleanup_errors=True)
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        arguments = [*_ARGUMENTS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(to_child), str(from_child), chromium_or_skip(), *arguments],
            pass_fds=(to_child, from_child),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._buffer = b""
        self._number = 0
        self.events: list[Mapping[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Mapping[str, Any]:
        """One command of the DevTools protocol and its answer; events that come meanwhile are kept."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            got = self._next()
            if got.get("id") != number:
                self.events.append(got)
                continue
            if "error" in got:
                raise RuntimeError(f"{method}: {got['error']['message']}")
            result: Mapping[str, Any] = got["result"]
            return result

    def _next(self) -> Mapping[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("the browser has gone")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: Mapping[str, Any] = json.loads(line)
        return message

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Load a file and wait until its script says that it is ready."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, str(session))
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.size(width, height)
        page.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        page.call("Page.navigate", url=path.resolve().as_uri())
        drawn = "(!!document.documentElement.dataset.ready || !document.getElementById('packed'))"
        page.wait(f"document.readyState === 'complete' && {drawn}")
        return page


class Page:
    """A tab: run scripts in it, and use pointer and keyboard as a person would."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **parameters: Any) -> Mapping[str, Any]:
        """A command of the protocol to this tab."""
        return self._browser.call(method, self._session, **parameters)

    def size(self, width: int, height: int) -> None:
        """Set the size of the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; what it throws is raised."""
        got = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in got:
            raise RuntimeError(
                str(got["exceptionDetails"].get("exception", {}).get("description", got["exceptionDetails"]))
            )
        return got["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression holds; fails after a long while."""
        end = time.monotonic() + _PATIENCE_S
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > end:
                pytest.fail(f"never came true in the page: {condition}; it said {self.complaints}")
            time.sleep(0.02)

    def frame(self) -> None:
        """Until the page has drawn what it was told."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def point(self, x: float, y: float, kind: str = "mouseMoved", **more: Any) -> None:
        """A pointer event at a place of the window: mouseMoved, mousePressed, mouseReleased or mouseWheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.frame()

    def click(self, x: float, y: float) -> None:
        """Press and release the left button."""
        self.point(x, y)
        self.point(x, y, "mousePressed", button="left", clickCount=1)
        self.point(x, y, "mouseReleased", button="left", clickCount=1)

    def zoom(self, x: float, y: float, delta: float) -> None:
        """Ctrl and wheel: negative zooms in."""
        self.point(x, y, "mouseWheel", deltaX=0, deltaY=delta, modifiers=_CONTROL)

    def press(self, key: str) -> None:
        """A key, by the name that `KeyboardEvent.key` has."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.frame()

    def picture(self, path: Path, selector: str | None = None) -> None:
        """A PNG of the window, or of one element."""
        clip: dict[str, Any] = {}
        if selector is not None:
            box = self.run(
                f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                "return {x: b.x + scrollX - 16, y: b.y + scrollY - 12, width: b.width + 32, height: b.height + 24, scale: 1}; })()"
            )
            clip = {"clip": box, "captureBeyondViewport": True}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **clip)["data"]))

    def pdf(self) -> bytes:
        """The page on paper."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    @property
    def requests(self) -> list[str]:
        """Every address that the page asked for, `data:` ones left out."""
        self.run("1")
        urls = (e["params"]["request"]["url"] for e in self._mine("Network.requestWillBeSent"))
        return [u for u in urls if not str(u).startswith("data:")]

    @property
    def complaints(self) -> list[str]:
        """Exceptions, and what the console or the log got from the page."""
        out = [str(e["params"]["exceptionDetails"]) for e in self._mine("Runtime.exceptionThrown")]
        out += [str(e["params"]["args"]) for e in self._mine("Runtime.consoleAPICalled")]
        return out + [str(e["params"]["entry"]["text"]) for e in self._mine("Log.entryAdded")]

    def _mine(self, method: str) -> list[Mapping[str, Any]]:
        return [e for e in self._browser.events if e.get("method") == method and e.get("sessionId") == self._session]

"""`traceana capture` from its options to its exit status: server started or attached to, passes, sweeps, the result."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from traceana_capture.errors import CaptureError
from traceana_capture.files import disk_error, write_json
from traceana_capture.hook_client import hook_environment
from traceana_capture.http import HttpServer
from traceana_capture.load import parse_load
from traceana_capture.lock import CaptureLock
from traceana_capture.logs import keep_log
from traceana_capture.manifest import say_to_stderr
from traceana_capture.nsys import NsysRecording, find_nsys, under_nsys
from traceana_capture.nvtx import ENVIRONMENT as NVTX
from traceana_capture.options import CaptureOptions
from traceana_capture.processes import Child
from traceana_capture.profile import Profile
from traceana_capture.server import discover, wait_ready
from traceana_capture.session import Session
from traceana_capture.settings import change, check_live

__all__ = ["capture", "exit_status", "prepare", "summary"]

Say = Callable[[str], None]


def capture(options: CaptureOptions, *, say: Say) -> list[tuple[Path, Mapping[str, Any]]]:
    """Record. Returns each capture folder with its manifest (several for a sweep). Raises CaptureError, or
    KeyboardInterrupt after the server was left as it was found."""
    if options.profiler != "torch" and not options.command:
        raise CaptureError(
            "nsys can only record a server that it has started",
            where=f"--profiler {options.profiler}",
            hint="traceana capture --profiler nsys -- COMMAND",
        )
    parse_load(options.load)
    check_live([*options.pairs("set"), *([options.sweep.partition("=")[0]] if options.sweep else [])])
    options.pairs("request")
    if options.server_log and not Path(options.server_log).is_file():
        raise CaptureError("no such log", where=f"--server-log {options.server_log}", hint="the file the server writes")
    if options.profiler != "torch" and options.sweep:
        raise CaptureError(
            "a sweep records with torch.profiler", where=f"--profiler {options.profiler}", hint="leave --profiler out"
        )
    folder = _folder(options)
    try:
        with _interruptible():
            return _capture(options, folder, say)
    except OSError as error:  # whatever was not to be written: in words
        raise disk_error(error, Path(error.filename or folder)) from None
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # only if nothing was written


def _capture(options: CaptureOptions, folder: Path, say: Say) -> list[tuple[Path, Mapping[str, Any]]]:
    if options.profiler == "both":
        return [_both(options, folder, say)]
    if options.sweep is None:
        return [(folder, _pass(options, folder, say))]
    key, _, values = options.sweep.partition("=")
    if not values or "" in values.split(","):
        raise CaptureError("not KEY=A,B,C", where=f"--sweep {options.sweep}")
    found: list[tuple[Path, Mapping[str, Any]]] = []
    with _server(options, folder, say) as (server, child, control):
        for value in values.split(","):
            say(f"{key}={value}")
            each = replace(options, set=(*options.set, f"{key}={value}"), sweep=None)
            target = folder / f"{key}={value}"
            target.mkdir()
            found.append((target, _session(each, target, server, child, control, say)))
    return found


def exit_status(options: CaptureOptions, documents: list[Mapping[str, Any]]) -> int:
    """0 done, 1 where a selected rank's trace is missing, 3 with --strict where anything was lost or is doubtful."""
    if any(d["status"] != "complete" for d in documents):
        return 1
    severe = any(p["severity"] in ("warning", "error") for d in documents for p in d["problems"])
    return 3 if options.strict and severe else 0


def summary(folder: Path, document: Mapping[str, Any]) -> str:
    """The result for a person, in a few lines."""
    ranks = document["ranks"]
    done = [r for r in ranks if r.get("state") == "complete"]
    lines = [f"{folder}: {document['status']}, traces of {len(done)} of {len(ranks)} ranks"]
    absent = [str(r["rank"]) for r in ranks if r.get("state") != "complete"]
    if absent and not document.get("nsys"):
        lines.append(f"  missing: rank {', '.join(absent)}")
    figures = document.get("throughput") or {}
    outside, share = figures.get("outside_tokens_per_s"), figures.get("disturbance")
    decode = figures.get("outside_decode_tokens_per_s")
    if outside:
        under_nsys = document.get("nsys") and not document.get("nsys_pass")
        lines.append(
            f"  decode throughput {'under nsys, not recording,' if under_nsys else 'without the profiler'}"
            f" {decode or outside:.0f} tokens/s"
            + (f" ({outside:.0f} with the prefills between)" if decode else "")
            + (f", while it recorded {share:.0%} of that" if share else "")
        )
    if figures.get("stall_ns"):
        start = figures.get("start_pause_ns") or 0
        lines.append(
            "  the server stood still for "
            + (f"{start / 1e9:.2f} s when it began and " if start else "")
            + f"{figures['stall_ns'] / 1e9:.1f} s while it exported"
        )
    lines += [f"  {p['severity']}: {p['name']}: {p['detail']}" for p in document["problems"] if p["severity"] != "info"]
    return "\n".join(lines)


def _folder(options: CaptureOptions) -> Path:
    folder = Path(options.out or f"traceana-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CaptureError("exists and is not empty", where=str(folder), hint="-o with a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, folder) from None
    return folder


def _pass(options: CaptureOptions, folder: Path, say: Say) -> Mapping[str, Any]:
    with _server(options, folder, say) as (server, child, control):
        recording = None
        if options.profiler == "nsys" and child is not None:
            recording = NsysRecording(find_nsys(options.nsys), _private(folder), folder, pause=time.sleep)
        document = _session(options, folder, server, child, control, say, recording)
    return document


def _both(options: CaptureOptions, folder: Path, say: Say) -> tuple[Path, Mapping[str, Any]]:
    """Two passes of the same server command. The second one's export and manifest go into the first one's folder."""
    first = dict(_pass(replace(options, profiler="torch"), folder, say))
    second_folder = folder / ".nsys-pass"
    second_folder.mkdir()
    second = _pass(replace(options, profiler="nsys"), second_folder, say)
    if (second_folder / "nsys").exists():
        shutil.move(second_folder / "nsys", folder / "nsys")
    first["nsys_pass"] = second
    first["problems"] = [*first["problems"], *(p for p in second["problems"] if p["severity"] != "info")]
    first["status"] = first["status"] if second["status"] == "complete" else "partial"
    write_json(folder / "manifest.json", first)
    shutil.rmtree(second_folder, ignore_errors=True)
    return folder, first


def _session(
    options: CaptureOptions,
    folder: Path,
    server: HttpServer,
    child: Child | None,
    control: Path | None,
    say: Say,
    nsys: NsysRecording | None = None,
) -> Mapping[str, Any]:
    with CaptureLock(server.url) as lock:
        session = Session(server, options, folder, say=say, child=child, control=control, nsys=nsys)
        if lock.left_behind:
            done = _put_right(server, lock.left_behind)
            session.manifest.problem(
                "earlier_capture_died",
                "info",
                f"process {lock.left_behind.get('pid')} left {lock.left_behind.get('folder')}; {done}",
            )
        session.run(lock)
        return session.manifest.document


def _put_right(server: HttpServer, note: Mapping[str, Any]) -> str:
    """What a killed capture would have done at its end: stop its profile, restore its setting."""
    done: list[str] = []
    with contextlib.suppress(CaptureError):
        if note.get("profile_id"):
            info = discover(server)
            profile = Profile(server, info, server_folder=tempfile.gettempdir(), seen=[], steps=info.slots)
            profile.running = profile.already_running() is True
            done.append("its profile still ran and was stopped" if profile.stop() else "its profile had ended")
        restore = note.get("restore")
        if isinstance(restore, dict):
            change(server, restore)
            done.append(f"restored {restore}")
    return ", ".join(done) or "nothing to put right"


def prepare(options: CaptureOptions, folder: Path, private: Path) -> tuple[list[str], dict[str, str], Path | None]:
    """The server's command as it is run, variables that it gets, and the hook's control folder, where that records."""
    control, command = private / "hook", list(options.command)
    if not options.hook and options.profiler != "nsys":
        return command, {}, None
    environment = hook_environment(control, private / "site", os.environ)
    if options.profiler == "nsys":
        environment[NVTX] = "1"  # nsys sees none of SGLang's spans by itself
        command = under_nsys(find_nsys(options.nsys), _private(folder) / "report", command)
    return command, environment, control if options.hook else None


@contextlib.contextmanager
def _server(
    options: CaptureOptions, folder: Path, say: Say
) -> Generator[tuple[HttpServer, Child | None, Path | None], None, None]:
    """The server: as it runs at --url, or started from the command and stopped at the end, whatever happens."""
    key = os.environ.get("TRACEANA_API_KEY")
    if not options.command:
        yield HttpServer(options.url, api_key=key), None, None
        return
    server = HttpServer(
        _url(options),
        api_key=key or _argument(options.command, "--admin-api-key") or _argument(options.command, "--api-key"),
    )
    if server.alive():
        raise CaptureError(
            "a server runs there already",
            where=server.url,
            hint="attach to it (leave the command out), or give the command another --port",
        )
    with tempfile.TemporaryDirectory(prefix="traceana-server-") as private:
        command, environment, control = prepare(options, folder, Path(private))
        say(f"starting {' '.join(command[:4])} ...")
        child = Child(command, Path(private) / "server.log", environment)
        try:
            wait_ready(server, timeout_s=options.ready_timeout, died=child.died)
            say("the server is ready")
            yield server, child, control
        finally:
            say("stopping the server")
            child.stop()
            (folder / "server").mkdir(exist_ok=True)
            if folder.joinpath("server").is_dir() and child.log.is_file():
                keep_log(child.log, folder / "server" / "server.log")


def _private(folder: Path) -> Path:
    """A folder beside the capture for what holds secrets, for this user only."""
    root = folder.parent if folder.name == ".nsys-pass" else folder
    path = root.with_name(root.name + ".private")
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _url(options: CaptureOptions) -> str:
    if options.url_given:
        return options.url
    host = _argument(options.command, "--host") or "127.0.0.1"
    port = _argument(options.command, "--port") or ("8000" if "vllm" in " ".join(options.command) else "30000")
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"


def _argument(command: tuple[str, ...], name: str) -> str | None:
    for index, word in enumerate(command):
        if word == name and index + 1 < len(command):
            return command[index + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return None


@contextlib.contextmanager
def _interruptible() -> Generator[None, None, None]:
    """SIGTERM ends a capture as Ctrl-C does: the profiler is stopped, settings are put back. A second one waits."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    count = 0

    def interrupt(number: int, frame: object) -> None:
        nonlocal count
        count += 1
        if count == 2:  # the server is being left as it was found: that needs its time
            say_to_stderr("stopping the profiler and putting settings back; once more to leave it undone")
        else:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""`python -m traceana_capture`: record, or help another host's capture. Needs the standard library only."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from traceana_capture.errors import CaptureError

_USAGE = """usage: python -m traceana_capture COMMAND [options]

  capture           attach to a server, or start one after --, and record it (as `traceana capture` does)
  clock-responder   answer clock probes of a capture that runs on another host
  gpu-samples       write this host's GPU samples to a CSV file until interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 1 failed, 2 usage, 3 with --strict, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words.pop(0) if words else "--help"
    known = {"capture": run_capture, "clock-responder": _clock_responder, "gpu-samples": _gpu_samples}
    if command in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if command not in known:
        sys.stderr.write(f"{_USAGE}\ntraceana: error: no such command: {command}\n")
        return 2
    try:
        return known[command](words)
    except CaptureError as error:
        sys.stderr.write(f"traceana: error: {error}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 1
    except KeyboardInterrupt:
        return 130


def run_capture(words: Sequence[str]) -> int:
    """`capture` with its own parser."""
    from traceana_capture.driver import capture, exit_status, summary
    from traceana_capture.manifest import say_to_stderr
    from traceana_capture.options import parse_arguments

    options = parse_arguments(words)
    found = capture(options, say=say_to_stderr if options.verbose or sys.stderr.isatty() else lambda text: None)
    documents = [document for _, document in found]
    if options.json:
        shown = documents[0] if len(documents) == 1 else {"captures": documents}
        sys.stdout.write(json.dumps(shown, indent=1, default=str) + "\n")
    else:
        sys.stdout.write("\n".join(summary(folder, document) for folder, document in found) + "\n")
    return exit_status(options, documents)


def _clock_responder(words: Sequence[str]) -> int:
    from traceana_capture.roundtrip import DEFAULT_PORT, respond

    parser = argparse.ArgumentParser(prog="python -m traceana_capture clock-responder")
    parser.add_argument("--bind", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"UDP and TCP port (default: {DEFAULT_PORT})")
    parser.add_argument("--seconds", type=float, help="stop after this long")
    given = parser.parse_args(list(words))
    respond(given.bind, given.port, seconds=given.seconds, ready=lambda port: print_line(f"answering on port {port}"))
    return 0


def _gpu_samples(words: Sequence[str]) -> int:
    from traceana_capture.gpu import GpuSampler

    parser = argparse.ArgumentParser(prog="python -m traceana_capture gpu-samples")
    parser.add_argument("-o", "--out", default="gpu.csv", help="the file to write (default: gpu.csv)")
    parser.add_argument("--seconds", type=float, help="stop after this long")
    given = parser.parse_args(list(words))
    sampler = GpuSampler(Path(given.out)).start()
    if sampler.source == "none":
        raise CaptureError(
            "no NVIDIA driver is visible", where="libnvidia-ml.so.1, nvidia-smi", hint="run it on the host of the GPUs"
        )
    end = None if given.seconds is None else time.monotonic() + given.seconds
    try:
        while end is None or time.monotonic() < end:
            time.sleep(0.1)
    finally:
        sampler.stop()
    return 0


def print_line(text: str) -> None:
    """A line on stdout at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

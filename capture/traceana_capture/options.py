"""Every option of `traceana capture`, once: the driver's own parser and the `traceana` command are made from it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from traceana_capture.errors import CaptureError

__all__ = ["OPTIONS", "CaptureOptions", "Option", "parse_arguments"]


@dataclass(frozen=True)
class Option:
    """One option: its flags, how its value is read, and its help. `many` may be repeated; `flag` takes no value."""

    flags: tuple[str, ...]
    help: str
    metavar: str = ""
    default: Any = None
    kind: type = str
    choices: tuple[str, ...] = ()
    many: bool = False
    flag: bool = False

    @property
    def name(self) -> str:
        return self.flags[-1].lstrip("-").replace("-", "_")


OPTIONS: tuple[Option, ...] = (
    Option(("--ranks",), "Ranks to record, for instance 0-7 or 0,4. All by default.", "RANKS"),
    Option(("--url",), "The server to attach to.", "URL", "http://127.0.0.1:30000"),
    Option(("-o", "--out"), "Capture folder to make. Default: traceana-DATE-TIME.", "DIR"),
    Option(
        ("--load",),
        "Load to make: none (the traffic that is there), or concurrency=32,input=256,output=256[,requests=N][,rate=R].",
        "SPEC",
        "none",
    ),
    Option(("--load-command",), "Run this command as the load while the capture lasts.", "CMD"),
    Option(
        ("--steps",),
        "Micro-batch steps to record per rank, in whole rounds of slots. Default: 20 rounds.",
        "N",
        kind=int,
    ),
    Option(
        ("--profiler",),
        "What records. nsys needs the server's command after --.",
        default="torch",
        choices=("torch", "nsys", "both"),
    ),
    Option(("--nsys",), "The nsys to use. Default: the one on PATH.", "PATH"),
    Option(
        ("--hook",),
        "Record through the in-process hook instead of /start_profile: every rank starts at the same step.",
        default=False,
        flag=True,
    ),
    Option(
        ("--set",),
        "Change a setting of the running server for the capture, and put it back: pp_max_micro_batch_size=4.",
        "KEY=VALUE",
        many=True,
    ),
    Option(("--sweep",), "One capture for each value of a setting, in DIR/KEY=VALUE.", "KEY=A,B,C"),
    Option(("--request",), "Override a field of the profile request: with_stack=true.", "KEY=VALUE", many=True),
    Option(
        ("--throw-away",),
        "A short profile first, so that the profiler's start-up is not in the capture.",
        default="auto",
        choices=("auto", "yes", "no"),
    ),
    Option(("--windows",), "Windows to measure before the profile, each a whole request cycle.", "N", 3, int),
    Option(
        ("--server-dir",),
        "Folder that the server writes to, where it sees another file system: SERVER_PATH or SERVER_PATH:LOCAL_PATH.",
        "PATH",
    ),
    Option(("--server-log",), "The server's log, to keep what it says during the capture.", "FILE"),
    Option(
        ("--clock-host",),
        "Another host whose clock to probe; a clock-responder runs there.",
        "HOST[:PORT]",
        many=True,
    ),
    Option(("--timeout",), "Seconds to wait for the traces after the profile was asked for.", "S", 300.0, float),
    Option(("--steady-timeout",), "Seconds to wait for a steady load.", "S", 180.0, float),
    Option(("--ready-timeout",), "Seconds to wait for a started server to be ready.", "S", 900.0, float),
    Option(("--strict",), "Exit 3 where anything was lost or is doubtful.", default=False, flag=True),
    Option(("--json",), "Print the manifest as one JSON document.", default=False, flag=True),
    Option(("-v", "--verbose"), "Say more on stderr.", default=False, flag=True),
)


@dataclass(frozen=True)
class CaptureOptions:
    """The options of one capture; `command` starts the server where it is not empty."""

    command: tuple[str, ...] = ()
    ranks: str | None = None
    url: str = "http://127.0.0.1:30000"
    url_given: bool = False
    out: str | None = None
    load: str = "none"
    load_command: str | None = None
    steps: int | None = None
    profiler: str = "torch"
    nsys: str | None = None
    hook: bool = False
    set: tuple[str, ...] = ()
    sweep: str | None = None
    request: tuple[str, ...] = ()
    throw_away: str = "auto"
    windows: int = 3
    server_dir: str | None = None
    server_log: str | None = None
    clock_host: tuple[str, ...] = ()
    timeout: float = 300.0
    steady_timeout: float = 180.0
    ready_timeout: float = 900.0
    strict: bool = False
    json: bool = False
    verbose: bool = False
    grace_s: float = field(default=30.0)  # between the first stage's end and the last stage's file; tests shorten it

    def __post_init__(self) -> None:
        if (
            (self.steps is not None and self.steps < 1)
            or self.windows < 0
            or min(self.timeout, self.steady_timeout, self.ready_timeout) <= 0
        ):
            raise CaptureError(
                "steps and timeouts are positive",
                where="--steps, --windows, --timeout",
                hint="see `traceana capture --help`",
            )

    @classmethod
    def from_values(cls, values: Mapping[str, Any], command: Sequence[str]) -> CaptureOptions:
        """From parsed options by name; a value of None means that the option was not given."""
        known = {f.name for f in fields(cls)}
        given: dict[str, Any] = {"url_given": values.get("url") is not None, "command": tuple(command)}
        for name, value in values.items():
            if name in known and value is not None:
                given[name] = tuple(value) if isinstance(value, list) else value
        return cls(**given)

    def pairs(self, name: str) -> dict[str, Any]:
        """`--set` or `--request` as a mapping; numbers, true, false and null are read as such. Raises CaptureError."""
        out: dict[str, Any] = {}
        for text in getattr(self, name):
            key, equals, value = str(text).partition("=")
            if not equals or not key:
                raise CaptureError("not KEY=VALUE", where=f"--{name} {text}")
            out[key.strip()] = literal(value.strip())
        return out


def literal(text: str) -> Any:
    """`8`, `0.5`, `true`, `null`, `CPU,GPU` as what they are."""
    words: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.split(",") if "," in text else text


def parse_arguments(arguments: Sequence[str]) -> CaptureOptions:
    """The driver's own command line: options, then `--` and the server's command."""
    words = list(arguments)
    command: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
        if not command:
            raise CaptureError(
                "no command after --", where="capture", hint="traceana capture -- python -m sglang.launch_server ..."
            )
    parser = argparse.ArgumentParser(
        prog="python -m traceana_capture capture", description="Record a pipeline-parallel server."
    )
    for option in OPTIONS:
        if option.flag:
            parser.add_argument(*option.flags, action="store_true", default=None, help=option.help)
        else:
            shown = "" if option.default is None else f" Default: {option.default}."
            parser.add_argument(
                *option.flags,
                action="append" if option.many else "store",
                type=option.kind,
                choices=option.choices or None,
                metavar=option.metavar or None,
                help=(option.help + shown).replace("%", "%%"),
            )
    return CaptureOptions.from_values(vars(parser.parse_args(words)), command)

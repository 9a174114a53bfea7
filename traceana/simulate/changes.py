"""What a user can ask to change, as written on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from traceana.errors import TraceanaError
from traceana.model.kernel_classes import CLASSES
from traceana.simulate.growth import PPM

__all__ = [
    "CAUSES", "PLACES", "SETTINGS", "Change", "conflicts", "parse_host", "parse_link", "parse_remove", "parse_scale", "parse_set",
    "parse_words",
]  # fmt: skip

SETTINGS = (
    "pp_max_micro_batch_size", "pp_async_batch_depth", "pp_layer_partition", "max_running_requests", "concurrency",
    "disable_cuda_graph", "merge_waiting",
)  # fmt: skip
# Causes that have a cost of their own. The others say which stage was waited for: that stage is what can change.
CAUSES = (
    "host_schedule",
    "host_launch",
    "host_sync",
    "control_message",
    "p2p_transfer_wait",
    "launch_latency",
    "profiler",
)
# Spans of SGLang's loop to the piece of the host's time that an addition to them lengthens.
PLACES = {
    "recv_requests": "receive", "get_next_batch_to_run": "schedule", "recv_proxy": "await_proxy", "run_batch": "prepare",
    "process_batch_result": "process", "send_proxy_dict_to_next_stage": "send_proxy",
    "send_res_dict_to_next_stage": "send_output", "recv_res_dict_from_prev_stage": "await_result",
}  # fmt: skip
_UNITS = {"": 1_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_MOST_FACTOR = 1_000 * PPM


@dataclass(frozen=True, slots=True)
class Change:
    """One change. `kind` is set, scale (a removal is a factor of 0), host or link; `key` the setting, the target
    (`name:REGEX`, `class:NAME`, `cause:NAME`), the stage (`0`, or `0@SPAN`) or `SRC-DST`; `value` an integer, a flag (0 or 1), layers, a
    factor in parts per million, or nanoseconds. `text` is what was asked."""

    kind: str
    key: str
    value: int | tuple[int, ...]
    text: str


def _fail(what: str, text: str, hint: str) -> TraceanaError:
    return TraceanaError(what, where=text, hint=hint)


def parse_set(text: str) -> list[Change]:
    """`KEY=VALUE`, or several with commas between: `max_running_requests=64,pp_max_micro_batch_size=32`."""
    out: list[Change] = []
    # A comma inside a partition is followed by a number, one between settings by a name.
    for part in re.split(r",(?=\s*[A-Za-z_])", text):
        key, eq, value = (x.strip() for x in part.partition("="))
        key = key.removeprefix("--").replace("-", "_")
        if not eq or key not in SETTINGS:
            raise _fail(
                "unknown setting" if eq else "not KEY=VALUE", part.strip(), f"settings are {', '.join(SETTINGS)}"
            )
        out.append(Change("set", key, _setting(key, value, part.strip()), part.strip()))
    return out


def _setting(key: str, value: str, text: str) -> int | tuple[int, ...]:
    if key in ("disable_cuda_graph", "merge_waiting"):
        if value.lower() not in _BOOLS:
            raise _fail("not true or false", text, f"write {key}=true or {key}=false")
        return int(_BOOLS[value.lower()])
    if key == "pp_layer_partition":
        parts = value.split(",")
        if not all(re.fullmatch(r"\s*\d{1,6}\s*", p) for p in parts) or any(int(p) < 1 for p in parts):
            raise _fail("not a layer partition", text, "write layers per stage, for instance pp_layer_partition=16,48")
        return tuple(int(p) for p in parts)
    if not re.fullmatch(r"\d{1,7}", value):
        raise _fail("not a whole number", text, f"write {key}=NUMBER")
    number = int(value)
    least = 0 if key == "pp_async_batch_depth" else 1
    most = 256 if key == "pp_async_batch_depth" else 1_000_000
    if not least <= number <= most:
        raise _fail("out of range", text, f"{key} is between {least} and {most}")
    return number


def _target(text: str, whole: str) -> str:
    if text.startswith("class:"):
        if text[6:] not in CLASSES:
            raise _fail("unknown kernel class", whole, f"classes are {', '.join(CLASSES)}")
        if text[6:] == "collective":
            raise _fail("collectives have no time of their own here", whole, "change a link with --link SRC-DST=FACTOR")
        return text
    if text.startswith("cause:"):
        if text[6:] not in CAUSES:
            hint = "a wait is not removed by itself: change what is waited for (kernels, --host, --link, --set)"
            raise _fail(
                "this cause cannot be removed", whole, f"{hint}; causes with a cost of their own: {', '.join(CAUSES)}"
            )
        return text
    if not text:
        raise _fail("nothing named", whole, "write a regular expression, class:NAME or cause:NAME")
    try:
        re.compile(text)
    except re.error as error:
        raise _fail(f"not a regular expression ({error})", whole, "escape ( ) [ ] * + with a backslash") from None
    return f"name:{text}"


def parse_remove(text: str) -> Change:
    """`REGEX`, `class:NAME` or `cause:NAME`."""
    return Change("scale", _target(text, text), 0, f"remove {text}")


def parse_scale(text: str) -> Change:
    """`REGEX=FACTOR`, `class:NAME=FACTOR` or `cause:NAME=FACTOR`: times are multiplied by FACTOR."""
    target, eq, factor = text.rpartition("=")
    if not eq:
        raise _fail("not TARGET=FACTOR", text, "write for instance class:moe=0.5")
    return Change("scale", _target(target, text), _factor(factor, text), f"scale {text}")


def _factor(text: str, whole: str) -> int:
    if not re.fullmatch(r"\s*(\d{1,9}(\.\d{0,9})?|\.\d{1,9})\s*", text):
        raise _fail("not a factor", whole, "write a number from 0, for instance 0.5")
    value = int(Fraction(text.strip()) * PPM)
    if value > _MOST_FACTOR:
        raise _fail("factor too large", whole, "factors go up to 1000")
    return value


def parse_host(text: str) -> Change:
    """`STAGE=+MS` or `STAGE=-MS`: host time per visit of a stage (`us` and `ns` are understood); `STAGE@SPAN=+MS` says
    where it is added."""
    found = re.fullmatch(r"\s*(\d{1,4})(?:@(\w+))?\s*=\s*([+-]?)(\d{1,6})(?:\.(\d{1,9}))?\s*(ms|us|ns)?\s*", text)
    if found is None:
        raise _fail("not STAGE=+MS or STAGE=-MS", text, "write for instance 0=-3ms, or 0@process_batch_result=+3ms")
    if found[2] is not None and found[2] not in PLACES:
        raise _fail("unknown place", text, f"places are {', '.join(PLACES)}")
    if found[2] is not None and found[3] == "-":
        raise _fail("a place with less time", text, "what is taken off is found where it is: leave the place out")
    value = Fraction(f"{found[4]}.{found[5] or 0}") * _UNITS[found[6] or ""]
    amount = int(value) * (-1 if found[3] == "-" else 1)
    return Change("host", found[1] + (f"@{found[2]}" if found[2] else ""), amount, f"host {text.strip()}")


def parse_link(text: str) -> Change:
    """`SRC-DST=FACTOR`: the time of messages from rank SRC to rank DST is multiplied by FACTOR."""
    found = re.fullmatch(r"\s*(\d{1,6})\s*-\s*(\d{1,6})\s*=(.*)", text)
    if found is None:
        raise _fail("not SRC-DST=FACTOR", text, "write for instance 0-1=0.5")
    return Change("link", f"{int(found[1])}-{int(found[2])}", _factor(found[3], text), f"link {text.strip()}")


def parse_words(words: Sequence[str]) -> list[Change]:
    """Changes as findings and `Change.text` write them: `KEY=VALUE`, `host 0=-3ms`, `link 0-1=0.5`, `remove REGEX`,
    `scale REGEX=FACTOR`. Raises TraceanaError where one is none of these."""
    out: list[Change] = []
    kinds = {"host": parse_host, "link": parse_link, "remove": parse_remove, "scale": parse_scale}
    for word in words:
        kind, _, rest = word.partition(" ")
        if kind in kinds:
            out.append(kinds[kind](rest.strip()))
        else:
            out += parse_set(word)
    return out


def conflicts(changes: Sequence[Change]) -> None:
    """Raises TraceanaError where one setting is given two values."""
    seen: dict[str, Change] = {}
    for change in changes:
        if change.kind != "set":
            continue
        before = seen.setdefault(change.key, change)
        if before.value != change.value:
            raise _fail("two values for one setting", f"{before.text} and {change.text}", "give it once")

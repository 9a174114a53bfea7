"""The files beside the traces: what each one is, told by its content. A name is never evidence."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import cast

from traceana.sources.losses import Loss, loss

__all__ = ["SECOND", "Sidecar", "is_sqlite", "plain", "read_sidecars", "to_ns"]

SECOND = 10**9
MAX_BYTES = 256 << 20  # of a log: above it the first eighth and the end are read
MAX_JSON_BYTES = 64 << 20
_SQLITE = b"SQLite format 3\0"
_BINARY = (_SQLITE, b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"PAR1")

LOG_LINE = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,6})?(?: [A-Z][A-Z_]*\d+)*\] ")
_METRIC = re.compile(r"(?m)^(?:# (?:HELP|TYPE) [a-zA-Z_:][\w:]* |[a-zA-Z_:][\w:]*\{[^\n]*\} [-+\d.eNaInf]+$)")
_JSON = re.compile(r"""\s*(?:\{\s*(?:["}]|$)|\[\s*(?:["{\[\]\d]|$))""")  # `[section]` of another format is none
_COUNTERS = re.compile(r"epoch_ns(?:,decode_pp\d+)+$")
_LAUNCH = re.compile(r"(?:sglang[\w.]*launch_server|sglang serve|vllm serve|--(?:model-path|model)[ =])")


@dataclass(frozen=True, slots=True)
class Sidecar:
    """One recognised file. `text` is its content without a byte-order mark; `json` the parsed document where it is one
    (numbers with a point are Decimal, so that no time loses a digit)."""

    kind: str  # log, metrics, gpu, command, info, model, config, loads, requests, windows, manifest, recorder
    path: Path
    text: str
    json: object = None


def is_sqlite(path: Path) -> bool:
    """Whether `path` is a regular file that begins as an SQLite database does."""
    try:
        with path.open("rb") as file:
            return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.read(16) == _SQLITE
    except OSError:
        return False


def read_sidecars(paths: Sequence[Path], root: Path | None = None) -> tuple[list[Sidecar], list[Loss]]:
    """The files of `paths` that say something about a server, its GPUs or its clients, ordered by path, and what was
    left out, by its place in the capture `root`: the same wherever that lies. Never raises for a file: what cannot be
    read or recognised is a loss."""

    def place(path: Path) -> str:
        return path.relative_to(root).as_posix() if root is not None and path.is_relative_to(root) else path.name

    found: list[Sidecar] = []
    losses: list[Loss] = []
    unknown: list[str] = []
    seen: dict[bytes, Path] = {}
    for path in sorted(paths):
        try:
            data = _read(path, place(path), losses)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            losses.append(loss("file_unreadable", "warning", 1, f"{place(path)}: {reason}"))
            continue
        if data is None:
            continue
        if not data.strip():
            losses.append(loss("file_empty", "info", 1, place(path)))
            continue
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if digest in seen:
            detail = f"{place(path)} holds the same bytes as {place(seen[digest])}"
            losses.append(loss("file_duplicate", "info", 1, detail))
            continue
        seen[digest] = path
        before = len(losses)
        sidecar = _recognise(path, place(path), data.decode("utf-8-sig", "replace"), losses)
        if sidecar is not None:
            found.append(sidecar)
        elif len(losses) == before:
            unknown.append(path.name)
    if unknown:
        losses.append(loss("file_not_recognised", "info", len(unknown), ", ".join(unknown[:8])))
    return found, losses


def _read(path: Path, place: str, losses: list[Loss]) -> bytes | None:
    """The bytes of a regular text file; None for anything else. A pipe or a device would block or never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        losses.append(loss("file_unreadable", "warning", 1, f"{place}: not a regular file"))
        return None
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(min(size, MAX_BYTES // 8) if size > MAX_BYTES else size)
        if head.startswith(_BINARY) or b"\0" in head[:4096]:
            return None  # traces, exports and tables have readers of their own
        if size <= MAX_BYTES:
            return head
        file.seek(size - MAX_BYTES + len(head))
        lost = size - MAX_BYTES
        losses.append(
            loss("file_too_long", "warning", lost, f"{place}: bytes {len(head)} to {len(head) + lost} not read")
        )
        return head + b"\n" + file.read(MAX_BYTES - len(head))


def _recognise(path: Path, place: str, text: str, losses: list[Loss]) -> Sidecar | None:
    head = text[:65536]
    if LOG_LINE.search(head) and not head.lstrip().startswith("{"):
        return Sidecar("log", path, text)
    if _JSON.match(head):
        return _recognise_json(path, place, text, losses)
    if _METRIC.search(head):
        return Sidecar("metrics", path, text)
    first = head.lstrip().split("\n", 1)[0].lower()
    if "," in first and re.search(r"\b(?:gpu|index|device)", first) and re.search(r"power|util|clock|sm_mhz", first):
        return Sidecar("gpu", path, text)
    if _COUNTERS.match(first):  # the recorder's own working: its manifest holds what came of it
        return Sidecar("recorder", path, text)
    if _LAUNCH.search(head):
        return Sidecar("command", path, text)
    return None


def _recognise_json(path: Path, place: str, text: str, losses: list[Loss]) -> Sidecar | None:
    if len(text) > MAX_JSON_BYTES:
        losses.append(loss("file_too_long", "warning", len(text), f"{place}: JSON of more than {MAX_JSON_BYTES} bytes"))
        return None
    try:
        document: object = json.loads(text, parse_float=Decimal)
    except (ValueError, ArithmeticError, RecursionError) as error:  # an exponent may be beyond every Decimal
        losses.append(loss("file_damaged", "warning", 1, f"{place}: not JSON: {error}"[:300]))
        return None
    kind = _json_kind(document)
    return None if kind is None else Sidecar(kind, path, text, document)


def _json_kind(document: object) -> str | None:
    if isinstance(document, list):
        items = cast("list[object]", document)
        rows = [cast("dict[str, object]", i) for i in items[:8] if isinstance(i, dict)]
        if rows and all(
            _has(r, "start", "start_ns", "start_time") and _has(r, "end", "end_ns", "e2e", "latency") for r in rows
        ):
            return "requests"
        if rows and all("dp_rank" in r and _has(r, "num_reqs", "num_running_reqs") for r in rows):
            return "loads"
        return None
    if not isinstance(document, dict):
        return None
    top = cast("dict[str, object]", document)
    if "pp_size" in top or ("internal_states" in top and "version" in top):
        return "info"
    if isinstance(top.get("loads"), list):
        return "loads"
    if _has(top, "num_hidden_layers", "text_config") and _has(top, "architectures", "model_type"):
        return "config"
    if "model_path" in top and "is_generation" in top:
        return "model"
    if isinstance(top.get("requests"), list) and _json_kind(top["requests"]) == "requests":
        return "requests"
    if isinstance(top.get("windows"), dict):
        return "windows"
    if "schema_version" in top and isinstance(top.get("ranks"), list):
        return "manifest"
    steps = top.get("steps")
    if isinstance(steps, list) and steps and isinstance(steps[0], dict) and "ordinal" in steps[0]:
        return "recorder"
    return None


def _has(row: Mapping[str, object], *keys: str) -> bool:
    return any(k in row for k in keys)


def to_ns(value: object, *, per_second: int = 1) -> int | None:
    """`value` (a number, in 1/per_second seconds: 1 or 10**9) as integer nanoseconds, exactly; what is below one is
    cut off. None where it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        return None
    try:
        scaled = Decimal(str(value) if isinstance(value, float) else value) * (SECOND // per_second)
        return int(scaled) if abs(scaled) < 2**63 else None
    except (ArithmeticError, ValueError):
        return None


def plain(value: object) -> object:
    """`value` with every Decimal as a float and without infinity and NaN (null): what JSON can hold."""
    if isinstance(value, (Decimal, float)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: plain(v) for k, v in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [plain(v) for v in cast("list[object]", value)]
    return value

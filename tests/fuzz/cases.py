"""A case: its kind and number say which capture is damaged and how, so that any of them can be made again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from fuzz import mutate, seeds

__all__ = ["KINDS", "WHOLE", "make"]

Files = seeds.Files

# Every how many cases of a kind the whole report is made; the others stop after the readers, which are what they damage.
WHOLE: Mapping[str, int] = {
    "events": 1, "text": 12, "manifest": 20, "server_info": 12, "requests": 20, "metrics": 20, "log": 20, "gpu": 20,
    "sqlite": 4, "sqlite_bytes": 8,
}  # fmt: skip


def make(kind: str, number: int) -> Files:
    """The files of case `number` of `kind`."""
    return KINDS[kind](Random(f"{kind} {number}"))


def _events(random: Random) -> Files:
    files = dict(random.choice(seeds.traces()))
    for name in list(files):
        if random.random() < 0.7:
            document: dict[str, Any] = json.loads(files[name])
            events = document.pop("traceEvents")
            mutate.damage_events(events, random)
            if random.random() < 0.3:
                mutate.damage_json(document, random, 2)
            # Facts stand before the events, as profilers write them.
            files[name] = json.dumps(document | {"traceEvents": events}, ensure_ascii=random.random() < 0.5).encode(
                errors="surrogatepass"
            )
            files[name] = mutate.pack(files[name], random)
    if random.random() < 0.03:
        files[f"trace/{random.choice(('copy-rank1', 'x', 'rank-9'))}.trace.json"] = random.choice(list(files.values()))
    return files


def _text(random: Random) -> Files:
    files = dict(random.choice(seeds.traces()))
    name = random.choice(list(files))
    files[name] = mutate.pack(mutate.damage_bytes(files[name], random), random)
    return files if random.random() < 0.2 else {name: files[name]}


def _document(name: str) -> Callable[[Random], Files]:
    def damaged(random: Random) -> Files:
        data = seeds.beside()[name]
        if random.random() < 0.75:
            data = json.dumps(mutate.damage_json(json.loads(data), random)).encode()
        if random.random() < 0.35:
            data = mutate.damage_bytes(data, random)
        return _beside(random, name, data)

    return damaged


def _lines(*names: str) -> Callable[[Random], Files]:
    def damaged(random: Random) -> Files:
        name = random.choice(names)
        data = seeds.beside()[name]
        if random.random() < 0.75:
            data = mutate.damage_lines(data, random)
        if random.random() < 0.35:
            data = mutate.damage_bytes(data, random)
        return _beside(random, name, data)

    return damaged


def _beside(random: Random, name: str, data: bytes) -> Files:
    """A sound trace, and the damaged file with some of the others beside it."""
    others = {n: d for n, d in seeds.beside().items() if random.random() < 0.5}
    return {**seeds.traces()[0], **others, name: data}


def _sqlite(random: Random) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.sqlite"
        path.write_bytes(random.choice(seeds.exports()))
        mutate.damage_database(path, random)
        return {"report.sqlite": path.read_bytes()}


def _sqlite_bytes(random: Random) -> Files:
    return {"report.sqlite": mutate.damage_bytes(random.choice(seeds.exports()), random)}


KINDS: Mapping[str, Callable[[Random], Files]] = {
    "events": _events,
    "text": _text,
    "manifest": _document("manifest.json"),
    "server_info": _document("server_info.json"),
    "requests": _document("client_requests.json"),
    "metrics": _lines("metrics_steady_start.txt", "metrics_steady_end.txt"),
    "log": _lines("server.log", "command.txt"),
    "gpu": _lines("gpu_samples.csv"),
    "sqlite": _sqlite,
    "sqlite_bytes": _sqlite_bytes,
}

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
Case = Callable[[Random, bool], Files]
"""A generator, and whether a whole report will be made, to the damaged files."""

# Every how many cases of a kind the whole report is made; the others stop after the readers, which are what they damage.
WHOLE: Mapping[str, int] = {
    "events": 1, "text": 40, "manifest": 40, "server_info": 40, "requests": 40, "metrics": 40, "log": 40, "gpu": 40,
    "sqlite": 10, "sqlite_bytes": 10,
}  # fmt: skip


def make(kind: str, number: int) -> Files:
    """The files of case `number` of `kind`."""
    return KINDS[kind](Random(f"{kind} {number}"), number % WHOLE[kind] == 0)


def _events(random: Random, _whole: bool) -> Files:
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


def _text(random: Random, whole: bool) -> Files:
    files = dict(random.choice(seeds.traces()) if whole else seeds.tiny())
    name = random.choice(list(files))
    files[name] = mutate.pack(mutate.damage_bytes(files[name], random), random)
    return files if random.random() < 0.2 else {name: files[name]}


def _document(name: str) -> Case:
    def damaged(random: Random, whole: bool) -> Files:
        data = seeds.beside()[name]
        if random.random() < 0.75:
            data = json.dumps(mutate.damage_json(json.loads(data), random)).encode()
        if random.random() < 0.35:
            data = mutate.damage_bytes(data, random)
        return _beside(random, whole, name, data)

    return damaged


def _lines(*names: str) -> Case:
    def damaged(random: Random, whole: bool) -> Files:
        name = random.choice(names)
        data = seeds.beside()[name]
        if random.random() < 0.75:
            data = mutate.damage_lines(data, random)
        if random.random() < 0.35:
            data = mutate.damage_bytes(data, random)
        return _beside(random, whole, name, data)

    return damaged


def _beside(random: Random, whole: bool, name: str, data: bytes) -> Files:
    """A sound capture, the damaged file, and with a trace that is worth a report some of the others."""
    if not whole:
        return {**seeds.tiny(), name: data}
    others = {n: d for n, d in seeds.beside().items() if random.random() < 0.5}
    return {**seeds.traces()[0], **others, name: data}


def _sqlite(random: Random, _whole: bool) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.sqlite"
        path.write_bytes(random.choice(seeds.exports()))
        mutate.damage_database(path, random)
        return {"report.sqlite": path.read_bytes()}


def _sqlite_bytes(random: Random, _whole: bool) -> Files:
    return {"report.sqlite": mutate.damage_bytes(random.choice(seeds.exports()), random)}


KINDS: Mapping[str, Case] = {
    "events": _events,
    "text": _text,
    "manifest": _document("manifest.json"),
    "server_info": _document("server_info.json"),
    "requests": _document("client.json"),
    "metrics": _lines("metrics_steady_1_start.txt", "metrics_steady_1_end.txt"),
    "log": _lines("server.log", "command.txt"),
    "gpu": _lines("gpu.csv"),
    "sqlite": _sqlite,
    "sqlite_bytes": _sqlite_bytes,
}

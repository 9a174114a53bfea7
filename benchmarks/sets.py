"""The sets that are measured. Each is made once in the folder given and then found there.

rep8 and big200 come from HolisticTraceAnalysis' own test trace where it is beside the checkout (a training trace, 54 MB
of JSON); without it from a generated one of that size. All others are generated pipelines, copied in time and to more
replicas.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "fixtures"))

from copies import Template, number, replica, shared_visits

import tracegen.engine
import tracegen.thread
from tracegen import Load, Model, build_model

__all__ = ["BASE", "make", "names"]

BASE = ROOT.parent / "shared" / "traces" / "public" / "hta" / "df_index_resolver.json.gz"
MB = 1 << 20


def names() -> list[str]:
    """Every set that `make` knows."""
    return sorted(_SETS)


def make(name: str, work: Path) -> Path:
    """The folder of the set `name` under `work`, made where it is not there yet."""
    folder = work / name
    if not folder.exists():
        making = work / f".making-{name}"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        _SETS[name](making)
        making.rename(folder)
    return folder


def _base(indent: int | None = None) -> Template:
    if not BASE.exists():
        return Template(_pipeline(2, 200)[0][1])
    with gzip.open(BASE) as file:
        return Template(json.dumps(json.load(file), indent=indent).encode())


def _rep8(out: Path) -> None:
    base = _base()
    rng = random.Random(7)
    for rank in range(8):
        copies = max(54 * MB // base.size, 1)
        shift = rng.randint(-500, 500) * 1000
        base.write(out / f"rank-{rank}.json.gz", copies, shift_ns=shift, edit=number(rank, 8))


def _big200(out: Path) -> None:
    base = _base(indent=0)
    base.write(out / "rank-0.json.gz", max(215 * MB // base.size, 1), edit=number(0, 1))


class _Even:
    """In place of random.Random: every draw is the middle one, so that the pipeline soon repeats itself exactly."""

    def __init__(self, _seed: str) -> None:
        pass

    def getrandbits(self, _bits: int) -> int:
        return Model().jitter

    def randrange(self, stop: int) -> int:
        return stop // 2


def _pipeline(pp: int, steps: int, *, even: bool = False) -> list[tuple[str, bytes]]:
    """File names and texts of a generated pipeline of `pp` stages that decodes for about `steps` forwards."""
    draws = SimpleNamespace(Random=_Even) if even else random
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(tracegen.thread, "random", draws),
        patch.object(tracegen.engine, "random", draws),
    ):
        build_model(Model(pp=pp, steps=steps, load=Load(preload=(4,) * pp)), Path(folder))
        return [(path.name, gzip.decompress(path.read_bytes())) for path in sorted(Path(folder).glob("trace/*.gz"))]


def _replicas(pp: int, steps: int, count: int) -> Callable[[Path], None]:
    """A set of `count` pipelines of the same `pp` stages, each a little later than the one before."""

    def make_set(out: Path) -> None:
        for name, text in _pipeline(pp, steps):
            _write_replicas(out, name, Template(text), pp, count, 1)

    return make_set


def _long(pp: int, *, copies: int = 0, size: int = 0, replicas: int = 1) -> Callable[[Path], None]:
    """The same with traces of `copies` of eight rounds of the pipeline, or of about `size` bytes of JSON."""

    def make_set(out: Path) -> None:
        found = _pipeline(pp, 14 * pp, even=True)
        for (name, _), template in zip(found, shared_visits([text for _, text in found], pp), strict=True):
            _write_replicas(out, name, template, pp, replicas, copies or max(size // template.size, 1))

    return make_set


def _write_replicas(out: Path, name: str, template: Template, pp: int, count: int, copies: int) -> None:
    for replica_no in range(count):
        file = name.replace("-PP-", f"-DP-{replica_no}-PP-") if count > 1 else name
        first = replica_no * pp
        edit = replica(first, pp * count)
        template.write(out / file, copies, shift_ns=replica_no * 7_000, first_rank=first, edit=edit)


_SETS: dict[str, Callable[[Path], None]] = {
    "rep8": _rep8,
    "big200": _big200,
    "events-1x": _long(4, copies=1),
    "events-4x": _long(4, copies=4),
    "events-16x": _long(4, copies=16),
    "ranks-1x": _replicas(8, 40, 1),
    "ranks-4x": _replicas(8, 40, 4),
    "ranks-16x": _replicas(8, 40, 16),
    "ranks-1024": _replicas(8, 20, 128),
    "huge-64x64": _long(8, size=64 * MB, replicas=8),
    "huge-4x1024": _long(4, size=1024 * MB),
}

if __name__ == "__main__":
    for wanted in sys.argv[2:] or names():
        print(make(wanted, Path(sys.argv[1])), flush=True)

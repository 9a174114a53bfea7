"""`python -m fuzz [KIND...] --from N --count N`, from tests/: damaged inputs by number, and what they broke.

`python -m fuzz KIND --from N --count 1 --keep DIR` makes one of them again and leaves it in DIR.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

from fuzz.cases import KINDS, WHOLE, make
from fuzz.hold import Broken, hold
from fuzz.memory import Peak

# What one input may add to the process at its peak. The limit on unpacked text is 64 MB here, the seeds have below 1 MB.
MEMORY = 512 << 20


def main() -> int:
    """Tries the cases; 1 where the property did not hold for one of them."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)} [default: all]")
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100, help="of each kind")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after about this time")
    parser.add_argument("--keep", type=Path, help="leave the inputs that broke here, or the one that was asked for")
    options = parser.parse_args()
    started, broken, done = time.monotonic(), Counter[str](), 0
    for kind in options.kinds or KINDS:
        results: Counter[str] = Counter()
        begun, slowest = time.monotonic(), (0.0, -1)
        for number in range(options.first, options.first + options.count):
            if time.monotonic() - started > options.seconds:
                break
            at = time.monotonic()
            result = attempt(kind, number, options.keep, always=options.count == 1)
            slowest = max(slowest, (time.monotonic() - at, number))
            if result.startswith("BROKEN"):
                broken[result.splitlines()[0]] += 1
                if broken[result.splitlines()[0]] == 1:
                    sys.stdout.write(f"{kind} {number}: {result}\n")
                    sys.stdout.flush()
                result = "broken"
            results[result] += 1
        took = time.monotonic() - begun
        done += results.total()
        counts = ", ".join(f"{n} {name}" for name, n in sorted(results.items()))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        sys.stdout.write(
            f"{kind}: {counts}; {results.total() / took:.0f}/s, slowest {slowest[0]:.1f} s (number {slowest[1]}), "
            f"memory at most {peak} MB so far\n"
        )
        sys.stdout.flush()
    for what, count in broken.most_common():
        sys.stdout.write(f"{count:6d} x {what}\n")
    sys.stdout.write(f"{done} inputs, {broken.total()} broke the property\n")
    return 1 if broken else 0


def attempt(kind: str, number: int, keep: Path | None = None, *, always: bool = False) -> str:
    """The result of one case: read, report, refused, or BROKEN and why."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        for name, data in make(kind, number).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        try:
            with Peak() as peak:
                result = hold(folder, whole=number % WHOLE[kind] == 0, random=Random(number))
            if peak.bytes > MEMORY:
                raise Broken(f"{peak.bytes >> 20} MB more memory at its peak than before, {MEMORY >> 20} are allowed")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # polars' panics are no Exceptions
            place = traceback.extract_tb(error.__traceback__)
            own = [f for f in place if "/traceana/" in f.filename] or place
            where = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
            result = f"BROKEN {type(error).__name__} at {where}\n{traceback.format_exc(limit=-6)}"
        if keep is not None and (always or result.startswith("BROKEN")):
            shutil.copytree(folder, keep / f"{kind}-{number}", dirs_exist_ok=True)
        return result
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())

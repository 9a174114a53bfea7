"""Known vulnerabilities in what traceana depends on: `python scripts/audit.py`.

Asks an OSV service (TRACEANA_ADVISORIES, default https://api.osv.dev) about the installed versions of the package's
own dependencies and of theirs. Exit status: 0 none known, 1 some, and 77 with SKIPPED on stderr where no service
answers.
"""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from importlib import metadata

SERVICE = os.environ.get("TRACEANA_ADVISORIES", "https://api.osv.dev")
TIMEOUT_S = 10
SKIPPED = 77
_NAME = re.compile(r"^[A-Za-z0-9._-]+")


def dependencies(package: str = "traceana") -> dict[str, str]:
    """Name -> installed version of everything that `package` needs at run time, extras left out."""
    found: dict[str, str] = {}
    waiting = [package]
    while waiting:
        for line in metadata.requires(waiting.pop()) or ():
            name = _NAME.match(line)
            if name is None or "extra ==" in line or name[0].lower() in found:
                continue
            try:
                found[name[0].lower()] = metadata.version(name[0])
            except metadata.PackageNotFoundError:
                continue  # for another platform or Python
            waiting.append(name[0])
    return found


def advisories(packages: dict[str, str]) -> dict[str, list[str]]:
    """Name and version -> ids of what is known about them. Raises OSError or ValueError where nobody answers well."""
    queries = [{"package": {"name": n, "ecosystem": "PyPI"}, "version": v} for n, v in packages.items()]
    request = urllib.request.Request(
        f"{SERVICE}/v1/querybatch",
        data=json.dumps({"queries": queries}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        results = json.loads(answer.read(1 << 24))["results"]
    if len(results) != len(queries):
        raise ValueError(f"{len(results)} answers to {len(queries)} questions")
    return {
        f"{n} {v}": [known["id"] for known in result["vulns"]]
        for (n, v), result in zip(packages.items(), results, strict=True)
        if result.get("vulns")
    }


def main() -> int:
    """Asks, and says what is known."""
    packages = dependencies()
    try:
        known = advisories(packages)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"SKIPPED: no advisory service answers at {SERVICE}: {error}\n")
        return SKIPPED
    for package, ids in known.items():
        sys.stdout.write(f"{package}: {', '.join(ids)}\n")
    sys.stdout.write(f"{len(packages)} dependencies, {len(known)} with known vulnerabilities\n")
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main())

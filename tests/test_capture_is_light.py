"""The recorder runs in a server's environment: it may import nothing but the standard library."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import traceana_capture

PACKAGE = Path(traceana_capture.__file__).parent
SCRIPT = """
import importlib, json, sys
before = set(sys.modules)
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps(sorted({m.split(".")[0] for m in set(sys.modules) - before})))
"""


def imported(*names: str) -> set[str]:
    """Top-level modules that a fresh interpreter, without any installed package, has loaded after importing `names`."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", SCRIPT, json.dumps(names)],
        env={"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return set(found)


def test_every_module_needs_the_standard_library_only() -> None:
    modules = ["traceana_capture", *(f"traceana_capture.{m.name}" for m in pkgutil.iter_modules([str(PACKAGE)]))]
    modules.remove("traceana_capture.__main__")
    assert len(modules) > 20
    assert imported(*modules) - set(sys.stdlib_module_names) == {"traceana_capture"}


def test_importing_the_package_imports_nothing_else() -> None:
    assert imported("traceana_capture") <= {"traceana_capture", "__future__"}


def test_it_runs_without_any_installed_package() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "traceana_capture", "--help"],
        env={"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "clock-responder" in done.stdout and done.stderr == ""

"""Generated pages are fresh, links lead somewhere, commands and errors are documented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_reference_pages_are_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_readme_names_the_two_commands_on_its_first_screen() -> None:
    first = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:24])
    assert "traceana demo" in first
    assert "scripts/test" in first
    assert "exec scripts/test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")

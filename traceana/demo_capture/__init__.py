"""The bundled capture that `traceana demo` runs on, as `traceana capture` left it (fixtures/README.md says how)."""

from __future__ import annotations

from pathlib import Path

__all__ = ["demo_folder"]


def demo_folder() -> Path:
    """Folder of the bundled capture."""
    return Path(__file__).resolve().parent / "capture"

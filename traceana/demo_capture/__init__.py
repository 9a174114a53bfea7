"""The bundled capture that `traceana demo` runs on: two ranks of a real SGLang server (README.md says which)."""

from __future__ import annotations

from pathlib import Path

__all__ = ["demo_folder"]


def demo_folder() -> Path:
    """Folder of the bundled capture."""
    return Path(__file__).resolve().parent / "capture"

"""traceana: where every pipeline stage of an LLM server spends its time, in nanoseconds that add up."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0.dev0"

__all__ = ["__version__", "load"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    # `load` on first use: commands and `import traceana` should not pay for what only notebooks want.
    if name == "load":
        return import_module("traceana.notebook").load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

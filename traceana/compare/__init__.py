"""Two captures side by side: the change in the time of a token, decomposed so that it adds up."""

from __future__ import annotations

from traceana.compare.compare import Comparison, compare

__all__ = ["Comparison", "compare"]

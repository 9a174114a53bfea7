"""What to change, and the answers in words: rules over the facts of a report, each with evidence from this capture."""

from __future__ import annotations

from traceana.findings.answers import answer
from traceana.findings.find import find

__all__ = ["answer", "find"]

"""The part of traceana that records: it needs nothing but Python's standard library, so it runs beside any server.

`python -m traceana_capture capture ...` is what `traceana capture` runs. `traceana_capture.hook` runs inside a server,
`python -m traceana_capture clock-responder` on other hosts. Importing this package imports nothing else.
"""

from __future__ import annotations

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]

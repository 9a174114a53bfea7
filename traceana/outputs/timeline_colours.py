"""Colours of states, causes and kernel classes in the merged timeline.

Perfetto's UI has no colour field: it hashes a slice's correlation id, or else its name, to a hue and a lightness. These
ids were searched for the colour that they give (green for work, blue for transfer, one hue a cause), so a cause has one
colour whatever its slices are called. A user interface that hashes differently shows other colours, still one a cause.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from traceana.outputs.perfetto_text import Texts

__all__ = ["colour_of"]

_BASE = 1 << 32  # above every micro-batch's id

_IDS = {
    # device states
    "busy": 7975,
    "transfer": 19264,
    # causes of a bubble
    "no_work": 182,
    "upstream_compute": 6267,
    "downstream_backpressure": 10172,
    "p2p_transfer_wait": 16756,
    "control_message": 8261,
    "host_schedule": 10488,
    "host_launch": 8813,
    "host_sync": 13698,
    "launch_latency": 98,
    "stream_dependency": 18610,
    "collective_late": 25737,
    "profiler": 570,
    "ambiguous": 12781,
    "unknown": 415,
    # kernel classes
    "moe": 9985,
    "attention": 31480,
    "gemm": 19010,
    "norm": 5949,
    "sampling": 9552,
    "collective": 2314,
    "memory": 686,
    "other": 4606,
}


def colour_of(texts: Texts) -> pl.Series:
    """The correlation id that gives each state, cause or class its colour; 0 (none) for any other text."""
    ids = np.array([*(_BASE + _IDS[text] if text in _IDS else 0 for text in texts.texts), 0], np.int64)
    return pl.Series("correlation", ids[texts.places])

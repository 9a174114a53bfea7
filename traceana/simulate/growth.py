"""What a visit takes as a function of its batch: measured where the capture has the batch, else between two ends.

A decode step reads the weights it touches whatever the batch. Where all tokens choose the same k of the E experts nothing
grows: one end. Where they choose alike among all of them, the MoE kernels grow with the experts that a batch touches,
E (1 - (1 - k/E)^batch): the other. A prediction takes (E + k) / 2 experts for E, and its range both ends: on the captures
at hand (64 experts, 8 a token) the experts' kernels take 1.14 times as long for 16 requests as for 8 (predicted 1.16), 1.26
for 31 (1.25), 0.24 for one (0.25). Attention reads
each request's own context: between no growth and growth in proportion; in the middle it has a fixed part as large as
that of 48 requests, as at contexts of 400 tokens there; and so have the MoE kernels that route, sort, activate and sum.
The experts' own kernels have each token's work beside the weights, with a fixed part of 300. Between two measured batches
the experts' curve is drawn through both.

The host has a line of Python for each request as well: where it prepares the forward, and where it processes a result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import polars as pl

from traceana.intervals import IntArray
from traceana.simulate.kernels import Kernels

__all__ = [
    "CONSTANT",
    "GROWING",
    "MIDDLE",
    "PPM",
    "Experts",
    "experts_of",
    "host_ppm",
    "scaled_to_batch",
    "source_batch",
    "touched_ppm",
]

CONSTANT, GROWING, MIDDLE = "constant", "growing", "middle"
PPM = 1_000_000
# What does not grow of each, in requests: attention, MoE beside its experts; preparing a forward, processing a result (the
# host's, between a slot of 1 and one of 31 of one capture).
_ATTENTION, _TOKENS = 48, 300
_OTHER = 4  # MoE kernels that take less than this part of the longest read no experts
_HOST = {"prepare": 250, "process": 35}


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a layer and how many a token takes; `assumed` names what the capture does not say."""

    count: int
    top_k: int
    assumed: tuple[str, ...] = ()

    @property
    def unknown(self) -> bool:
        """Whether even how many there are is assumed: then nothing says that a forward grows with its batch."""
        return len(self.assumed) > 1


def experts_of(facts: Mapping[str, object]) -> Experts:
    """From the server's facts; 128 experts and 8 a token, as most MoE models of today, where they do not say."""
    model = facts.get("model")
    told = cast("Mapping[str, object]", model) if isinstance(model, Mapping) else {}
    count, top_k = told.get("experts"), told.get("top_k")
    assumed: list[str] = []
    if not isinstance(count, int) or count < 1:
        count = 128
        assumed.append("128 experts")
        top_k = None  # says nothing by itself
    if not isinstance(top_k, int) or top_k < 1:
        top_k = min(8, count)
        assumed.append(f"{top_k} experts a token")
    return Experts(count, min(top_k, count), tuple(assumed))


def touched_ppm(experts: Experts, batch: int) -> int:
    """Share of the experts that `batch` tokens touch, in parts per million, rounded up; at least one token's."""
    missed: int = (experts.count - experts.top_k) ** batch * PPM // experts.count**batch
    return max(1, PPM - missed)


def source_batch(measured: Mapping[int, object], batch: int) -> int:
    """The measured batch whose visits stand in for `batch`: itself, else the nearest, the larger one on a tie."""
    sizes = [b for b in measured if b > 0]
    return min(sizes, key=lambda b: (abs(b - batch), -b))


def scaled_to_batch(
    kernels: Kernels, gpu: IntArray, rows_of: Mapping[int, IntArray], batch: int, end: str, experts: Experts
) -> tuple[int, IntArray]:
    """The batch whose rows stand in for `batch`, and GPU times of those rows for `batch` at one `end`.

    `gpu` are the times of all rows as they would be for their own batch.
    """
    near = source_batch(rows_of, batch)
    rows = rows_of[near]
    if near == batch:
        return near, gpu[rows]
    moe = kernels.of(pl.col("class") == "moe")

    def size(b: int) -> int:
        """What the MoE kernels are proportional to; of a forward without them, all of it."""
        return touched_ppm(experts, b) if moe.any() else b * PPM

    sizes = sorted(b for b in rows_of if b > 0)
    below, above = [b for b in sizes if b < batch], [b for b in sizes if b > batch]
    if below and above:
        low, high = below[-1], above[0]
        mean = {b: int(gpu[rows_of[b]].sum()) // rows_of[b].size for b in (low, high)}
        way = (size(batch) - size(low)) * PPM // max(size(high) - size(low), 1)
        target = mean[low] + (mean[high] - mean[low]) * way // PPM
        return near, np.maximum(gpu[rows] + target - mean[near], 0)
    if end == CONSTANT:
        return near, gpu[rows]
    reading = kernels.of(pl.col("name").is_in(_reading_experts(kernels)))
    shares = reading, moe - reading, kernels.of(pl.col("class") == "attention")
    grown = touched_ppm(experts, batch) * PPM // touched_ppm(experts, near)
    alike = batch * PPM // near
    if end == MIDDLE:
        middle = replace(experts, count=(experts.count + experts.top_k + 1) // 2)
        grown = touched_ppm(middle, batch) * (batch + _TOKENS) * PPM // (touched_ppm(middle, near) * (near + _TOKENS))
        alike = (batch + _ATTENTION) * PPM // (near + _ATTENTION)
    factors = zip(shares, (grown - PPM, (alike if end == MIDDLE else grown) - PPM, alike - PPM), strict=True)
    # What a change has taken from the forward was not all of these kernels: they keep their shares of what is left.
    left = [(ns[rows] * gpu[rows] // np.maximum(kernels.gpu[rows], 1), factor) for ns, factor in factors]
    return near, np.maximum(gpu[rows] + sum(share * factor // PPM for share, factor in left), 0)


def _reading_experts(kernels: Kernels) -> list[str]:
    """Names of the MoE kernels that read the experts' weights: by far the longest."""
    moe = kernels.table.filter(pl.col("class") == "moe").group_by("name").agg(pl.col("ns").sum())
    return moe.filter(_OTHER * pl.col("ns") >= pl.col("ns").max()).get_column("name").to_list()


def host_ppm(piece: str, batch: int, measured: int) -> int:
    """What a piece of the host's time takes with `batch` requests, ppm of what it took with `measured`."""
    fixed = _HOST[piece]
    return (batch + fixed) * PPM // (measured + fixed)

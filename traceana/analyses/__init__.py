"""Analyses: each is one module with `NAME` and `run(model) -> Result`. They do not know each other."""

from __future__ import annotations

from collections.abc import Callable

from traceana.analyses import accounting, attribution, bound, cuda_graph, gpu, host, micro_batches, moe, p2p
from traceana.model.model import Model
from traceana.result import Result

__all__ = ["ALL"]


ALL: tuple[Callable[[Model], Result], ...] = (
    accounting.run,
    attribution.run,
    micro_batches.run,
    p2p.run,
    moe.run,
    cuda_graph.run,
    gpu.run,
    host.run,
    bound.run,
)

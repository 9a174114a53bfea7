"""Changes applied to the pieces of a capture: what each stage's forward, host and links become."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import polars as pl

from traceana.errors import TraceanaError
from traceana.intervals import IntArray
from traceana.simulate.changes import PLACES, Change, conflicts
from traceana.simulate.growth import PPM
from traceana.simulate.kernels import APART, BODY
from traceana.simulate.loop import Hops
from traceana.simulate.parts import COLUMNS, Parts
from traceana.simulate.slots import FIRST_ALONE, Admission, admission, arrivals_that_explain, fill

__all__ = ["Scenario", "apply", "placed", "unchanged"]

_LAUNCHING = ("prepare", "launch", "tail", "after_launch")
_COLUMNS_OF = {
    "host_launch": _LAUNCHING,
    "host_sync": ("wake",),
    "host_schedule": tuple(c for c in COLUMNS if c not in (*_LAUNCHING, "wake")),
}
# Between two kernels of a graph the GPU pauses: the median of the captures' graphs.
_NODE_GAP_NS = 500


@dataclass(frozen=True, slots=True)
class Scenario:
    """A server to play. Per stage and row: `gpu` ns, `apart` ns of kernels outside the forward's body by place,
    `nodes` kernels in graphs, `issue` the factor (ppm) on the calls that launch one by one. `columns` are factors
    (ppm) on host pieces, `host` ns added per stage and piece, `anywhere` ns added to a stage whose place is not said (it
    is taken to be in the scheduling, and may be behind the forward), `taken` ns taken off. `patterns` are the slots'
    batches by order of arrival, the likeliest first. `graph` is None where launching stays as it was."""

    gpu: tuple[IntArray, ...]
    apart: tuple[Mapping[str, IntArray], ...]
    nodes: tuple[IntArray, ...]
    issue: tuple[IntArray, ...]
    columns: IntArray
    hops: tuple[Hops, ...]
    patterns: tuple[tuple[str, tuple[int, ...]], ...]
    depth: int
    host: IntArray
    anywhere: tuple[int, ...]
    taken: tuple[int, ...]
    graph: bool | None = None
    merge: bool = False
    notes: tuple[str, ...] = field(default=())


def unchanged(parts: Parts) -> Scenario:
    """The capture as it is."""
    stages = len(parts.stages)
    every = pl.lit(True)
    return Scenario(
        gpu=tuple(s.kernels.gpu for s in parts.stages),
        apart=tuple({place: s.kernels.of(every, place) for place in APART} for s in parts.stages),
        nodes=tuple(s.kernels.nodes for s in parts.stages),
        issue=tuple(np.full(s.kernels.gpu.size, PPM, dtype=np.int64) for s in parts.stages),
        columns=np.full(len(COLUMNS), PPM, dtype=np.int64),
        hops=parts.hops,
        patterns=(("as seen", parts.slots),),
        depth=parts.depth,
        host=np.zeros((stages, len(COLUMNS)), dtype=np.int64),
        anywhere=(0,) * stages,
        taken=(0,) * stages,
    )


def apply(parts: Parts, changes: Sequence[Change]) -> Scenario:
    """`parts` under `changes`. Raises TraceanaError where one does not fit the capture."""
    conflicts(changes)
    scenario = unchanged(parts)
    for change in changes:
        if change.kind == "scale":
            scenario = _scale(parts, scenario, change)
        elif change.kind == "host":
            scenario = _host(parts, scenario, change)
        elif change.kind == "link":
            scenario = _link(parts, scenario, change)
    settings = {c.key: c for c in changes if c.kind == "set"}
    if "pp_layer_partition" in settings:
        scenario = _partition(parts, scenario, settings["pp_layer_partition"])
    if "disable_cuda_graph" in settings:
        scenario = _graphs(parts, scenario, off=bool(settings["disable_cuda_graph"].value))
    if "merge_waiting" in settings:
        scenario = replace(scenario, merge=bool(settings["merge_waiting"].value))
    return _admit(parts, scenario, settings)


def _scale(parts: Parts, scenario: Scenario, change: Change) -> Scenario:
    kind, _, name = change.key.partition(":")
    factor = change.value if isinstance(change.value, int) else PPM
    if kind == "cause":
        return _scale_cause(parts, scenario, name, factor)
    gpu, apart, issue, found = list(scenario.gpu), list(scenario.apart), list(scenario.issue), False
    for s, stage in enumerate(parts.stages):
        kernels = stage.kernels
        chosen = pl.col("class") == name if kind == "class" else kernels.matching(re.compile(name))
        found = found or bool(kernels.table.filter(chosen).height)
        gpu[s] = _less(gpu[s], _share(kernels.of(chosen), kernels.gpu, gpu[s]), factor)
        apart[s] = {
            place: _less(ns, _share(kernels.of(chosen, place), kernels.of(pl.lit(True), place), ns), factor)
            for place, ns in apart[s].items()
        }
        if factor == 0:  # a kernel that is gone is not launched either
            part = kernels.table.filter(chosen & (pl.col("place") == BODY)).group_by("row").agg(pl.col("count").sum())
            gone = np.zeros(kernels.gpu.size, dtype=np.int64)
            gone[part.get_column("row").to_numpy()] = part.get_column("count").to_numpy()
            issue[s] = issue[s] * (kernels.count - np.minimum(gone, kernels.count)) // np.maximum(kernels.count, 1)
    if not found:
        names = sorted({n for stage in parts.stages for n in stage.kernels.table.get_column("name").unique()})
        raise TraceanaError(
            "no kernel matches", where=change.text,
            hint=f"kernels are for instance {', '.join(n[:40] for n in names[:3])}; "
            "messages between stages change with --link",
        )  # fmt: skip
    return replace(scenario, gpu=tuple(gpu), apart=tuple(apart), issue=tuple(issue))


def _share(part: IntArray, whole: IntArray, now: IntArray) -> IntArray:
    """What `part` of `whole` is of it `now`, after other changes."""
    share: IntArray = part * now // np.maximum(whole, 1)
    return share


def _less(time: IntArray, part: IntArray, factor: int) -> IntArray:
    """`time` with its `part` multiplied by a factor in ppm."""
    less: IntArray = np.maximum(time - part * (PPM - factor) // PPM, 0)
    return less


def _scale_cause(parts: Parts, scenario: Scenario, cause: str, factor: int) -> Scenario:
    if cause in _COLUMNS_OF:
        columns = scenario.columns.copy()
        for name in _COLUMNS_OF[cause]:
            columns[COLUMNS.index(name)] = columns[COLUMNS.index(name)] * factor // PPM
        return replace(scenario, columns=columns)
    if cause == "launch_latency":
        gaps = [s.kernels.gpu - s.kernels.busy for s in parts.stages]
        gpu = tuple(_less(g, gap, factor) for g, gap in zip(scenario.gpu, gaps, strict=True))
        return replace(scenario, gpu=gpu)
    if cause == "profiler":
        return replace(
            scenario, notes=(*scenario.notes, "predictions are for the unprofiled server: no profiler to remove")
        )
    names = ("requests", "proxy", "output") if cause == "control_message" else _TRANSFERS
    return replace(scenario, hops=tuple(_scaled_hop(h, names, factor) for h in scenario.hops))


_TRANSFERS = ("send_proxy", "recv_proxy", "send_output", "recv_output")


def _scaled_hop(hop: Hops, names: Sequence[str], factor: int) -> Hops:
    values: dict[str, Any] = {n: getattr(hop, n) * factor // PPM for n in names}
    return replace(hop, **values)


def _host(parts: Parts, scenario: Scenario, change: Change) -> Scenario:
    number, _, place = change.key.partition("@")
    stage = int(number)
    if stage >= len(parts.stages):
        raise TraceanaError(
            "no such stage", where=change.text, hint=f"stages are 0 to {len(parts.stages) - 1}, as in --host 0=-3ms"
        )
    amount = change.value if isinstance(change.value, int) else 0
    if place:
        host = scenario.host.copy()
        host[stage, COLUMNS.index(PLACES[place])] += amount
        return replace(scenario, host=host)
    name = "anywhere" if amount >= 0 else "taken"
    values = list(getattr(scenario, name))
    values[stage] += abs(amount)
    return replace(scenario, anywhere=tuple(values)) if amount >= 0 else replace(scenario, taken=tuple(values))


def placed(scenario: Scenario, piece: str) -> Scenario:
    """The scenario with what is added `anywhere` in one piece of the host's time."""
    host = scenario.host.copy()
    host[:, COLUMNS.index(piece)] += np.array(scenario.anywhere, dtype=np.int64)
    return replace(scenario, host=host, anywhere=(0,) * len(scenario.anywhere))


def _link(parts: Parts, scenario: Scenario, change: Change) -> Scenario:
    ranks = [s.rank for s in parts.stages]
    src, dst = (int(r) for r in change.key.split("-"))
    if src not in ranks or ranks[(ranks.index(src) + 1) % len(ranks)] != dst:
        links = ", ".join(f"{r}-{ranks[(i + 1) % len(ranks)]}" for i, r in enumerate(ranks))
        raise TraceanaError("no such link", where=change.text, hint=f"links of this pipeline: {links}")
    factor = change.value if isinstance(change.value, int) else PPM
    hops = list(scenario.hops)
    at = ranks.index(src)
    hops[at] = _scaled_hop(hops[at], _TRANSFERS, factor)
    return replace(scenario, hops=tuple(hops))


def _partition(parts: Parts, scenario: Scenario, change: Change) -> Scenario:
    """Layers move between stages; embedding, lm_head and sampling stay where they are."""
    wanted = change.value if isinstance(change.value, tuple) else ()
    told = parts.facts.get("layers_by_rank")
    known = [int(x) for x in told] if isinstance(told, list) and len(told) == len(parts.stages) else None
    counted = [s.kernels.layers for s in parts.stages]
    layers = known or [x for x in counted if x is not None]
    if len(wanted) != len(parts.stages):
        raise TraceanaError(
            "one number of layers per stage", where=change.text, hint=f"there are {len(parts.stages)} stages"
        )
    if len(layers) != len(parts.stages):
        raise TraceanaError(
            "the layers of the stages are not known", where=change.text,
            hint="no kernel repeats in the forwards; put the model's config.json or the server's log beside the traces",
        )  # fmt: skip
    if sum(wanted) != sum(layers):
        raise TraceanaError(
            "the layers do not add up", where=change.text,
            hint=f"the model has {sum(layers)} layers, now {','.join(map(str, layers))}",
        )  # fmt: skip
    gpu, nodes, issue = list(scenario.gpu), list(scenario.nodes), list(scenario.issue)
    for s, stage in enumerate(parts.stages):
        inside = stage.kernels.layered()
        if not inside.any():  # layers known from the facts, but nothing repeats: all of the forward is layers
            inside = stage.kernels.gpu
        now = inside * gpu[s] // np.maximum(stage.kernels.gpu, 1)
        gpu[s] = gpu[s] + now * (wanted[s] - layers[s]) // layers[s]
        nodes[s] = nodes[s] * wanted[s] // layers[s]
        issue[s] = issue[s] * wanted[s] // layers[s]
    note = "layers are taken as alike" if known else f"layers are taken as alike; {layers} counted from the kernels"
    return replace(scenario, gpu=tuple(gpu), nodes=tuple(nodes), issue=tuple(issue), notes=(*scenario.notes, note))


def _graphs(parts: Parts, scenario: Scenario, *, off: bool) -> Scenario:
    used = any(s.graphed.any() for s in parts.stages)
    if used != off:
        return replace(
            scenario, notes=(*scenario.notes, f"CUDA graphs are {'off' if off else 'on'} in the capture already")
        )
    gpu, nodes = list(scenario.gpu), list(scenario.nodes)
    for s, stage in enumerate(parts.stages):
        k = stage.kernels
        if off:
            gpu[s] = np.maximum(gpu[s] - (k.gpu - k.busy), 0)
        else:
            nodes[s] = np.maximum(k.count - k.before - k.after, 0) * scenario.issue[s] // PPM
            gpu[s] = gpu[s] + nodes[s] * _NODE_GAP_NS
    return replace(scenario, gpu=tuple(gpu), nodes=tuple(nodes), graph=not off)


def _admit(parts: Parts, scenario: Scenario, settings: dict[str, Change]) -> Scenario:
    """The slots' batches under new limits, for every order of arrival that explains the capture's own."""
    keys = ("pp_max_micro_batch_size", "pp_async_batch_depth", "max_running_requests", "concurrency")
    asked = {k: c.value for k, c in settings.items() if k in keys and isinstance(c.value, int)}
    if not asked:
        return scenario
    if not parts.decode:
        raise TraceanaError(
            "slots cannot be filled anew", where=", ".join(settings[k].text for k in asked),
            hint="the capture holds no decode step: profile while the server decodes",
        )  # fmt: skip
    rule = admission(parts.facts, len(parts.stages), parts.depth, parts.slots)
    explained = arrivals_that_explain(rule, parts.slots)
    notes = list(scenario.notes)
    if not explained:
        notes.append(f"greedy admission does not explain the slots seen, {list(parts.slots)}: new slots are a guess")
    new = _new_rule(rule, asked)
    arrivals = explained or (FIRST_ALONE,)
    patterns: dict[tuple[int, ...], str] = {}
    for arrival in arrivals:
        patterns.setdefault(fill(new, arrival), arrival)
    named = tuple((arrival, pattern) for pattern, arrival in patterns.items())
    notes.append(f"slots {'; '.join(f'{list(p)} ({a})' for a, p in named)}")
    capacity = _capacity(parts, new)
    if capacity is not None:
        notes.append(capacity)
    return replace(scenario, patterns=named, depth=new.depth, notes=tuple(notes))


def _new_rule(rule: Admission, asked: dict[str, int]) -> Admission:
    new = rule
    if "pp_async_batch_depth" in asked:
        new = replace(new, depth=asked["pp_async_batch_depth"])
    if "max_running_requests" in asked:
        new = replace(new, max_running=asked["max_running_requests"])
    if "pp_max_micro_batch_size" in asked:
        new = replace(new, cap=asked["pp_max_micro_batch_size"], auto=False)
    if "concurrency" in asked:
        new = replace(new, clients=asked["concurrency"])
    return new


def _capacity(parts: Parts, rule: Admission) -> str | None:
    """A note where the KV pool may not hold the requests."""
    kv = parts.facts.get("kv")
    running = sum(parts.slots)
    if not isinstance(kv, Mapping) or not running:
        return None
    pool = cast("Mapping[str, object]", kv)
    tokens, capacity = pool.get("tokens"), pool.get("capacity")
    if not isinstance(tokens, int) or not isinstance(capacity, int) or not tokens:
        return None
    need = tokens * rule.running // running
    return (
        f"about {need} tokens for a KV pool of {capacity}: it will not hold all requests" if need > capacity else None
    )

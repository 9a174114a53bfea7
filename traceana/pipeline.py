"""From a folder to a report: read, match, align, model, analyse. Commands and notebooks start here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import polars as pl

from traceana import __version__, schema
from traceana.analyses import ALL
from traceana.clock.align import solve_clock
from traceana.clock.apply import apply_clock, shift_controls, shift_messages, shift_rows
from traceana.clock.model import ClockModel
from traceana.clock.prior import SAME_HOST_NS, Assume
from traceana.engine import beside, open_engine, side_by_side
from traceana.errors import ModelError, TraceanaError
from traceana.findings import answer, find
from traceana.matching.collectives import match_collectives
from traceana.matching.launches import launches
from traceana.matching.match import Matched, match
from traceana.model.build import build_trace
from traceana.model.model import Model, explain
from traceana.result import Result, Tables
from traceana.simulate.predict import pricer
from traceana.sources.limits import Limits
from traceana.sources.losses import loss, losses_frame
from traceana.sources.secret_scan import find_secrets
from traceana.tables import CaptureTables
from traceana.tables.read import hand_back, read_capture

__all__ = ["Options", "Report", "analyse", "check", "load_model", "parse_window"]

SCHEMA_VERSION = 1
_UNITS = {"": 1, "ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_TIME = re.compile(r"^(\d+)(?:\.(\d+))?(ns|us|ms|s)?$")

Place = Path | str | Sequence[Path]
"""A capture: its folder or one trace, the URL of one on a storage, or the traces themselves."""


class Progress(Protocol):
    """Told what is being done, how much of it is done, and how much there is (0: unknown)."""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None: ...


@dataclass(frozen=True, slots=True)
class Options:
    """What a command may ask for. `window` is (start_ns, end_ns) from the start of the common window; `engine` is where
    ranks are read (`traceana.engine`); `limits` bounds what a file may ask for (None: the usual bounds)."""

    ranks: Sequence[int] | None = None
    window: tuple[int, int] | None = None
    assume: str | None = None
    cache: bool = True
    engine: str | None = None
    limits: Limits | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """The model, the results by name, and the one JSON document that `report --json` prints."""

    model: Model
    clock: ClockModel
    results: Mapping[str, Result]
    document: Mapping[str, object]
    losses: pl.DataFrame = field(default_factory=schema.LOSSES.empty)

    @property
    def tables(self) -> Tables:
        """Every table of every result, and those of the model that outputs want."""
        trace = self.model.trace
        own = {
            "visits": trace.visits, "forwards": trace.forwards, "controls": trace.controls, "collectives": trace.collectives,
            "clock": trace.clock, "losses": self.losses,
        }  # fmt: skip
        return Tables(
            own, {name: partial(r.tables.__getitem__, name) for r in self.results.values() for name in r.tables}
        )


def parse_window(text: str) -> tuple[int, int]:
    """`START..END` in nanoseconds or with a unit (`12ms..40ms`) as exact nanoseconds. Raises TraceanaError."""
    parts = text.split("..")
    if len(parts) != 2:
        raise TraceanaError("not a window", where=text, hint="write START..END, for instance 12ms..40ms")
    start, end = (_nanoseconds(p.strip(), text) for p in parts)
    if end <= start:
        raise TraceanaError(
            "the window ends before it starts", where=text, hint="write START..END, for instance 12ms..40ms"
        )
    return start, end


def _nanoseconds(part: str, whole: str) -> int:
    found = _TIME.match(part)
    if found is None:
        raise TraceanaError(
            "not a time", where=f"{part!r} in {whole!r}", hint="write nanoseconds, or a number with ns, us, ms or s"
        )
    unit = _UNITS[found[3] or ""]
    fraction = found[2] or ""
    scaled = int(str(found[1]) + str(fraction)) * unit
    if scaled % 10 ** len(fraction):
        raise TraceanaError("finer than a nanosecond", where=part, hint="give whole nanoseconds")
    whole_ns: int = scaled // 10 ** len(fraction)
    return whole_ns


@dataclass(frozen=True, slots=True)
class _Aligned:
    """A capture on one clock, with what was matched in it."""

    raw: CaptureTables
    capture: CaptureTables
    matched: Matched
    collectives: pl.DataFrame
    clock: ClockModel


def _silent(what: str, done: int = 0, total: int = 0) -> None:
    pass


def _align(path: Place, options: Options, say: Progress) -> _Aligned:
    say("read")
    with open_engine(options.engine) as executor:
        capture = read_capture(
            path, ranks=options.ranks, cache=options.cache, executor=executor, progress=say, limits=options.limits
        )
    assume = Assume.parse(options.assume)
    # Without a belief about the clocks, streams of messages that order alone leaves open stay unpaired.
    slack_ns = None if assume.kind == "none" else SAME_HOST_NS
    with beside(lambda: match_collectives(capture.ranks, slack_ns=slack_ns), alone=not capture.in_memory) as found:
        matched = match(capture, slack_ns=slack_ns, progress=say)
    collectives, lost = found()
    say("align clocks")
    clock = solve_clock(
        capture.ranks,
        matched.messages,
        matched.controls,
        collectives,
        assume=assume,
        manifest=capture.manifest,
        facts=capture.server.facts if capture.server is not None else None,
    )
    aligned = replace(capture, ranks=tuple(apply_clock(r, clock) for r in capture.ranks))
    moved = replace(
        matched,
        visits={
            r: shift_rows(v, "rank", ["ts_ns", "end_ns", "run_ts_ns", "run_end_ns"], clock.cpu)
            for r, v in matched.visits.items()
        },
        launches={r.info.rank: launches(r) for r in aligned.ranks},
        messages=shift_messages(matched.messages, clock),
        controls=shift_controls(matched.controls, clock),
        unmatched=shift_rows(matched.unmatched, "rank", ["ts_ns", "end_ns"], clock.gpu),
        losses=pl.concat([matched.losses, lost, clock.losses]),
    )
    return _Aligned(capture, aligned, moved, shift_rows(collectives, "rank", ["ts_ns", "end_ns"], clock.gpu), clock)


def load_model(
    path: Place, options: Options, progress: Progress | None = None
) -> tuple[Model, ClockModel, CaptureTables]:
    """Read the capture at `path` and explain it: the model, the clock, and the tables as read. Raises TraceanaError."""
    say = progress or _silent
    a = _align(path, options, say)
    trace = build_trace(
        a.capture, a.matched, a.collectives, a.clock.ranks, uncertainty_ns=a.clock.worst_ns, window=options.window
    )
    model = explain(trace, say)
    hand_back()  # of what the chains took, a quarter of all
    return model, a.clock, a.raw


def check(
    path: Place, options: Options | None = None, progress: Progress | None = None
) -> tuple[dict[str, object], pl.DataFrame]:
    """What is usable in the capture at `path`: the document of `traceana check --json`, and its LOSSES.

    Ranks that cannot be read are losses; only a folder without any readable rank raises TraceanaError.
    """
    asked = options or Options()
    a = _align(path, asked, progress or _silent)
    document: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "traceana_version": __version__,
        "usable": True,
        "reason": None,
    }
    losses = [a.raw.losses, *(r.losses for r in a.raw.ranks), a.matched.losses]
    try:
        trace = build_trace(
            a.capture, a.matched, a.collectives, a.clock.ranks, uncertainty_ns=a.clock.worst_ns, window=asked.window
        )
        model = explain(trace)
        losses += [s.losses for s in model.states.values()]
        w = trace.window
        document["window"] = {
            "start_ns": w.start_ns,
            "end_ns": w.end_ns,
            "duration_ns": w.duration_ns,
            "basis": w.basis,
        }
    except ModelError as error:
        document |= {"usable": False, "reason": str(error), "window": None}
    document["ranks"] = [
        {
            "rank": r.info.rank,
            "pp_rank": a.matched.topology.stage.get(r.info.rank) if a.matched.topology.is_pipeline else None,
            "file": r.info.file.name,
            "kernels": r.device.height,
            "calls": r.calls.height,
            "annotations": r.annotations.height,
            "messages": a.matched.messages.filter(
                (pl.col("src") == r.info.rank) | (pl.col("dst") == r.info.rank)
            ).height,
            "rank_source": r.info.rank_source,
            "device": r.info.device,
            "host": r.info.host,
        }
        for r in a.raw.ranks
    ]
    table = _sorted_losses(losses)
    secrets = find_secrets(path) if isinstance(path, Path) else schema.LOSSES.empty()
    if isinstance(path, str):
        secrets = losses_frame(
            [loss("secrets_not_searched", "info", 1, "files on a storage are not searched for secrets")]
        )
    table = pl.concat([table, secrets])
    document |= {"clock": _clock_json(a.clock), "losses": table.to_dicts()}
    return document, table


def analyse(path: Place, options: Options | None = None, progress: Progress | None = None) -> Report:
    """The whole report of the capture at `path`: the model, every analysis, and the JSON document."""
    model, clock, capture = load_model(path, options or Options(), progress)
    results: dict[str, Result] = {}
    say = progress or _silent
    say("analyse", 0, len(ALL))
    every = side_by_side(lambda run: run(model), ALL, alone=not capture.in_memory)
    for done, result in enumerate(every, 1):
        say("analyse", done, len(ALL))
        results[result.name] = result
    losses = collect_losses(capture, model, results)
    return Report(model, clock, results, _document(model, clock, results, losses), losses)


def collect_losses(capture: CaptureTables, model: Model, results: Mapping[str, Result]) -> pl.DataFrame:
    """LOSSES of every stage, worst first; equal rows appear once."""
    return _sorted_losses(
        [capture.losses, *(r.losses for r in capture.ranks), model.trace.losses, *(r.losses for r in results.values())]
    )


def _sorted_losses(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    order = {"error": 0, "warning": 1, "info": 2}
    every = pl.concat([schema.LOSSES.frame(f) for f in frames]).unique(maintain_order=True)
    rank = pl.col("severity").replace_strict(order, default=3, return_dtype=pl.Int64)
    return every.sort(rank, "name", pl.col("rank"), "detail", nulls_last=True)


def _document(
    model: Model, clock: ClockModel, results: Mapping[str, Result], losses: pl.DataFrame
) -> dict[str, object]:
    window = model.trace.window
    facts: dict[str, object] = {}
    for result in results.values():
        facts |= result.facts
    document: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "traceana_version": __version__,
        "window": {
            "start_ns": window.start_ns,
            "end_ns": window.end_ns,
            "duration_ns": window.duration_ns,
            "basis": window.basis,
            "trimmed": [dict(t) for t in window.trimmed],
        },
        "clock": _clock_json(clock),
        "pipeline": {"pp_size": model.trace.topology.pp_size, "source": model.trace.topology.source},
        **facts,
        "server": dict(model.facts) or None,
        "skipped": {r.name: r.skipped for r in results.values() if r.skipped},
        "losses": losses.to_dicts(),
    }
    price, work = pricer(model)
    document["stage_work"] = work
    found = find(document, price)
    return document | {"findings": [f.as_json() for f in found], "answers": answer(document, found)}


def _clock_json(clock: ClockModel) -> dict[str, object]:
    return {
        "reference_rank": clock.reference_rank,
        "at_ns": clock.mid_ns,
        "ranks": [{**row, "worst_ns": clock.worst_ns.get(row["rank"])} for row in clock.ranks.to_dicts()],
        "pairs": clock.pairs.to_dicts(),
        "violations": [dict(v) for v in clock.violations],
        "identifiable": clock.identifiable,
        "prior": {"kind": clock.prior.kind, "reason": clock.prior.reason},
        "statements": list(clock.statements),
        "binding": clock.binding.to_dicts(),
    }

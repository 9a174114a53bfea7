"""What must hold for any input: an answer that adds up, or a TraceanaError that says what to do. Nothing else."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import polars as pl

from traceana import schema
from traceana.cli.report_files import write_report
from traceana.compare import compare
from traceana.compare.side import measure_side
from traceana.errors import TraceanaError
from traceana.outputs.check_text import render_check
from traceana.outputs.jsonfile import to_json
from traceana.outputs.terminal import render_terminal
from traceana.pipeline import Options, Report, analyse, check, load_model
from traceana.simulate.changes import parse_set
from traceana.simulate.predict import predict
from traceana.sources.limits import Limits
from traceana.tables.read import read_capture

__all__ = ["Broken", "hold"]

_OPTIONS = Options(cache=False)
_LIMITS = Limits(text_bytes=64 << 20)


class Broken(AssertionError):
    """The property does not hold."""


def hold(folder: Path, *, whole: bool, random: Random) -> str:
    """`read`, `report` or `refused`; raises Broken, or whatever the product let through. Warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            if not whole:
                _read(folder)
                return "read"
            _report(folder, random)
            return "report"
        except TraceanaError as error:
            _require(bool(error.what and error.hint), f"an error that says nothing: {error!r}, hint {error.hint!r}")
            return "refused"


def _require(true: bool, what: str) -> None:
    if not true:
        raise Broken(what)


def _read(folder: Path) -> None:
    capture = read_capture(folder, cache=False, limits=_LIMITS)
    for rank in capture.ranks:
        for name in ("device", "calls", "annotations", "gpu_annotations", "ops", "overheads"):
            frame: pl.DataFrame = getattr(rank, name)
            backward = frame.filter(pl.col("end_ns") < pl.col("ts_ns")).height
            _require(backward == 0, f"{name}: {backward} events that end before they start")
        _losses(rank.losses)
    _losses(capture.losses)


def _losses(losses: pl.DataFrame) -> None:
    schema.LOSSES.frame(losses)
    _require((losses["count"] >= 0).all(), "a negative count of losses")


def _report(folder: Path, random: Random) -> None:
    what = random.randrange(8)
    if what == 0:
        document, losses = check(folder, _OPTIONS)
        _losses(losses)
        _json(document)
        render_check(document, color=False)
        return
    if what == 1:
        model, _, _ = load_model(folder, _OPTIONS)
        text = random.choice(
            ("pp_max_micro_batch_size=16", "merge_waiting=true", "disable_cuda_graph=true", "concurrency=8")
        )
        prediction = predict(model, parse_set(text))
        _json(prediction.as_json())
        return
    report = analyse(folder, _OPTIONS)
    _adds_up(report)
    _json(report.document)
    _losses(report.losses)
    text = render_terminal(report.document, width=80, color=False)
    _require("\x1b" not in text, "the terminal text holds an escape")
    if what == 2:
        write_report(folder / "report", report, lambda _: None)
        page = (folder / "report" / "report.html").read_text()
        _require("<script>alert" not in page and "<img" not in page, "a name became markup in the page")
    if what == 3:
        side = measure_side("a", report.model, report.document)
        _json(compare([side], [side]).as_json())


def _json(document: Mapping[str, object]) -> None:
    text = to_json(document)
    json.loads(text, parse_constant=_no_constant)
    text.encode()


def _no_constant(name: str) -> None:
    raise Broken(f"{name} in a JSON document")


def _adds_up(report: Report) -> None:
    """Every nanosecond of every rank's window, once."""
    document = cast("dict[str, Any]", report.document)
    duration = document["window"]["duration_ns"]
    bubbles: dict[int, int] = {}
    stages = cast("Sequence[dict[str, Any]]", document["stages"])
    _require(bool(stages), "no stages")
    for s in stages:
        rank, busy, transfer, bubble = s["rank"], s["busy_ns"], s["transfer_ns"], s["bubble_ns"]
        causes = s["causes_ns"]
        parts = [busy, transfer, *causes.values()]
        _require(all(isinstance(n, int) and n >= 0 for n in parts), f"rank {rank}: a negative part: {parts}")
        _require(s["window_ns"] == duration, f"rank {rank}: window {s['window_ns']} of {duration}")
        _require(sum(parts) == duration, f"rank {rank}: parts sum to {sum(parts)}, the window has {duration}")
        _require(sum(causes.values()) == bubble, f"rank {rank}: causes sum to {sum(causes.values())}, not {bubble}")
        classes = s["busy_by_class_ns"]
        _require(
            sum(classes.values()) == busy and min(classes.values()) >= 0, f"rank {rank}: classes {classes}, {busy}"
        )
        _require(0 <= s["utilisation"] <= 1 and 0 <= s["reported_utilisation"] <= 1, f"rank {rank}: a share beyond 1")
        bubbles[rank] = bubble
    blamed = dict.fromkeys(bubbles, 0)
    for row in cast("Sequence[dict[str, Any]]", document["blame"]):
        _require(row["ns"] >= 0, f"negative blame: {row}")
        blamed[row["rank"]] += row["ns"]
    _require(blamed == bubbles, f"blame {blamed}, bubbles {bubbles}")

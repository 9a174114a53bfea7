"""`traceana whatif`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import click

from traceana.cli.common import Place, analysis_options, gate, make_options, progress
from traceana.outputs.jsonfile import to_json
from traceana.outputs.words import plain_lines
from traceana.pipeline import collect_losses, load_model
from traceana.simulate.changes import Change, parse_host, parse_link, parse_remove, parse_scale, parse_set
from traceana.simulate.predict import Prediction, predict

__all__ = ["command"]


@click.command("whatif")
@click.argument("folder", metavar="DIR", type=Place())
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE",
    help="pp_max_micro_batch_size, pp_async_batch_depth, pp_layer_partition=16,48, max_running_requests, concurrency, "
    "disable_cuda_graph=true|false, merge_waiting=true (a busy stage takes all waiting micro-batches at once).",
)  # fmt: skip
@click.option("--remove", multiple=True, metavar="TARGET", help="Kernels gone: REGEX, class:NAME or cause:NAME.")
@click.option(
    "--scale", multiple=True, metavar="TARGET=FACTOR", help="Times multiplied: class:moe=0.5 halves the MoE kernels."
)
@click.option("--host", multiple=True, metavar="STAGE[@SPAN]=+MS|-MS", help="Host time per visit of a stage: 0=-3ms.")
@click.option(
    "--link", multiple=True, metavar="SRC-DST=FACTOR", help="Time of messages between two ranks multiplied: 0-1=0.5."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@analysis_options
def command(
    folder: Path | str, settings: tuple[str, ...], remove: tuple[str, ...], scale: tuple[str, ...], host: tuple[str, ...],
    link: tuple[str, ...], as_json: bool, ranks: str | None, window: str | None, assume: str | None, no_cache: bool, engine: str | None,
    strict: bool, verbose: int,
) -> None:  # fmt: skip
    """Predict the throughput of the unprofiled server of DIR under changes, all of them together.

    \b
    traceana whatif DIR --set pp_max_micro_batch_size=16 --set max_running_requests=32
    traceana whatif DIR --remove 'fused_moe_kernel' --host 0=-3ms
    """
    changes: list[Change] = [change for text in settings for change in parse_set(text)]
    changes += [parse_remove(text) for text in remove]
    changes += [parse_scale(text) for text in scale]
    changes += [parse_host(text) for text in host]
    changes += [parse_link(text) for text in link]
    with progress(verbose) as say:
        model, _, capture = load_model(folder, make_options(ranks, window, assume, no_cache, engine), say)
        say("predict")
        prediction = predict(model, changes)
    click.echo(to_json(prediction.as_json()) if as_json else render(prediction), nl=not as_json)
    gate(collect_losses(capture, model, {}), strict)


def render(p: Prediction) -> str:
    """The prediction in words and a small table, in 80 columns."""
    step = f"{p.period_ns / 1e6:10.3f} ms a micro-batch"
    if p.token_ns is not None:
        step += f", {p.token_ns / 1e6:.3f} ms from token to token"
    top = [
        ("changes", "; ".join(p.changes) or "none: the capture as it is"),
        ("now", f"{p.baseline:10,.1f} tokens/s"),
        ("", f"({p.source})"),
        (
            "predicted",
            f"{p.throughput:10,.1f} tokens/s  {100 * p.gain:+.1f} %, range {p.low:,.1f} to {p.high:,.1f}",
        ),
        ("step", step),
    ]
    if p.slots is not None:
        top.append(("slots", f"{', '.join(map(str, p.slots))} requests"))
    table = [f"{s.rank:4d}   {100 * s.utilisation:9.1f} %   {s.bubble_ns / 1e6:10.3f} ms" for s in p.stages]
    rest = [
        ("method", p.method),
        ("calibration", p.calibration),
        *(("extrapolated", note) for note in p.extrapolations),
    ]
    lines = [*_wrapped(top), "", "rank   utilisation   bubble a step", *table, "", *_wrapped(rest)]
    return plain_lines("\n".join(lines))


def _wrapped(items: Sequence[tuple[str, str]]) -> list[str]:
    """A line of 80 columns or more for each (name, words)."""
    out: list[str] = []
    for name, words in items:
        out += textwrap.wrap(words, 80, initial_indent=f"{name:<13}", subsequent_indent=" " * 13)
    return out

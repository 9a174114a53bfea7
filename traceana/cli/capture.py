"""`traceana capture`: the options and the work are traceana_capture's, which needs nothing but Python itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import click

from traceana.errors import SourceError
from traceana_capture import driver
from traceana_capture.errors import CaptureError
from traceana_capture.manifest import say_to_stderr
from traceana_capture.options import OPTIONS, CaptureOptions

__all__ = ["command"]


def _with_options(function: Callable[..., int]) -> Callable[..., int]:
    for option in reversed(OPTIONS):
        default = option.default
        shown = (
            ""
            if default in (None, False)
            else f"  [default: {default:g}]"
            if isinstance(default, float)
            else f"  [default: {default}]"
        )
        if option.flag:
            function = click.option(*option.flags, option.name, help=option.help, is_flag=True, default=None)(function)
        else:
            function = click.option(
                *option.flags,
                option.name,
                help=option.help + shown,
                type=click.Choice(option.choices) if option.choices else option.kind,
                metavar=option.metavar or None,
                multiple=option.many,
            )(function)
    return function


@click.command("capture")
@_with_options
@click.argument("server_command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(server_command: tuple[str, ...], **values: Any) -> int:
    """Record every rank of a pipeline-parallel server, attached to or started with -- COMMAND, into a capture folder.

    \b
    traceana capture --ranks 0-7 --load concurrency=32,input=256,output=256 -o cap
    traceana capture -o cap -- python -m sglang.launch_server --model-path M --pp-size 8
    """
    try:
        given = {name: (list(v) or None) if isinstance(v, tuple) else v for name, v in values.items()}
        options = CaptureOptions.from_values(given, server_command)
        talk = options.verbose or sys.stderr.isatty()
        found = driver.capture(options, say=say_to_stderr if talk else lambda text: None)
    except CaptureError as error:
        raise SourceError(error.what, where=error.where, hint=error.hint) from None
    documents = [document for _, document in found]
    if options.json:
        click.echo(json.dumps(documents[0] if len(documents) == 1 else {"captures": documents}, indent=1, default=str))
    else:
        for folder, document in found:
            click.echo(driver.summary(folder, document))
    return driver.exit_status(options, documents)

"""Write docs/reference/{tables,cli,errors}.md from the code. `--check` fails where they are stale."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import click

from traceana import errors, schema
from traceana.cli import cli

ROOT = Path(__file__).resolve().parent.parent
MARK = "<!-- Written by scripts/docs.py; do not edit. -->\n\n"


def tables() -> str:
    """The tables of `traceana.schema`."""
    out = [MARK, "# Tables\n\n", (schema.__doc__ or "").split("\n\n", 1)[1].strip() + "\n"]
    for table in schema.TABLES.values():
        out.append(
            f"\n## {table.name}\n\nOne row: {table.row}.\n\n| column | type | unit | null | meaning |\n|---|---|---|---|---|\n"
        )
        for c in table.columns:
            out.append(
                f"| `{c.name}` | {c.dtype} | {c.unit} | {'yes' if c.nullable else ''} | {c.doc} |\n".replace(
                    "<->", "&harr;"
                )
            )
    return "".join(out)


def commands() -> str:
    """`--help` of every command."""
    out = [MARK, "# Commands\n"]
    context = click.Context(cli, info_name="traceana", max_content_width=100)
    out.append("\n```text\n" + cli.get_help(context) + "\n```\n")
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context, max_content_width=100)
        out.append(f"\n## traceana {name}\n\n```text\n{command.get_help(inner)}\n```\n")
    return "".join(out)


def exceptions() -> str:
    """The exception tree and the exit statuses."""
    from traceana import cli as command_line

    tree = (errors.__doc__ or "").strip()
    status = (command_line.__doc__ or "").strip().split("\n\n")[-1]
    return f"{MARK}# Errors and exit status\n\n{status}\n\n```text\n{tree}\n```\n"


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale: list[str] = []
    for name, make in (("tables", tables), ("cli", commands), ("errors", exceptions)):
        path = ROOT / "docs" / "reference" / f"{name}.md"
        text = make()
        if check and (not path.is_file() or path.read_text(encoding="utf-8") != text):
            stale.append(str(path.relative_to(ROOT)))
        elif not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        print("stale, run scripts/docs.py:", *stale, file=sys.stderr)  # noqa: T201
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""docs/cli.md: what `--help` says of every command. `python -m pipelines.cli.reference > docs/cli.md` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from pipelines.cli.lazy import Unloaded
from pipelines.cli.main import COMMANDS, app

WIDTH = 110
_HEAD = """# The command line

What `laminar COMMAND --help` says, for every command. Made by `python -m pipelines.cli.reference > docs/cli.md`.
"""


def every_command() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command by its words, () for `laminar` itself, groups before what is in them. Imports them all."""
    yield (), typer.main.get_command(app)
    for name, where in COMMANDS.items():
        yield from _with_those_below((name,), where.load())


def reference() -> str:
    """The page, as Markdown."""
    return "\n".join([_HEAD, *(_section(words, command) for words, command in every_command())])


def _with_those_below(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, each in getattr(command, "commands", {}).items():
        yield from _with_those_below((*words, name), each.load() if isinstance(each, Unloaded) else each)


def _section(words: tuple[str, ...], command: Any) -> str:
    spelt = " ".join(("laminar", *words))
    command.rich_markup_mode = None  # plain text, of one width wherever it is made
    context = command.context_class(command, info_name=spelt, terminal_width=WIDTH, max_content_width=WIDTH)
    text = command.get_help(context).replace(str(Path.home()), "~")
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return f"## {spelt}\n\n```\n{lines.strip()}\n```\n"


if __name__ == "__main__":
    print(reference(), end="")

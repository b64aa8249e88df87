"""docs/cli.md: the `--help` text of every command. `python -m pipelines.cli.reference > docs/cli.md` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from infra.escaping import print_escaped
from pipelines.cli.lazy import LazyCommand
from pipelines.cli.main import COMMANDS, app
from pipelines.cli.option_sets import HELP_WIDTH

_HEAD = """# The command line

The output of `laminar COMMAND --help` for every command, made by `python -m pipelines.cli.reference > docs/cli.md`.
"""


def every_command() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each command with its words, () for `laminar` itself, groups before their commands. Imports them all."""
    yield (), typer.main.get_command(app)
    for name, location in COMMANDS.items():
        yield from _with_subcommands((name,), location.load())


def reference() -> str:
    """Return the page as Markdown."""
    return "\n".join([_HEAD, *(_section(words, command) for words, command in every_command())])


def _with_subcommands(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, each in getattr(command, "commands", {}).items():
        yield from _with_subcommands((*words, name), each.load() if isinstance(each, LazyCommand) else each)


def _section(words: tuple[str, ...], command: Any) -> str:
    title = " ".join(("laminar", *words))
    context = command.context_class(command, info_name=title, terminal_width=HELP_WIDTH, max_content_width=HELP_WIDTH)
    text = command.get_help(context).replace(str(Path.home()), "~")
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return f"## {title}\n\n```\n{lines.strip()}\n```\n"


if __name__ == "__main__":
    print_escaped(reference(), end="")

"""Commands whose modules are imported when they are called: `laminar topics list` must not wait for Beam or torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from pipelines.cli.option_sets import Commands


class CommandModule(NamedTuple):
    """Where a command lives: `function` of a module, or its `typer.Typer` named `app`. `help` is one line."""

    module: str
    help: str
    function: str = ""

    def load(self) -> Any:
        """The command itself, whose module is imported now."""
        found = importlib.import_module(self.module)
        app: typer.Typer = Commands() if self.function else found.app
        if self.function:
            app.command()(getattr(found, self.function))
        app._add_completion = False  # it is `laminar` that a shell would complete
        return typer.main.get_command(app)


class Unloaded(TyperCommand):
    """Stands for a command until it is called: it has a name and a line of help, and nothing is imported."""

    def __init__(self, name: str, where: CommandModule) -> None:
        super().__init__(name, help=where.help)
        self._where = where

    def load(self) -> Any:
        """The real command, which is imported now."""
        command = self._where.load()
        command.name = self.name
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the real command."""
        return self.load().make_context(info_name, args, parent=parent, **extra)


def lazy_group(commands: Mapping[str, CommandModule]) -> type[TyperGroup]:
    """A class for `typer.Typer(cls=...)` that has these commands, in this order, beside those registered with it."""

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            for name, where in commands.items():
                self.add_command(Unloaded(name, where))

        def list_commands(self, ctx: Any) -> list[str]:
            return list(self.commands)

    return LazyGroup

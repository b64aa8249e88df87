"""Commands whose modules are imported only when called: `laminar topics list` must not wait for Beam or torch.

Read-only commands start without NumPy and pandas, too: pyarrow imports NumPy if it is installed (0.5 s), and pandas
with its first array (0.2 s); everything else that they need takes 0.5 s.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from pipelines.cli.option_sets import Commands
from schemas.hidden_modules import hide_modules


class CommandModule(NamedTuple):
    """The location of a command: `function` of a module, or its `typer.Typer` named `app`. `help` is one line."""

    module: str
    help: str
    function: str = ""

    def load(self) -> Any:
        """Import the module and return the command."""
        module = importlib.import_module(self.module)
        app: typer.Typer = Commands() if self.function else module.app
        if self.function:
            app.command()(getattr(module, self.function))
        app._add_completion = False  # only `laminar` itself may offer shell completion
        return typer.main.get_command(app)


class LazyCommand(TyperCommand):
    """Placeholder of a command: it has the name and a line of help, and imports the command's module when called."""

    def __init__(self, name: str, location: CommandModule) -> None:
        super().__init__(name, help=location.help, rich_markup_mode=None)
        self._location = location

    def load(self) -> Any:
        """Import and return the real command."""
        command = self._location.load()
        command.name = self.name
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context of the real command."""
        return self.load().make_context(info_name, args, parent=parent, **extra)


def lazy_group(commands: Mapping[str, CommandModule]) -> type[TyperGroup]:
    """Return a class for `typer.Typer(cls=...)` with these commands, in this order, after those registered with it."""

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            for name, location in commands.items():
                self.add_command(LazyCommand(name, location))

        def list_commands(self, ctx: Any) -> list[str]:
            return list(self.commands)

        def make_context(self, *arguments: Any, **options: Any) -> Any:
            with _closed_pipe_raised():
                return super().make_context(*arguments, **options)

        def invoke(self, ctx: Any) -> Any:
            with _closed_pipe_raised():
                return super().invoke(ctx)

    return LazyGroup


@contextmanager
def _closed_pipe_raised() -> Iterator[None]:
    """Raise BrokenPipeError without its number, by which Typer would end the process with exit code 1."""
    try:
        yield
    except BrokenPipeError as error:
        raise BrokenPipeError(str(error)) from error


@contextmanager
def light_imports() -> Iterator[None]:
    """Block NumPy and pandas, unless they are loaded already, and share Kafka connections between the reads."""
    hide_modules(("numpy", "pandas"), "is not available in read-only commands")
    from infra.kafka.consumers import reuse_consumers

    with reuse_consumers():
        yield

"""Option sets: options that belong together are one parameter of a command, a frozen dataclass of annotated options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

HELP_WIDTH = 110
"""Columns of the help, at most."""


class PlainCommand(TyperCommand):
    """A command whose usage errors say how a run is named, and have no words of Typer's own parts."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Return the context. Raises usage errors as Typer does."""
        try:
            return super().make_context(info_name, args, parent=parent, **extra)
        except TyperException as error:
            message = getattr(error, "message", "").replace("Value error, ", "")
            names_a_run = any("--run" in each.opts for each in self.params)
            if message.startswith("Got unexpected extra argument") and names_a_run:
                extra_words = message.rpartition("(")[2].rstrip(")").split()
                message += f"; a run is named by --run: --run {extra_words[0]}"
            error.message = message
            raise


class Commands(typer.Typer):
    """A `typer.Typer` whose commands may have option sets among their parameters, and whose help is plain text.

    Typer's other help takes `[section]` for markup and `N:M:` for an emoji.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(rich_markup_mode=None, context_settings={"max_content_width": HELP_WIDTH}, **options)

    def command(self, *names: Any, **options: Any) -> Callable[[Any], Any]:
        """Like Typer's `command`. The decorated function is unchanged and can be called with option sets."""
        return _registering(super().command(*names, **{"cls": PlainCommand, **options}))

    def callback(self, *names: Any, **options: Any) -> Callable[[Any], Any]:
        """Like Typer's `callback`. The decorated function is unchanged and can be called with option sets."""
        return _registering(super().callback(*names, **options))


def _registering(register: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        register(spread(function))
        return function

    return decorate


def spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with each option of its option sets as a keyword parameter, after its other parameters."""
    signature = inspect.signature(function, eval_str=True)
    sets: dict[str, Any] = {
        name: each.annotation for name, each in signature.parameters.items() if is_dataclass(each.annotation)
    }
    if not sets:
        return function
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [each.replace(kind=keyword) for name, each in signature.parameters.items() if name not in sets]
    parameters += [option for kind in sets.values() for option in _options(kind)]

    @wraps(function)
    def wrapper(**given: Any) -> Any:
        for name, kind in sets.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        return function(**given)

    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapper


def _options(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(kind)
    ]

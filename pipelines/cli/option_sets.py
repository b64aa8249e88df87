"""Options that belong together, as one parameter of a command: a frozen dataclass of annotated options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import typer


class Commands(typer.Typer):
    """A `typer.Typer` whose commands may have sets of options among their parameters."""

    def command(self, *names: Any, **how: Any) -> Callable[[Any], Any]:
        """As Typer's. What is decorated stays as it is, and can be called with its sets."""
        return _registering(super().command(*names, **how))

    def callback(self, *names: Any, **how: Any) -> Callable[[Any], Any]:
        """As Typer's, likewise."""
        return _registering(super().callback(*names, **how))


def _registering(register: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        register(spread(function))
        return function

    return decorate


def spread(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the options of its sets as parameters of their own, all by keyword, after the others."""
    signature = inspect.signature(function, eval_str=True)
    sets: dict[str, Any] = {
        name: each.annotation for name, each in signature.parameters.items() if is_dataclass(each.annotation)
    }
    if not sets:
        return function
    named = inspect.Parameter.KEYWORD_ONLY
    parameters = [each.replace(kind=named) for name, each in signature.parameters.items() if name not in sets]
    parameters += [option for kind in sets.values() for option in _options(kind)]

    @wraps(function)
    def called(**given: Any) -> Any:
        for name, kind in sets.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        return function(**given)

    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def _options(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(kind)
    ]

"""A user's reward function, named `package.module:function` or `path/to/file.py:function`.

A class is created once in each verifier process, with its options; its `__call__` is the function. It returns a number.
For the episode of an agent it may return a list with a number for each conversation. It is called with its options and
with those of these arguments that it has as parameters: text, answer (None if there is none), reference, prompt, task,
tokens, environment (its reward, None without one), conversations (those of an agent that are trained, the last first).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from infra.name_lookup import member_of

ARGUMENTS = ("text", "answer", "reference", "prompt", "task", "tokens", "environment", "conversations")


def load(target: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function `target`, to be called with all `ARGUMENTS`. Imports its module: call it in verifier processes only.

    Raises ValueError if it cannot be called with these and `options`, and whatever the import of the module raises.
    """
    module_name, _, function_name = target.rpartition(":")
    function: Any = member_of(module_name, function_name, "function", callable)
    if inspect.isclass(function):
        function, options = function(**options), {}
        if not callable(function):
            raise ValueError(f"{target} is a class without __call__(self, text, ...), which returns the reward")
    taken = _taken(target, function, options)
    return lambda **fields: function(**{name: fields[name] for name in taken}, **options)


def _taken(target: str, function: Callable[..., Any], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of `ARGUMENTS` the function takes. Raises ValueError."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return tuple(name for name in ARGUMENTS if name not in options)
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
    unknown = [name for name in options if name not in names]
    if unknown:
        raise ValueError(f"{target} takes no {unknown[0]!r}: its parameters are {', '.join(names)}")
    taken = tuple(name for name in names if name in ARGUMENTS and name not in options)
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"{target}: parameter {parameter.name!r} must be callable by name")
        if (
            parameter.default is parameter.empty
            and parameter.name in names
            and parameter.name not in (*taken, *options)
        ):
            raise ValueError(f"{target} needs {parameter.name!r}, which is neither an option nor one of {ARGUMENTS}")
    return taken

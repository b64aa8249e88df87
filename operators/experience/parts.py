"""The parts of a buffer by name: one of ours, or a class of the user's, `module:Class` or `file.py:Class`.

A user's class is code you trust: it runs in the experience pipeline's own process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from infra.name_lookup import import_user_module, suggest_name

T = TypeVar("T")


@dataclass(frozen=True)
class Component:
    """A part's name and the options that its class takes."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_custom(self) -> bool:
        """Whether it is a class of the user's."""
        return ":" in self.name


def make(what: str, part: Component, known: Mapping[str, type[T]], base: type[T]) -> T:
    """The `what` (as errors call it) that `part` names. Raises ValueError naming what does not fit."""
    kind = _load(what, part.name, base) if part.is_custom else known.get(part.name)
    if kind is None:
        raise ValueError(f"{what}: there is none called {part.name!r}{suggest_name(part.name, known)}")
    options = {option.name for option in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else None
    for name in part.options:
        if options is not None and name not in options:
            raise ValueError(f"{what}: {part.name} has no option {name!r}{suggest_name(name, options)}")
    try:
        return kind(**part.options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {part.name}: {error}") from error


def _load(what: str, name: str, base: type[T]) -> type[T]:
    module_name, _, class_name = name.rpartition(":")
    try:
        found = getattr(import_user_module(module_name), class_name, None)
    except (ImportError, OSError, ValueError) as error:
        raise ValueError(f"{what}: {name!r} cannot be loaded: {error}") from error
    if not isinstance(found, type) or not issubclass(found, base):
        raise ValueError(f"{what}: {name!r} must be a class that derives from {base.__module__}.{base.__qualname__}")
    return found

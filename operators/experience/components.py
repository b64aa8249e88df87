"""Writers, samplers and evictions by name: a built-in one, or a user's class, `module:Class` or `file.py:Class`.

A user's class must be trusted code: it runs in the process of the experience pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from infra.name_lookup import load_class, suggest_name

T = TypeVar("T")


@dataclass(frozen=True)
class Component:
    """The name of a writer, sampler or eviction, and the options for its class."""

    name: str
    """A built-in component, `module:Class` or `file.py:Class`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the component."""

    @property
    def is_custom(self) -> bool:
        """Whether it is a user's class."""
        return ":" in self.name


def make_component(key: str, component: Component, known: Mapping[str, type[T]], base: type[T]) -> T:
    """An instance of the class that `component` names. `key` is the configuration key for errors.

    Raises ValueError for an unknown name, an unknown option or a bad value.
    """
    kind = load_class(key, component.name, base) if component.is_custom else known.get(component.name)
    if kind is None:
        raise ValueError(f"{key}: there is none called {component.name!r}{suggest_name(component.name, known)}")
    options = {option.name for option in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else None
    for name in component.options:
        if options is not None and name not in options:
            raise ValueError(f"{key}: {component.name} has no option {name!r}{suggest_name(name, options)}")
    try:
        return kind(**component.options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: {component.name}: {error}") from error

"""The paths in a configuration, made absolute: roles and `laminar submit` read them from other working directories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.config import Config
from pipelines.config_paths import READ, TARGETS, WRITTEN, script_of
from pipelines.roles import ADMIN

_FILES = {*READ, *WRITTEN}
_NOT_READ = {*WRITTEN, "model.path"}


def with_absolute_paths(config: Config) -> Config:

    def absolute(key: str, text: Any) -> Any:
        if key in TARGETS:
            script = script_of(text)
            return f"{_absolute(script)}:{text.rpartition(':')[2]}" if script else text
        return text if not text or "://" in str(text) else _absolute(text)

    mapped: Config = map_paths(config, "", absolute)
    return mapped


def files_read(config: Config) -> list[tuple[str, Path]]:
    """The files that a run reads, except the model, each with its configuration key."""
    found: list[tuple[str, Path]] = []

    def collect(key: str, text: Any) -> Any:
        inherited = config.prompts.tasks and key.startswith("prompts.") and not key.startswith("prompts.tasks.")
        if (file := script_of(text) if key in TARGETS else text) and key not in _NOT_READ and not inherited:
            found.append((key.replace(".tasks.", ".").removesuffix(".name"), Path(file)))
        return text

    map_paths(replace(config, kafka=config.kafka.for_role(ADMIN)), "", collect)
    return found


def map_paths(value: Any, key: str, change: Callable[[str, Any], Any]) -> Any:
    """`value`, which stands at `key`, with the results of `change` in the place of its paths and hooks."""
    if isinstance(value, tuple):
        return tuple(map_paths(item, key, change) for item in value)
    if is_dataclass(value):
        before = {field.name: getattr(value, field.name) for field in fields(value)}
        after = {name: map_paths(each, f"{key}.{name}".lstrip("."), change) for name, each in before.items()}
        return value if after == before else replace(value, **after)  # type: ignore[type-var]
    return change(key, value) if key in _FILES or key in TARGETS else value


def _absolute(path: Any) -> Any:
    return type(path)(Path(path).expanduser().absolute())

"""What differs between two configurations, without what differs between any two runs."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.config import ConfigProblems, flattened, read_config
from pipelines.config_reference import settings

OWN = ("run.name", "run.folder", "relay.store", "kafka.bootstrap_servers")
"""Names and addresses that each run has for itself."""
PRESENT = "present"
"""The value of a table that only one of the configurations has."""


class Difference(NamedTuple):
    """`keys`: both values of each setting that differs; `own`: the keys of `OWN` that differ too."""

    keys: Mapping[str, tuple[Any, Any]]
    own: tuple[str, ...]


def difference_of_files(first: Path, second: Path) -> Difference:
    """What differs between two configuration files. Raises ConfigError."""
    drafts = [read_config(file) for file in (first, second)]
    if problems := [problem for draft in drafts for problem in draft.problems]:
        raise ConfigProblems(problems, "the configurations are not valid" if len(problems) > 1 else "")
    return difference(*(relative_to_run(flattened(each.config), each.config.run_folder) for each in drafts))


def relative_to_run(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`values` with paths in the run's `folder` as `RUN/...`: a warm start writes its model there."""
    inside = f"{folder}/"
    return {
        key: f"RUN/{value.removeprefix(inside)}" if isinstance(value, str) and value.startswith(inside) else value
        for key, value in values.items()
    }


def difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> Difference:
    """What differs between two flattened configurations.

    A table that only one of them has is one difference; of its settings those count that do not have their default.
    """
    keys: dict[str, tuple[Any, Any]] = {}
    defaults = _defaults()
    for key in {**first, **second}:
        one, other = first.get(key), second.get(key)
        if one == other or key in OWN:
            continue
        if (table := _table_of_one(key, first, second)) is not None:
            keys.setdefault(table, (PRESENT, None) if key in first else (None, PRESENT))
            if defaults.get(key) == (one if key in first else other):
                continue
        keys[key] = one, other
    return Difference(keys, tuple(key for key in OWN if first.get(key) != second.get(key)))


def _table_of_one(key: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    """The outermost table of `key` that one of both does not have; None if both have all."""
    missing = second if key in first else first
    if key in missing:
        return None
    names = key.split(".")[:-1]
    tables = (".".join(names[: depth + 1]) for depth in range(len(names)))
    return next((table for table in tables if not _has_table(table, missing)), None)


def _has_table(table: str, keys: Iterable[str]) -> bool:
    return any(key.startswith((f"{table}.", f"{table}[")) or key == table for key in keys)


def _defaults() -> dict[str, Any]:
    """The defaults by key; without those that are unset."""
    found = {}
    for key, setting in settings().items():
        try:
            found[key] = tomllib.loads(f"value = {setting.default}")["value"]
        except tomllib.TOMLDecodeError:
            continue
    return found

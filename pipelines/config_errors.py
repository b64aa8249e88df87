"""The errors of a configuration: unknown keys, and values of a wrong type."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args, get_type_hints

from infra.name_lookup import suggest_name


def unknown_keys(kind: type, table: Mapping[str, Any], origin: str, path: tuple[str, ...]) -> Iterator[str]:
    """The errors of the keys of `table`, at `path` of `origin`, that class `kind` does not have."""
    hints = get_type_hints(kind)
    valid = [f.name for f in dataclasses.fields(kind)]
    for name, value in table.items():
        dotted = ".".join((*path, name))
        if name not in valid:
            yield f"{origin}: unknown key {dotted}{suggest_name(name, valid)}"
            continue
        inner = next((t for t in (hints[name], *get_args(hints[name])) if dataclasses.is_dataclass(t)), None)
        if inner is None:
            continue
        rows: Iterable[Any] = value if isinstance(value, list) else [value]
        for row in rows:
            if isinstance(row, dict):
                yield from unknown_keys(inner, row, origin, (*path, name))  # type: ignore[arg-type]


def error_line(origin: str, problem: Mapping[str, Any]) -> str:
    """The error for `problem`, one of pydantic's, in `origin`."""
    where = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    shown = "" if isinstance(given, dict | list) else f" (it is {given!r})"
    return f"{origin}: {where}: {message}{shown}"

"""Settings in the form of release 0.2.0, and how to write them now: conditions of prompts, a replica's GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_ENDS = {"least": ">=", "below": "<"}


def old_conditions(prompts: Mapping[str, Any]) -> Iterator[str]:
    """How to write each condition of the section `prompts`, and of its tasks, that is a table."""
    tasks = prompts.get("tasks")
    for section in (prompts, *(tasks if isinstance(tasks, list) else ())):
        if not isinstance(section, Mapping):
            continue
        if isinstance(where := section.get("where"), Mapping):
            text = condition_text(where)
            yield f"where = {_quoted(text)}" if text else "no where at all"
        levels = section.get("levels")
        if isinstance(levels, list) and section.get("source", "reasoning_gym") != "reasoning_gym":
            tables = [level for level in levels if isinstance(level, Mapping)]
            if tables:
                yield f"levels = [{', '.join(_quoted(condition_text(level)) for level in tables)}]"


def old_gpus(rollout: object) -> str:
    """How to write `rollout.gpus` if it is a number, the form of release 0.2.0; else empty."""
    gpus = rollout.get("gpus") if isinstance(rollout, Mapping) else None
    return f"tensor_parallel = {gpus}" if isinstance(gpus, int) else ""


def condition_text(where: Mapping[str, Any]) -> str:
    """The condition of a table with a value, a list of values or a range for each column."""
    return " and ".join(part for column, wanted in where.items() for part in _comparisons(_name(column), wanted))


def _comparisons(column: str, wanted: Any) -> Iterator[str]:
    if isinstance(wanted, Mapping):
        yield from (f"{column} {_ENDS.get(end, end)} {_value(value)}" for end, value in wanted.items())
    elif isinstance(wanted, list | tuple):
        yield f"{column} in ({', '.join(map(_value, wanted))})"
    else:
        yield f"{column} = {_value(wanted)}"


def _name(column: str) -> str:
    return column if re.fullmatch(r"[^\W\d]\w*(\.\w+)*", column) else f"`{column}`"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else "'" + str(value).replace("'", "\\'") + "'"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

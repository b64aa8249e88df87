"""The table of a configuration file before its values are checked: unknown keys, and values from other sections."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, get_args, get_type_hints

from infra.name_lookup import nearest_name, suggest_name
from operators.rollout.environments.config import ENVIRONMENTS


class UnknownKey(NamedTuple):
    """`text` names the key and those that there are; `meant`: the setting that is probably meant, if it is not set."""

    text: str
    meant: str


def unknown_keys(kind: type, table: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[UnknownKey]:
    """The keys of `table`, which is of the class `kind`, and of the tables in it; `path` are those that lead to it."""
    hints = get_type_hints(kind)
    valid = [f.name for f in dataclasses.fields(kind)]
    for name, value in table.items():
        if name not in valid:
            near = nearest_name(name, valid)
            meant = ".".join((*path, near)) if near and near not in table else ""
            yield UnknownKey(f"unknown key {'.'.join((*path, name))}{suggest_name(name, valid)}", meant)
            continue
        inner = next((t for t in (hints[name], *get_args(hints[name])) if dataclasses.is_dataclass(t)), None)
        if inner is None:
            continue
        rows: Iterable[Any] = value if isinstance(value, list) else [value]
        for row in rows:
            if isinstance(row, dict):
                yield from unknown_keys(inner, row, (*path, name))  # type: ignore[arg-type]


def add_named_environments(table: dict[str, Any]) -> dict[str, Any]:
    """`table` with the built-in and `module:Class` environments that prompts name in `rollout.environments`."""
    prompts, rollout = table.get("prompts"), table.get("rollout", {})
    if not isinstance(prompts, dict) or not isinstance(rollout, dict):
        return table  # an error, which the validation reports
    given = rollout.get("environments") or []
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        return table
    tasks = prompts.get("tasks")
    sections = [prompts, *(tasks if isinstance(tasks, list) else [])]
    environments = list(given)
    renamed = []
    for section in sections:
        name = section.get("environment") if isinstance(section, dict) else None
        labels = {each.get("label") for each in environments}
        if isinstance(name, str) and (":" in name or (name in ENVIRONMENTS and name not in labels)):
            if not any(each.get("name") == name for each in environments):
                environments.append({"name": name})
            label = next(each.get("label") for each in environments if each.get("name") == name)
            section = {**section, "environment": label or name.rpartition(":")[2]}
        renamed.append(section)
    prompts = {**renamed[0], **({"tasks": renamed[1:]} if isinstance(tasks, list) else {})}
    return {
        **table,
        "prompts": prompts,
        **({"rollout": {**rollout, "environments": environments}} if environments else {}),
    }


def complete_tasks(section: dict[str, Any], kind: type) -> dict[str, Any]:
    """`section` with complete tasks: for each key of `kind` that a task does not set, it gets the section's value."""
    if not isinstance(section.get("tasks"), list):
        return section
    keys = {field.name for field in dataclasses.fields(kind)} - {"name", "weight"}
    shared = {name: value for name, value in section.items() if name in keys}
    return {**section, "tasks": [{**shared, **row} if isinstance(row, dict) else row for row in section["tasks"]]}


def without_inherited(errors: Iterable[Mapping[str, Any]], table: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """`errors` without the repetitions for tasks that have inherited a wrong value: in `table` they do not set it."""
    seen: list[tuple[Any, ...]] = []
    for error in errors:
        section, *place = error["loc"] or ("",)
        of_task = place[:1] == ["tasks"] and len(place) > 1
        within = tuple(place[2:] if of_task else place)
        named = {*within[:1]} or set(re.findall(r"\w+", error["msg"]))
        has_tables = of_task and all(isinstance(task, dict) for task in table[section]["tasks"])
        own = named & table[section]["tasks"][place[1]].keys() if has_tables else named
        signature = (section, within, error["msg"])
        if own or signature not in seen:
            yield error
        seen.append(signature)

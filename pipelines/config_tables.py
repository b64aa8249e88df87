"""Completion of a configuration's tables before they are validated."""

from __future__ import annotations

import dataclasses
from typing import Any


def add_named_environments(table: dict[str, Any]) -> dict[str, Any]:
    """`table` with the environments that prompts name by `module:Class` in `rollout.environments`, with defaults."""
    prompts, rollout = table.get("prompts"), table.get("rollout", {})
    if not isinstance(prompts, dict) or not isinstance(rollout, dict):
        return table  # an error, which the validation reports
    tasks = prompts.get("tasks")
    sections = [prompts, *(tasks if isinstance(tasks, list) else [])]
    environments = list(rollout.get("environments") or [])
    renamed = []
    for section in sections:
        name = section.get("environment") if isinstance(section, dict) else None
        if isinstance(name, str) and ":" in name:
            if not any(isinstance(each, dict) and each.get("name") == name for each in environments):
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

"""Entries of reasoning-gym that went through JSON, as the verifiers of the library expect them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WITH_TUPLES = frozenset({"arc_agi", "rearc"})
"""Tasks (0.1.25) whose verifiers distinguish tuples, which JSON does not have, from lists."""


def restored_entry(task: str, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of `task` that JSON decoded, with tuples where its verifier needs them."""
    return {name: _with_tuples(value) for name, value in entry.items()} if task in WITH_TUPLES else entry


def _with_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    return {name: _with_tuples(part) for name, part in value.items()} if isinstance(value, dict) else value

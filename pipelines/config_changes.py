"""Changes of a configuration on the command line (`--set`)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Sequence
from typing import Any


def apply_change(table: dict[str, Any], change: str) -> None:
    """Set a key of `table`, by "section.key=value" with a TOML value or bare words. Raises ValueError."""
    name, equals, text = change.partition("=")
    if not equals or not name:
        raise ValueError(f"--set {change!r}: expected section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *path, last = name.strip().split(".")
    place: Any = table
    for end, part in enumerate(path, 1):
        if isinstance(place, list) or (part.isdigit() and not place):
            place = _item(place or [], part, change, path[: end - 1])
        else:
            place = place.setdefault(part, {})
        if not isinstance(place, dict | list):
            raise ValueError(f"--set {change!r}: {'.'.join(path[:end])} is not a section")
    if isinstance(place, list):
        raise ValueError(
            f"--set {change!r}: {'.'.join(path)} is a list: set a key of one item, as {'.'.join(path)}.0.{last}, or "
            f'the whole list, as {".".join(path)}=[{{name="...", {last}=...}}]'
        )
    place[last] = value


def is_about_a_change(where: str, message: str, changed: Collection[str]) -> bool:
    """Whether an error at `where` is about one of the keys `changed`, or a part of it; a section's names its keys."""
    names = {name for section, _, name in (key.rpartition(".") for key in changed) if section == where}
    within = any(f"{where}.".startswith(f"{key}.") for key in changed)
    return within or not names.isdisjoint(re.findall(r"\w+", message))


def _item(items: list[Any], number: str, change: str, path: Sequence[str]) -> Any:
    """Item `number`, counted from 0, of the list at `path`. Raises ValueError."""
    if number.isdigit() and int(number) < len(items):
        return items[int(number)]
    known = f"has {len(items)} items, counted from 0" if items else "has no items in the file"
    raise ValueError(
        f'--set {change!r}: {".".join(path)} {known}: set the whole list, as {".".join(path)}=[{{name="...", ...}}]'
    )

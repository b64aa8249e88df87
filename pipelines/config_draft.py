"""A configuration as far as its settings are valid: a wrong one is a problem, and the rest keeps its values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

WHOLE = ""
"""The name of a whole configuration among the settings that are replaced."""
_NAME = re.compile(r"\w+(?:\.\w+)*")
Location = Sequence[Any]


class ValidPart(NamedTuple):
    """`value` has the default of each setting in `replaced` (dotted names, without numbers of items), which is wrong.

    `errors` are those of pydantic. One that is there only because of a default is not among them.
    """

    value: Any
    errors: Sequence[Mapping[str, Any]]
    replaced: frozenset[str]


def valid_part(kind: type, table: Mapping[str, Any], misspelt: Iterable[str] = ()) -> ValidPart:
    """`kind` with the values of `table`, without the wrong ones. Settings `misspelt` are replaced, too.

    A dataclass stops at the first value that it refuses, so the table is validated again without this value.
    """
    rest, replaced = deepcopy(dict(table)), set(misspelt)
    reported: list[Mapping[str, Any]] = []
    first = True
    while True:
        value, errors = _validate(kind, rest)
        if not errors:
            return ValidPart(value, reported, frozenset(replaced))
        before, known = deepcopy(rest), frozenset(replaced)
        for error in errors:
            place, is_known = _culprit(kind, before, error)
            is_of_type = error["type"] not in ("value_error", "missing")  # of what the table has, not of a default
            if is_of_type or ((first or is_known) and not _is_about(error, known)):
                reported.append(error)
            _remove(rest, place)
            replaced.add(_dotted(place))
        first = False


def names_any(problem: str, settings: Iterable[str]) -> bool:
    """Whether `problem` names one of `settings`, as errors do: by the whole name, or in an error of its section."""
    line = problem.partition("\n")[0].replace(".tasks.", ".")  # a traceback may follow
    names = set(_NAME.findall(line))
    for setting in (each.replace(".tasks.", ".") for each in settings):
        section, _, name = setting.rpartition(".")
        of_section = line.startswith((f"{section}:", f"{section}.", f"{section},")) or not section
        whole = any(f"{each}.".startswith(f"{setting}.") for each in names if section or "." in each)
        if setting == WHOLE or whole or (section and name in names and (of_section or "_" in name)):
            return True
        if not section and (line.startswith((f"{setting}:", f"{setting},")) or f"[{setting}]" in line):
            return True
    return False


@cache
def adapter(kind: type) -> TypeAdapter[Any]:
    """Validates the dataclass `kind` and dumps it. To build it for a configuration takes ten times as long as a use."""
    return TypeAdapter(kind)


def _validate(kind: type, table: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    try:
        # TOML values are typed, so validation is strict; in JSON mode a strict validator accepts lists for tuples.
        return adapter(kind).validate_json(json.dumps(table, default=str), strict=True), []
    except ValidationError as error:
        return None, error.errors()


def _culprit(kind: type, table: Mapping[str, Any], error: Mapping[str, Any]) -> tuple[Location, bool]:
    """The place of `table` to remove so that `error` ends, and whether it is known to be that of a wrong setting.

    The error of a whole section names its settings; which of them is wrong, a trial without each shows.
    """
    place = _outside_lists(_given(table, error["loc"]))
    if error["type"] != "value_error" or not isinstance(_at(table, place), dict | list):
        return place, True
    place = _given(table, error["loc"])
    names = _NAME.findall(error["msg"])
    within = _places(_at(table, place), place)
    named = {each: at for each in within if (at := _position(each, names)) is not None}
    removable: Location | None = None
    for each in sorted(named, key=named.__getitem__):
        without = deepcopy(dict(table))
        _remove(without, each)
        left = [(other["loc"], other["msg"]) for other in _validate(kind, without)[1]]
        if (error["loc"], error["msg"]) not in left:
            removable = removable or each
            if all(loc != error["loc"] for loc, _ in left):
                return each, True
    return (_outside_lists(place), False) if removable is None else (removable, True)


def _position(place: Location, names: Sequence[str]) -> int | None:
    """Where `names` has the setting at `place`, by its whole name or its last part; None if it does not."""
    return next((at for at, name in enumerate(names) if name in (place[-1], _dotted(place))), None)


def _is_about(error: Mapping[str, Any], replaced: Iterable[str]) -> bool:
    """Whether `error` names one of `replaced`: of other sections by the whole name alone, not by its last part."""
    place = _dotted(error["loc"])
    sections = {"", place, place.rpartition(".")[0]}
    own = [each for each in replaced if not place or each.rpartition(".")[0] in sections or each in error["msg"]]
    return names_any(f"{place}: {error['msg'].removeprefix('Value error, ')}", own)


def _given(table: Any, location: Location) -> Location:
    """The part of `location` that `table` has."""
    place: list[Any] = []
    for part in location:
        if part not in (table if isinstance(table, dict) else range(len(table)) if isinstance(table, list) else ()):
            break
        table = table[part]
        place.append(part)
    return tuple(place)


def _outside_lists(place: Location) -> Location:
    """`place`, or the list that it is an item of: the other items keep their numbers."""
    while place and isinstance(place[-1], int):
        place = place[:-1]
    return place


def _at(table: Any, place: Location) -> Any:
    for part in place:
        table = table[part]
    return table


def _places(value: Any, place: Location = ()) -> Iterator[Location]:
    """The places of the settings in `value`, which is at `place`, and of the tables in it."""
    is_rows = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    for part, item in value.items() if isinstance(value, dict) else enumerate(value) if is_rows else ():
        if isinstance(part, str):
            yield (*place, part)
        yield from _places(item, (*place, part))


def _remove(table: dict[str, Any], place: Location) -> None:
    if not place:
        table.clear()
    elif _given(table, place) == tuple(place):
        del _at(table, place[:-1])[place[-1]]


def _dotted(place: Location) -> str:
    return ".".join(part for part in place if isinstance(part, str))

"""Records in kcat's formats: its format strings (`-f`) and its JSON envelope (`-J`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from infra.escaping import escape_to_one_line
from pipelines.present.output import compact

Item = Mapping[str, Any]
"""A record as yielded by `record_text.as_items`."""

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "0": "\0"}
_PARTS: Mapping[str, Callable[[Item], Any]] = {
    "t": lambda item: item["topic"],
    "p": lambda item: item["partition"],
    "o": lambda item: item["offset"],
    "k": lambda item: "" if item["key"] is None else item["key"],
    "K": lambda item: -1 if item["key"] is None else len(item["key"].encode()),
    "s": lambda item: payload(item),
    "v": lambda item: payload(item),
    "S": lambda item: item["size"],
    "T": lambda item: item["ts"],
    "h": lambda item: ",".join(f"{name}={value}" for name, value in item["headers"].items()),
    "%": lambda item: "%",
}
_PIECE = re.compile(r"%(.?)|\\(.)")


def payload(item: Item) -> str:
    """Return the decoded record as JSON: one row, or a list of several; "" if it cannot be decoded."""
    if item["error"] is not None:
        return ""
    rows = item["rows"]
    return compact(rows[0] if len(rows) == 1 else rows)


def envelope(item: Item) -> dict[str, Any]:
    """Return kcat's JSON envelope; its payload is a string that contains JSON."""
    return {
        "topic": item["topic"],
        "partition": item["partition"],
        "offset": item["offset"],
        "tstype": "create",
        "ts": item["ts"],
        "broker": -1,
        "headers": [part for header in item["headers"].items() for part in header],
        "key": item["key"],
        "payload": None if item["error"] is not None else payload(item),
    }


def formatter(text: str) -> Callable[[Item], str]:
    r"""Return a formatter of kcat's `-f` format: %t %p %o %k %s (or %v) %S %K %h %T %%, \n, \t. Raises ValueError."""
    for found in _PIECE.finditer(text):
        if found[1] is not None and found[1] not in _PARTS:
            raise ValueError(f"%{found[1]} is not a format; the formats are {' '.join(f'%{name}' for name in _PARTS)}")
    text = text.removesuffix("\\n")  # the printer ends the line

    def line(item: Item) -> str:
        def piece(found: re.Match[str]) -> str:
            if found[1] is None:
                return _ESCAPES.get(found[2], found[0])
            return escape_to_one_line(str(_PARTS[found[1]](item)))

        return _PIECE.sub(piece, text)

    return line

"""JSON texts that others wrote: a model, an agent, another process. What a reader cannot handle is a ValueError."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 64
"""Maximum of nested lists and objects."""
_TOO_DEEP = f"lists and objects are nested more than {MAX_DEPTH} deep"
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def decode_json(text: str | bytes | bytearray) -> Any:
    """The value of `text`.

    Raises ValueError if it is not valid JSON, is nested more deeply than `MAX_DEPTH`, so that encoding it again could
    exceed the recursion limit, or has half of a surrogate pair, which no UTF-8 text can have.
    """
    if not isinstance(text, str):
        text = text.decode()
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    _check_depth(value)
    if _HALF_CHARACTER.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for each in level
            if isinstance(each, list | dict)
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, list | dict)
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)

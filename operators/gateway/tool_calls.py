"""Tool calls in the text of a response, by the formats of the model families. Pure functions.

The recorded tokens stay as they are; a call that cannot be parsed stays in the content.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from infra.json_text import decode_json

_OPEN = "<tool_call>"  # Hermes, Qwen
_CLOSE = re.compile(r"(?<=\})\s*</tool_call>")
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"  # Llama


class ParsedResponse(NamedTuple):
    """The content of a response without its tool calls, and the calls in OpenAI's shape."""

    content: str
    tool_calls: list[dict[str, Any]]


def parse_response(text: str, tools: Sequence[Mapping[str, Any]], turn_id: str = "") -> ParsedResponse:
    """The calls of `tools` in `text`; without tools, or without a valid call, all of it is content.

    Ids of calls follow from `turn_id`, so that a repeated request gets the same ones.
    """
    names = {tool["function"]["name"] for tool in tools}
    if not names:
        return ParsedResponse(text, [])
    content, found = _calls_in(text.strip())
    calls = [call for each in found if (call := _call(each, names)) is not None]
    if not calls or len(calls) < len(found):
        return ParsedResponse(text, [])
    made = [
        {"id": _id(turn_id, at), "type": "function", "function": {"name": name, "arguments": arguments}}
        for at, (name, arguments) in enumerate(calls)
    ]
    return ParsedResponse(content, made)


def _calls_in(text: str) -> tuple[str, list[Any]]:
    """The text beside the calls, and the calls as JSON values."""
    if _OPEN in text:
        return _tagged_calls_in(text)
    before, tag, after = text.partition(_MISTRAL)
    if tag:
        value = _json(after.strip())
        return before.strip(), value if isinstance(value, list) else [value]
    text = text.removeprefix(_PYTHON_TAG).strip()
    if text.startswith("{") and text.endswith("}"):
        return "", [_json(text)]
    return text, []


def _tagged_calls_in(text: str) -> tuple[str, list[Any]]:
    """As `_calls_in`, for calls in tags; what is after a tag that is not closed is content.

    Each character is read once: the text is a model's, and may repeat a tag thousands of times.
    """
    content, found, at = [], [], 0
    while (opened := text.find(_OPEN, at)) >= 0 and (closed := _CLOSE.search(text, opened)) is not None:
        content.append(text[at:opened])
        found.append(_json(text[opened + len(_OPEN) : closed.start()]))
        at = closed.end()
    return "".join([*content, text[at:]]).strip(), found


def _json(text: str) -> Any:
    try:
        return decode_json(text)
    except ValueError:
        return None


def _call(value: Any, names: set[str]) -> tuple[str, str] | None:
    """Name and arguments (JSON text) of a call of one of `names`; None if it is not one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return value["name"], arguments
    return (value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _id(turn_id: str, at: int) -> str:
    """Nine letters and digits: Mistral's templates reject other ids."""
    return hashlib.blake2b(f"{turn_id}\0{at}".encode()).hexdigest()[:9]


def cut_at_stop(text: str, stop_strings: Sequence[str]) -> str:
    """`text` before the first of `stop_strings`."""
    found = [at for string in stop_strings if (at := text.find(string)) >= 0]
    return text[: min(found)] if found else text


def possible_stop(text: str, stop_strings: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string."""
    begun = (size for string in stop_strings for size in range(1, len(string)) if text.endswith(string[:size]))
    return max(begun, default=0)

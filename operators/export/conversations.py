"""The view `conversations`: the episodes of agents, one row for each trained conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

MESSAGES = pa.list_(
    pa.struct(
        [("role", pa.utf8()), ("content", pa.utf8()), ("tool_calls", pa.utf8()), ("tool_call_id", pa.utf8())],
    )
)
"""Messages in the shape of OpenAI's API; `tool_calls` is JSON."""
COLUMNS: tuple[tuple[str, pa.DataType], ...] = (
    ("trajectory_id", pa.utf8()),
    ("conversation", pa.int64()),
    ("messages", MESSAGES),
    ("token_ids", pa.list_(pa.int32())),
    ("mask", pa.list_(pa.bool_())),
    ("logprobs", pa.list_(pa.float32())),
    ("prompt_tokens", pa.int64()),
    ("reward", pa.float64()),
    ("task", pa.utf8()),
    ("group_id", pa.utf8()),
    ("policy_version", pa.int64()),
    ("purpose", pa.utf8()),
)
_OF_TRAJECTORY = ("trajectory_id", "reward", "task", "group_id", "policy_version", "purpose")


def conversation_rows(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The conversations of the full rows `table`, in the columns of `schema`: COLUMNS, and the position in the log."""
    rows = [row for trajectory in table.to_pylist() for row in _rows(trajectory, schema)]
    return pa.Table.from_pylist(rows, schema)


def _rows(trajectory: dict[str, Any], schema: pa.Schema) -> Iterator[dict[str, Any]]:
    prompt, response = trajectory["prompt_token_ids"], trajectory["completion_token_ids"]
    masks, logprobs = trajectory["completion_mask"], trajectory["completion_logprobs"]
    before_release = {"start": 0, "prompt_tokens": len(prompt), "messages": ""}  # such records have no conversations
    conversations = trajectory["conversations"] or [before_release]
    ends = [each["start"] for each in conversations[1:]] + [len(response)]
    shared = {name: trajectory[name] for name in schema.names if name in _OF_TRAJECTORY or name.startswith("kafka_")}
    for number, (each, end) in enumerate(zip(conversations, ends, strict=True)):
        own, before = slice(each["start"], end), [] if number else prompt
        yield {
            **shared,
            "conversation": number,
            "messages": [_message(message) for message in json.loads(each["messages"] or "[]")],
            "token_ids": [*before, *response[own]],
            "mask": [*[False] * len(before), *masks[own]],
            "logprobs": [*[0.0] * len(before), *logprobs[own]],
            "prompt_tokens": each["prompt_tokens"],
        }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    content, calls = message.get("content"), message.get("tool_calls")
    return {
        "role": message.get("role"),
        "content": content if content is None or isinstance(content, str) else json.dumps(content, ensure_ascii=False),
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
        "tool_call_id": message.get("tool_call_id"),
    }

"""The Responses API of OpenAI in terms of chat completions: the part of it that agents use. Pure functions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from infra.models.conversations import ChatMessage, ConversationFormat
from operators.gateway.chat_api import ChatRequest, StreamedTurn, parse_chat, response_message, streamable_text
from operators.gateway.errors import ApiError, invalid
from operators.gateway.play import RecordedResponse, TurnOptions

_IGNORED = ("reasoning",)
"""Types of input items that are dropped."""


def parse_responses(body: Any) -> ChatRequest:
    """The request in `body` as a chat. Raises ApiError."""
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    if body.get("previous_response_id") is not None or body.get("conversation") is not None:
        raise invalid("responses are not stored for later requests: send the whole input", "previous_response_id")
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise invalid("input must be text or a list of at least one item", "input")
    messages = messages_of(items)
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": str(body["instructions"])})
    form = body.get("text")
    chat = {
        "model": body.get("model"),
        "messages": messages,
        "tools": _chat_tools(body.get("tools") or []),
        "tool_choice": body.get("tool_choice"),
        "max_tokens": body.get("max_output_tokens"),
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "stream": body.get("stream"),
        "response_format": form.get("format") if isinstance(form, dict) else None,
    }
    return parse_chat(chat)


def messages_of(items: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages that input `items` stand for; the calls of one response become one message. Raises ApiError."""
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        if not isinstance(item, dict):
            raise invalid(f"input[{at}] must be an object", f"input[{at}]")
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments") or "{}"},
            }
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind not in _IGNORED:
            raise invalid(f"input[{at}] has type {str(kind)[:40]!r}, which is not supported", f"input[{at}]")
    return messages


def response_body(
    request: ChatRequest, turn: TurnOptions, response: RecordedResponse, form: ConversationFormat, created: int
) -> dict[str, Any]:
    """The body of a complete response."""
    cut = response.finish_reason == "length"
    output = output_items(turn, response_message(form, turn, response.token_ids))
    return {
        **_head(request, turn, created),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output,
        "usage": {
            "input_tokens": response.prompt_tokens,
            "input_tokens_details": {"cached_tokens": response.cached_tokens},
            "output_tokens": len(response.token_ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": response.prompt_tokens + len(response.token_ids),
        },
    }


def output_items(turn: TurnOptions, message: ChatMessage) -> list[dict[str, Any]]:
    """The items of a response: its text, and its tool calls."""
    items: list[dict[str, Any]] = []
    if message.get("content") or not message.get("tool_calls"):
        text: dict[str, Any] = {"type": "output_text", "text": message.get("content") or "", "annotations": []}
        items.append(_message_item(turn, "completed", [text]))
    for call in message.get("tool_calls", ()):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    return items


async def response_events(streamed: StreamedTurn, responses: AsyncIterator[RecordedResponse]) -> AsyncIterator[str]:
    """The events of a stream. Text that may become a tool call is held back."""
    request, turn, form, created = streamed
    number = 0

    def event(kind: str, **fields: Any) -> str:
        nonlocal number
        number += 1
        return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number - 1, **fields})}\n\n"

    head = {**_head(request, turn, created), "status": "in_progress", "output": []}
    item_id = _message_item(turn, "", [])["id"]
    place = {"item_id": item_id, "output_index": 0, "content_index": 0}
    yield event("response.created", response=head)
    sent, last, opened = "", None, False
    try:
        async for response in responses:
            last = response
            message = response_message(form, turn, response.token_ids) if response.finish_reason else None
            if message is None and request.calls:
                continue
            if message is None:
                text = streamable_text(form, turn, response.token_ids)
            else:
                text = message.get("content") or ""
                if message.get("tool_calls") and not text:
                    continue
            if not opened:
                opened = True
                yield event("response.output_item.added", output_index=0, item=_message_item(turn, "in_progress", []))
                part = {"type": "output_text", "text": "", "annotations": []}
                yield event("response.content_part.added", **place, part=part)
            if len(text) > len(sent) and text.startswith(sent):
                yield event("response.output_text.delta", **place, delta=text[len(sent) :], logprobs=[])
                sent = text
    except ApiError as error:
        yield event("error", message=str(error), code=error.code, param=error.param)
        return
    assert last is not None
    body = response_body(request, turn, last, form, created)
    for index, item in enumerate(body["output"]):
        if item["type"] == "message":
            (part,) = item["content"]
            yield event("response.output_text.done", **place, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **place, part=part)
        else:
            started = {**item, "arguments": "", "status": "in_progress"}
            yield event("response.output_item.added", output_index=index, item=started)
            where = {"item_id": item["id"], "output_index": index}
            yield event("response.function_call_arguments.delta", **where, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield event("response.function_call_arguments.done", **where, **done)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.incomplete" if body["status"] == "incomplete" else "response.completed", response=body)


def _head(request: ChatRequest, turn: TurnOptions, created: int) -> dict[str, Any]:
    return {
        "id": f"resp_{turn.turn_id}",
        "object": "response",
        "created_at": created,
        "model": request.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }


def _message_item(turn: TurnOptions, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "type": "message",
        "id": f"msg_{turn.turn_id}",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _chat_tools(tools: Any) -> list[dict[str, Any]]:
    """Function tools in the shape of chat completions. Raises ApiError for others."""
    made = []
    for tool in tools if isinstance(tools, list) else [None]:
        if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise invalid("tools must be a list of functions with names: other tools are not supported", "tools")
        made.append({"type": "function", "function": {name: tool[name] for name in tool if name != "type"}})
    return made

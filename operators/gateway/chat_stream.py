"""Streams of chat completions: server-sent events of the response as it is recorded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from infra.models.conversations import ConversationFormat
from operators.gateway.chat_api import ChatRequest, choice_of, response_message, streamable_text, usage_of
from operators.gateway.errors import ApiError
from operators.gateway.play import Response, TurnOptions


async def chat_chunks(
    request: ChatRequest,
    turn: TurnOptions,
    responses: AsyncIterator[Response],
    form: ConversationFormat,
    created: int,
) -> AsyncIterator[str]:
    """The events of a stream. Text that may become a stop string or a tool call is held back."""
    base = {
        "id": f"chatcmpl-{turn.turn_id}",
        "object": "text_completion" if request.legacy else "chat.completion.chunk",
        "created": created,
        "model": request.model,
    }

    def event(delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> str:
        part = {"text": delta.get("content", "")} if request.legacy else {"delta": delta}
        choice = {"index": 0, **part, "logprobs": logprobs, "finish_reason": reason}
        return f"data: {json.dumps({**base, 'choices': [choice]})}\n\n"

    sent, last = "", None
    if not request.legacy:
        yield event({"role": "assistant", "content": ""})
    try:
        async for response in responses:
            last = response
            if response.finish_reason or request.tools:
                continue
            text = streamable_text(form, turn, response.token_ids)
            if len(text) > len(sent) and text.startswith(sent):
                yield event({"content": text[len(sent) :]})
                sent = text
    except ApiError as error:
        yield f"data: {json.dumps(error.body())}\n\n"
        return
    assert last is not None
    message = response_message(form, turn, last.token_ids)
    choice = choice_of(request, 0, message, last, form)
    rest = (message.get("content") or "")[len(sent) :]
    if rest or choice["logprobs"]:
        yield event({"content": rest}, logprobs=choice["logprobs"])
    for at, call in enumerate(message.get("tool_calls", ())):
        yield event({"tool_calls": [{"index": at, **call}]})
    yield event({}, choice["finish_reason"])
    if request.include_usage:
        yield f"data: {json.dumps({**base, 'choices': [], 'usage': usage_of([last])})}\n\n"
    yield "data: [DONE]\n\n"

"""Chat completions in the shape of OpenAI's API: requests are checked here, and responses and streams are made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from infra.models.conversations import UNFINISHED, ChatMessage, ConversationFormat, content_of
from operators.gateway.conversation import digests_of
from operators.gateway.errors import ApiError, invalid
from operators.gateway.play import RecordedResponse, TurnOptions, stops_of
from operators.gateway.tool_calls import cut_at_stop, parse_response, possible_stop
from schemas.records import TurnRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_CHOICES = 16
MAX_MESSAGES = 4096
MAX_TOKENS = 2**31


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request. `digest` stands for messages and tools, `options_digest` for all that shapes the response.

    `calls`: whether the response may call tools; if not, its text is all content.
    """

    model: str
    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]]
    calls: bool
    max_tokens: int
    stop_strings: tuple[str, ...]
    choices: int
    stream: bool
    include_usage: bool
    logprobs: bool
    digest: str
    options_digest: str
    temperature: float = 1.0
    top_p: float = 1.0
    """The sampling, which only requests of people choose."""
    legacy: bool = False
    """Whether it came as a completion of text, not as a chat."""

    def turn(self, choice: int, occurrence: str) -> TurnOptions:
        """The turn of a choice. `occurrence` distinguishes equal requests of the same agent process."""
        turn_id = f"{self.options_digest}#{occurrence}.{choice}"
        tools = json.dumps(self.tools if self.calls else [], ensure_ascii=False)
        return TurnOptions(turn_id, self.digest, self.max_tokens, self.stop_strings, tools, self.stream)


def parse_chat(body: Any) -> ChatRequest:
    """The request in `body`. Raises ApiError."""
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages must be a list of at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise invalid(f"{len(messages)} messages are more than {MAX_MESSAGES}", "messages")
    for at, message in enumerate(messages):
        _check_message(at, message)
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(_is_call(tool) and tool.get("type") == "function" for tool in tools):
        raise invalid("tools must be a list of functions with names", "tools")
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        reason = f'tool_choice must be "auto" or "none", not {repr(choice)[:80]}: the engine cannot constrain responses'
        raise invalid(reason, "tool_choice")
    return _request(body, messages, tools, calls=bool(tools) and choice == "auto")


def parse_completion(body: Any) -> ChatRequest:
    """The request for a completion of text in `body`: a conversation with one message. Raises ApiError."""
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str) or not prompt:
        raise invalid("prompt must be one text that is not empty", "prompt")
    for name, value in (("echo", False), ("suffix", ""), ("best_of", body.get("n") or 1)):  # which have no effect
        if body.get(name) not in (None, value):
            raise invalid(f"{name} = {repr(body[name])[:40]} is not supported: leave it out", name)
    return _request(body, [{"role": "prompt", "content": prompt}], [], legacy=True)


def _request(
    body: dict[str, Any],
    messages: list[Any],
    tools: list[Any],
    *,
    calls: bool = False,
    legacy: bool = False,
) -> ChatRequest:
    form = body.get("response_format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") != "text":
        raise invalid("response_format must be text: the engine cannot constrain responses", "response_format")
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    most = _integer(body, name, MAX_TOKENS, 1, MAX_TOKENS)
    choices = _integer(body, "n", 1, 1, MAX_CHOICES)
    stops = stops_of(body.get("stop"))
    stream_options = body.get("stream_options") or {}
    wanted = body.get("logprobs")  # of completions a number of alternatives, which may be 0
    digest = digests_of(messages, tools)[-1]
    shape = json.dumps([digest, most, stops, calls], ensure_ascii=False)
    return ChatRequest(
        model=str(body.get("model") or "laminar"),
        messages=messages,
        tools=tools,
        calls=calls,
        max_tokens=most,
        stop_strings=stops,
        choices=choices,
        stream=bool(body.get("stream")),
        include_usage=isinstance(stream_options, dict) and bool(stream_options.get("include_usage")),
        logprobs=bool(wanted) or (legacy and wanted is not None and wanted is not False),
        digest=digest,
        temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
        top_p=max(_number(body, "top_p", 1.0, 0.0, 1.0), 1e-6),  # with 0, the likeliest token
        options_digest=hashlib.blake2b(shape.encode(), digest_size=16).hexdigest(),
        legacy=legacy,
    )


def response_message(
    form: ConversationFormat, turn: TurnOptions | TurnRequest, token_ids: Sequence[int]
) -> dict[str, Any]:
    """The message of a response, in OpenAI's shape. A stop string is not part of it."""
    if tools := json.loads(turn.tools):
        marked = cut_at_stop(form.marked_text_of(token_ids), turn.stop_strings)
        parsed = parse_response(marked, tools, turn.turn_id)
        if parsed.tool_calls:
            return {"role": "assistant", "content": parsed.content or None, "tool_calls": parsed.tool_calls}
    return {"role": "assistant", "content": cut_at_stop(form.text_of(token_ids), turn.stop_strings)}


def streamable_text(form: ConversationFormat, turn: TurnOptions, token_ids: Sequence[int]) -> str:
    """The text of an incomplete response up to a stop string, without its end that may change: half a character, or the
    beginning of a stop string."""
    text = cut_at_stop(form.text_of(token_ids).rstrip(UNFINISHED), turn.stop_strings)
    return text[: len(text) - possible_stop(text, turn.stop_strings)]


def choice_of(
    request: ChatRequest, index: int, message: Mapping[str, Any], response: RecordedResponse, form: ConversationFormat
) -> dict[str, Any]:
    """One choice of a completion."""
    reason = "tool_calls" if message.get("tool_calls") else response.finish_reason
    if request.legacy:
        text = message["content"]
        logprobs = _completion_logprobs(response, text, form) if request.logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
    logprobs = _logprobs(response, form) if request.logprobs else None
    return {"index": index, "message": dict(message), "logprobs": logprobs, "finish_reason": reason}


def completion_of(
    request: ChatRequest, completion_id: str, created: int, choices: list[dict[str, Any]], usage: Mapping[str, Any]
) -> dict[str, Any]:
    """The body of a response."""
    kind = "text_completion" if request.legacy else "chat.completion"
    return {
        "id": completion_id,
        "object": kind,
        "created": created,
        "model": request.model,
        "choices": choices,
        "usage": usage,
    }


def usage_of(responses: Sequence[RecordedResponse]) -> dict[str, Any]:
    """The tokens of a request's choices; the prompt counts once."""
    prompt, drawn = responses[0].prompt_tokens, sum(len(each.token_ids) for each in responses)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
        "prompt_tokens_details": {"cached_tokens": responses[0].cached_tokens},
    }


def _logprobs(response: RecordedResponse, form: ConversationFormat) -> dict[str, Any]:
    content = []
    for token_id, logprob in zip(response.token_ids, response.logprobs, strict=True):
        text = str(form.tokenizer.decode([token_id]))
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content, "refusal": None}


def _completion_logprobs(response: RecordedResponse, text: str, form: ConversationFormat) -> dict[str, Any]:
    """In the shape of completions; `text_offset` is the first character of each token in `text`, its length for tokens
    beyond it, as those of a stop string are."""
    tokens = [str(form.tokenizer.decode([token_id])) for token_id in response.token_ids]
    offsets = [min(offset, len(text)) for offset in form.offsets_of(response.token_ids)]
    return {"tokens": tokens, "token_logprobs": response.logprobs, "top_logprobs": None, "text_offset": offsets}


def _integer(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(f"{name} must be an integer from {low} to {high}, not {repr(value)[:40]}", name)
    return value


def _number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise invalid(f"{name} must be a number from {low:g} to {high:g}, not {repr(value)[:40]}", name)
    return float(value)


def _check_message(at: int, message: Any) -> None:
    where = f"messages[{at}]"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise invalid(f"{where} must be an object with a role, one of {', '.join(ROLES)}", where)
    try:
        content_of(message)
    except ValueError as error:
        raise invalid(f"{where}: {error}", where) from error
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise invalid(f"{where}.tool_calls must be a list of function calls with name and arguments", where)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


class StreamedTurn(NamedTuple):
    """A turn whose response is sent in parts; `created` is in Unix seconds."""

    request: ChatRequest
    turn: TurnOptions
    form: ConversationFormat
    created: int


async def chat_chunks(streamed: StreamedTurn, responses: AsyncIterator[RecordedResponse]) -> AsyncIterator[str]:
    """The events of a stream. Text that may become a stop string or a tool call is held back."""
    request, turn, form, created = streamed
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
            if response.finish_reason or request.calls:
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

"""Which recorded tokens a request continues: pure functions of messages and of the recorded conversations.

Each prefix of a conversation has a digest. The digests of requests and of responses lead to their recorded tokens, so a
request that extends what was said reuses them; any other request begins a branch where it leaves what was said.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infra.json_text import decode_json
from infra.models.conversations import ChatMessage, ConversationFormat, content_of
from schemas.records import TokenRange


@dataclass(frozen=True, slots=True)
class RecordedPrefix:
    """The recorded tokens of a prefix of a conversation, the last of which is `last_token`."""

    ranges: tuple[TokenRange, ...]
    last_token: int


@dataclass(slots=True)
class RecordedConversations:
    """The recorded tokens by digest: `requests` up to the start of a response, `responses` up to the end of one."""

    requests: dict[str, tuple[TokenRange, ...]] = field(default_factory=dict)
    responses: dict[str, RecordedPrefix] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """The tokens of a request: recorded ones and new ones, which encode `messages`. `rewritten`: the chat template
    renders recorded messages otherwise than before; the recorded tokens are used nevertheless."""

    context: tuple[TokenRange, ...]
    token_ids: list[int]
    messages: Sequence[ChatMessage]
    rewritten: bool = False


def digests_of(messages: Sequence[ChatMessage], tools: Sequence[Any]) -> list[str]:
    """The digest of each prefix of `messages`, beginning with that of no message.

    Raises ValueError for a message that is not text.
    """
    digests = [_digest("", tools)]
    for message in messages:
        digests.append(_digest(digests[-1], canonical(message)))
    return digests


def response_digest(request: str, message: ChatMessage) -> str:
    """The digest of the conversation with digest `request`, followed by `message`."""
    return _digest(request, canonical(message))


def canonical(message: ChatMessage) -> list[Any]:
    """What of `message` counts: role, text, name, and tool calls without their ids, which clients may change."""
    calls = [
        [call["function"]["name"], _sorted_json(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    return [message.get("role"), content_of(message), message.get("name"), calls]


def plan_turn(
    messages: Sequence[ChatMessage],
    tools: Sequence[Any],
    recorded: RecordedConversations,
    form: ConversationFormat,
) -> TurnPlan:
    """The tokens of a request with `messages`. Raises TemplateError, and ValueError for a message that is not text."""
    digests = digests_of(messages, tools)
    if (context := recorded.requests.get(digests[-1])) is not None:
        return TurnPlan(context, [], ())
    for count in range(len(messages) - 1, 0, -1):
        prefix = recorded.responses.get(digests[count])
        if prefix is not None:
            new = form.next_tokens(messages, tools, count, prefix.last_token)
            return TurnPlan(prefix.ranges, new, messages[count:], form.rewrites_history(messages, tools, count))
    return TurnPlan((), form.first_tokens(messages, tools), messages)


def plan_completion(
    prompt: str,
    digest: str,
    recorded: RecordedConversations,
    tokens_of: Callable[[tuple[TokenRange, ...]], list[int]],
    form: ConversationFormat,
) -> TurnPlan:
    """The tokens of a completion of the text `prompt`: those of the longest recorded text that it begins with, and the
    rest. `tokens_of` returns the recorded tokens in ranges."""
    if (context := recorded.requests.get(digest)) is not None:
        return TurnPlan(context, [], ())
    responses = list(recorded.responses.values())  # at once: the fold adds to them while this thread decodes
    texts = [(form.text_of(tokens_of(each.ranges)), each.ranges) for each in responses]
    begins = [(text, ranges) for text, ranges in texts if prompt.startswith(text)]
    begun, context = max(begins, key=lambda each: len(each[0]), default=("", ()))
    if not context:
        return TurnPlan((), form.first_tokens([{"content": prompt}], ()), [{"role": "prompt", "content": prompt}])
    rest = prompt[len(begun) :]
    token_ids = form.next_tokens([{"content": rest}], (), 0, -1) if rest else []
    return TurnPlan(context, token_ids, [{"role": "prompt", "content": rest}])


def _digest(before: str, value: Any) -> str:
    return hashlib.blake2b(f"{before}\0{_sorted_json(value)}".encode(), digest_size=16).hexdigest()


def _sorted_json(value: Any) -> str:
    if isinstance(value, str):  # arguments of a tool call: JSON text, which clients may write differently
        try:
            value = decode_json(value)
        except ValueError:
            return value
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def by_digest(conversations: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """The entries of `conversations` whose tokens are all among the first `tokens`."""

    def stop(entry: Any) -> int:
        ranges = entry.ranges if isinstance(entry, RecordedPrefix) else entry
        return max((each.stop for each in ranges), default=0)

    return {digest: entry for digest, entry in conversations.items() if stop(entry) <= tokens}

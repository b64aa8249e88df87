"""Conversations as tokens: what a request adds to recorded tokens, and the text of responses. Imports no model code.

Recorded tokens are never encoded again. The template renders the whole conversation with a placeholder in place of the
last recorded response, and only the text after the placeholder is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from uuid import uuid4

from infra.json_text import decode_json
from infra.models.chat import ConversationTokenizer, continuation, stop_tokens, turn_ends

ChatMessage = Mapping[str, Any]
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder shows for a part of a character."""
_CHARACTER_BYTES = 4
"""Bytes of a character in UTF-8, at most, and so its tokens."""


class TemplateError(ValueError):
    """The chat template cannot render these messages."""


@dataclass(frozen=True)
class ConversationFormat:
    """Encodes messages for a model. `plain`: the contents of the messages, one after another, without a template."""

    tokenizer: ConversationTokenizer
    plain: bool

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a response."""
        return stop_tokens(self.tokenizer) if self.plain else turn_ends(self.tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """The characters of the longest token, at most."""
        return max(map(len, self.tokenizer.get_vocab()))

    def first_tokens(self, messages: Sequence[ChatMessage], tools: Sequence[Any]) -> list[int]:
        """The tokens of a conversation without recorded ones, up to the start of the response. Raises TemplateError."""
        if self.plain:
            return list(self.tokenizer.encode(_contents(messages)))
        return list(self.tokenizer.encode(self._render(messages, tools), add_special_tokens=False))

    def next_tokens(
        self, messages: Sequence[ChatMessage], tools: Sequence[Any], recorded: int, last_token: int
    ) -> list[int]:
        """The tokens after the first `recorded` messages, the last of which is a response that ends with `last_token`.

        Raises TemplateError.
        """
        if self.plain:
            return continuation(self.tokenizer, _contents(messages[recorded:]))
        placeholder = f"0{uuid4().hex}0"  # no message contains it
        response = {"role": "assistant", "content": placeholder}
        text = self._render([*messages[: recorded - 1], response, *messages[recorded:]], tools)
        _, found, after = text.rpartition(placeholder)
        if not found:
            raise TemplateError("the chat template drops the model's own response")
        token_ids = continuation(self.tokenizer, after)
        if token_ids and last_token in self.stop_token_ids and token_ids[0] in self.stop_token_ids:
            del token_ids[0]
        return token_ids

    def rewrites_history(self, messages: Sequence[ChatMessage], tools: Sequence[Any], recorded: int) -> bool:
        """Whether the template renders a response, message `recorded`, or what is before it otherwise later.

        Space around the response does not count, since templates trim it, nor do tool calls, which have many spellings.
        """
        if self.plain:
            return False
        try:
            now, before = self._render(messages, tools), self._render(messages[: recorded - 1], tools)
        except TemplateError:  # it does not render the response itself, such as one with two tool calls
            return True
        response = content_of(messages[recorded - 1]).strip()
        return not (now.startswith(before) and now[len(before) :].lstrip().startswith(response))

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def offsets_of(self, token_ids: Sequence[int]) -> list[int]:
        """The first character of each token in `text_of`; tokens of one character have the same.

        Bytes that are no character may have that of a byte before them.
        """
        offsets: list[int] = []
        length = known = before = 0  # the text of the tokens up to `known` has `length` characters
        for at in range(len(token_ids)):
            offsets.append(length)
            # Decoded after the tokens from `before` to `known`: many tokenizers drop the space of a text's first token.
            text = self.text_of(token_ids[before : at + 1])
            if not text.endswith(UNFINISHED) or at + 1 - known >= _CHARACTER_BYTES:
                length += max(0, len(text) - len(self.text_of(token_ids[before:known])))
                before, known = known, at + 1
        return offsets

    def marked_text_of(self, token_ids: Sequence[int]) -> str:
        """As `text_of`, with special tokens except those that end the response: some mark tool calls."""
        kept = list(token_ids)
        while kept and kept[-1] in self.stop_token_ids:
            kept.pop()
        return str(self.tokenizer.decode(kept, skip_special_tokens=False))

    def _render(self, messages: Sequence[ChatMessage], tools: Sequence[Any]) -> str:
        conversation = [_for_template(message) for message in messages]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    conversation, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateError(
                f"the chat template fails on messages of {roles} ({type(error).__name__}: {error})"
            ) from error


def content_of(message: ChatMessage) -> str:
    """The text of a message's content, which may be a list of text parts. Raises ValueError for other parts."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(text for text in texts if text)
    raise ValueError("content must be text or a list of text parts")


def _contents(messages: Sequence[ChatMessage]) -> str:
    return "".join(map(content_of, messages))


def _for_template(message: ChatMessage) -> dict[str, Any]:
    """`message` as templates expect it: content as text, arguments of tool calls as objects, no `developer`, which most
    templates drop."""
    made = {**message, "content": content_of(message)}
    if made.get("role") == "developer":
        made["role"] = "system"
    calls = message.get("tool_calls")
    if calls:
        made["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"].get("arguments"))}}
            for call in calls
        ]
    return made


def _arguments(value: Any) -> Any:
    try:
        return decode_json(value) if isinstance(value, str) else value
    except ValueError:
        return value

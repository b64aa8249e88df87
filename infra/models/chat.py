"""Messages formatted by a model's chat template: prompts, and messages between two turns. Imports no model code.

A turn is never encoded again: the tokens around a message are derived once from the template, and then added to the
tokens of each message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_ANSWER, _MESSAGE = "0answer0", "0message0"
"""Placeholders that occur in no template."""
_BEFORE = "\n", "0", "a", "."
"""Texts that a tokenizer rarely joins with the next one in one token."""


class ChatTokenizer(Protocol):
    """The required part of the interface of Hugging Face's tokenizers."""

    eos_token_id: int | Sequence[int] | None
    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """Format `conversation` as one text."""


class ConversationTokenizer(ChatTokenizer, Protocol):
    """As `ChatTokenizer`, with the text of tokens."""

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """Return the text of `token_ids`."""

    def get_vocab(self) -> dict[str, int]:
        """Return the token ids by their spelling."""


@dataclass(frozen=True, slots=True)
class MessageFrame:
    """Token ids around a message between two turns: `end` ends the previous turn if it has no end token of its own."""

    end: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    def within(self, token_ids: Sequence[int], ended: bool) -> list[int]:
        """The tokens of the message itself: the inverse of `around`."""
        first = len(self.before) + (0 if ended else len(self.end))
        return list(token_ids[first : len(token_ids) - len(self.after)])

    def around(self, message: Sequence[int], ended: bool) -> list[int]:
        """The tokens between the end of one turn and the start of the next."""
        return [*(() if ended else self.end), *self.before, *message, *self.after]


def continuation(tokenizer: ConversationTokenizer, text: str, **options: Any) -> list[int]:
    """The tokens of `text` where it follows other tokens. `options` are those of `encode`.

    Many tokenizers put a space before a text, which is right only at the start of a sequence. Then the tokens are those
    that the text has after another one.
    """

    def encode(whole: str) -> list[int]:
        return list(tokenizer.encode(whole, add_special_tokens=False, **options))

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))

    alone, later = encode(text), []
    for before in _BEFORE:
        head, whole = encode(before), encode(before + text)
        after = whole[len(head) :] if whole[: len(head)] == head else alone
        for token_ids in (alone, after):
            if decode([*head, *token_ids]) == decode(head) + text:
                return token_ids
        later.append(after)
    return next((after for after in later if after != alone), alone)  # no tokens have exactly this text


def chat_text(tokenizer: ChatTokenizer, messages: Sequence[Mapping[str, str]]) -> str:
    """Format `messages` and the start of the answer. Raises ValueError if the template fails on them."""
    if not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template")
    try:
        conversation = [dict(message) for message in messages]
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    except Exception as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"the chat template fails on messages of {roles} ({type(error).__name__}: {error})") from error


def stop_tokens(tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """The tokens that end a response: the tokenizer's end-of-sequence token and those of generation_config.json."""
    ends = tokenizer.eos_token_id
    own = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
    return tuple(dict.fromkeys([*own, *getattr(tokenizer, "generation_stop_tokens", ())]))


def turn_ends(tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """`stop_tokens`, and the special token with which the chat template ends a turn of the model, if there is one."""
    try:
        text = chat_text(tokenizer, [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}])
    except ValueError:  # the template does not support turns of the model
        return stop_tokens(tokenizer)
    _, _, after = text.partition(_ANSWER)
    following = tokenizer.encode(after, add_special_tokens=False)[:1]
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = [token for token in following if token in added and added[token].special]
    return tuple(dict.fromkeys([*stop_tokens(tokenizer), *special]))


def message_frame(tokenizer: ConversationTokenizer, role: str) -> MessageFrame:
    """The tokens around a message of `role` that follows a turn of the model.

    Raises ValueError for a template that fails on such messages or does not contain them exactly once.
    """
    conversation_roles = ("user", "?"), ("assistant", _ANSWER), (role, _MESSAGE)
    text = chat_text(tokenizer, [{"role": each, "content": content} for each, content in conversation_roles])
    _, answer_found, rest = text.partition(_ANSWER)
    between, message_found, after = rest.partition(_MESSAGE)
    if not (answer_found and message_found) or _MESSAGE in after:
        raise ValueError(f"the chat template must contain a message of {role} after the assistant's exactly once")
    before = continuation(tokenizer, between)
    ends = int(bool(before) and before[0] in turn_ends(tokenizer))
    after_tokens = continuation(tokenizer, after)
    return MessageFrame(tuple(before[:ends]), tuple(before[ends:]), tuple(after_tokens))

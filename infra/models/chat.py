"""Messages by a model's own chat template: prompts, and what comes between two turns. Imports no model code.

A turn is never encoded again: what stands around a message is told once from the template, and put around the tokens of
what is said then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_ANSWER, _MESSAGE = "0answer0", "0message0"
"""Words that no template has, to find again what they stand for."""


class ChatTokenizer(Protocol):
    """What is asked of a tokenizer, in the words of Hugging Face's."""

    eos_token_id: int | Sequence[int] | None
    chat_template: str | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        """`conversation` as one text."""


@dataclass(frozen=True, slots=True)
class MessageFrame:
    """Token ids around a message between two turns: `end` ends the turn before, where that has not ended by itself."""

    end: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    def around(self, message: Sequence[int], ended: bool) -> list[int]:
        """What is read from the end of one turn to the beginning of the next."""
        return [*(() if ended else self.end), *self.before, *message, *self.after]


def chat_text(tokenizer: ChatTokenizer, messages: Sequence[Mapping[str, str]]) -> str:
    """`messages`, and the beginning of the answer to them. Raises ValueError where the template cannot say them."""
    if not tokenizer.chat_template:
        raise ValueError("the model's tokenizer has no chat template")
    try:
        conversation = [dict(message) for message in messages]
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    except Exception as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"the chat template fails on messages of {roles} ({type(error).__name__}: {error})") from error


def stop_tokens(tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """The tokens that end a response: the tokenizer's end of sequence and those of generation_config.json."""
    ends = tokenizer.eos_token_id
    own = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
    return tuple(dict.fromkeys([*own, *getattr(tokenizer, "generation_stop_tokens", ())]))


def turn_ends(tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """`stop_tokens`, and the added token with which the chat template ends a turn of the model, where it does so."""
    try:
        text = chat_text(tokenizer, [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}])
    except ValueError:  # a template without turns of the model
        return stop_tokens(tokenizer)
    _, _, after = text.partition(_ANSWER)
    following = tokenizer.encode(after, add_special_tokens=False)[:1]
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = [token for token in following if token in added and added[token].special]
    return tuple(dict.fromkeys([*stop_tokens(tokenizer), *special]))


def message_frame(tokenizer: ChatTokenizer, role: str) -> MessageFrame:
    """What stands around a message of `role` that answers a turn of the model, before the next turn.

    Raises ValueError for a template that fails on such messages, or does not show them.
    """
    said = ("user", "?"), ("assistant", _ANSWER), (role, _MESSAGE)
    text = chat_text(tokenizer, [{"role": each, "content": content} for each, content in said])
    _, answered, rest = text.partition(_ANSWER)
    between, shown, after = rest.partition(_MESSAGE)
    if not (answered and shown) or _MESSAGE in after:
        raise ValueError(f"the chat template does not show a message of {role} that answers the assistant, once")
    before = tokenizer.encode(between, add_special_tokens=False)
    ends = int(bool(before) and before[0] in turn_ends(tokenizer))
    behind = tokenizer.encode(after, add_special_tokens=False)
    return MessageFrame(tuple(before[:ends]), tuple(before[ends:]), tuple(behind))

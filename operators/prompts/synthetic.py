"""Prompts of random tokens of a given length, for emulated runs, which have neither text nor tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from operators.prompts.config import TaskConfig
from operators.prompts.question import BadRow, Question

END = 0
"""The token that ends an answer."""
_VOCABULARY = 1000


class SyntheticSource:
    """Numbered questions without content."""

    heldout: tuple[Question, ...] = ()
    bad_rows: tuple[BadRow, ...] = ()
    row_count = trained_rows = 0
    refused_rows: Mapping[str, int] = MappingProxyType({})

    def __init__(self, config: TaskConfig) -> None:
        self.total = config.size if config.epochs is None or config.size is None else config.size * config.epochs

    def __getitem__(self, number: int) -> Question:
        if number < 0 or (self.total is not None and number >= self.total):
            raise IndexError(f"there are {self.total} synthetic questions, so none of number {number}")
        return Question(number, f"synthetic question {number}", (), {}, "synthetic")

    def close(self) -> None:
        """Nothing to do."""


class SyntheticTokenizer:
    """Encodes every text as `length` tokens, a hash of it, none of which is `END`."""

    eos_token_id: int | Sequence[int] | None = END
    chat_template: str | None = None

    def __init__(self, length: int) -> None:
        self._length = length

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        stretched = hashlib.shake_128(text.encode()).digest(2 * self._length)
        return [1 + int.from_bytes(stretched[i : i + 2]) % (_VOCABULARY - 1) for i in range(0, len(stretched), 2)]

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        """Raises TypeError: there is no template."""
        raise TypeError("synthetic prompts have no chat template")

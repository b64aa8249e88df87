"""A question with what is needed to judge its answer, and what is said of rows that hold none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Question:
    """Row `index` (from 0) of a source.

    `messages` is the conversation whose last turn is to be answered, empty for plain text; `text` is what tells
    questions apart; `reference` is JSON-ready and goes to the verifier of `task`.
    """

    index: int
    text: str
    messages: tuple[Message, ...]
    reference: Mapping[str, Any]
    task: str


@dataclass(frozen=True)
class BadRow:
    """A row that is no question. `line` counts from 1: a line of a JSONL file, a row of a table."""

    line: int
    reason: str


class UnusableRow(ValueError):
    """A row is no question; the message says why."""


class SourceError(ValueError):
    """A source cannot be used at all; the message names the path or task and what to do."""


class RowReader(Protocol):
    """A finite table of questions, read twice: once in order to know it, then at random."""

    name: str
    """What error messages call it."""

    def scan(self) -> Iterator[Question | BadRow]:
        """Every row in order."""

    def question(self, row: int) -> Question:
        """Row `row`, which `scan` gave as a question."""

    def close(self) -> None:
        """Release files."""


def text_key(text: str) -> int:
    """64 bits that stand for a question's text, white space aside: equal for equal texts, in every process and run."""
    folded = " ".join(text.split()).encode()
    return int.from_bytes(hashlib.blake2b(folded, digest_size=8).digest(), "big")

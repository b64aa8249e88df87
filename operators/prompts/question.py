"""Questions with the reference for their verifier, rows that are not usable, and the reader protocol."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from schemas.records import Message

RefusalKind = Literal["malformed", "no question", "no answer"]


@dataclass(frozen=True)
class Question:
    """Row `index` (from 0) of a source.

    `messages` is the conversation whose last turn the model answers, empty for plain text; `text` identifies the
    question; `reference` is JSON-serializable, for the verifier of `task`.
    """

    index: int
    text: str
    messages: tuple[Message, ...]
    reference: Mapping[str, Any]
    task: str


@dataclass(frozen=True)
class BadRow:
    """A row that is not a valid question. `line` counts lines of a JSONL file, or rows of a table, from 1."""

    line: int
    reason: str
    kind: RefusalKind = "malformed"


class UnusableRow(ValueError):
    """A row is not a valid question; the message gives the reason, `kind` its class."""

    def __init__(self, reason: str, kind: RefusalKind = "malformed") -> None:
        super().__init__(reason)
        self.kind: RefusalKind = kind

    def at(self, line: int) -> BadRow:
        """The bad row `line`."""
        return BadRow(line, str(self), self.kind)


class SourceError(ValueError):
    """A source cannot be used; the message names the path or task and what to do.

    `reason` is why no row is usable, without the name of the file; empty if some are, or for another error.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class RowReader(Protocol):
    """A finite table of questions: scanned once in order, then read at random."""

    name: str
    """The name of the table in error messages."""

    def scan(self) -> Iterator[Question | BadRow]:
        """Yield every row in order."""

    def question(self, row: int) -> Question:
        """Row `row`, which `scan` has yielded as a question."""

    def close(self) -> None:
        """Release files."""


def text_key(text: str) -> int:
    """A 64-bit hash of a question's text with normalised white space; the same in every process and run."""
    folded = " ".join(text.split()).encode()
    return int.from_bytes(hashlib.blake2b(folded, digest_size=8).digest(), "big")

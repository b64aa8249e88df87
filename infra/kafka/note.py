"""The note of a commit: what a restart must know beside offsets.

It travels in the commit's metadata. One too long for that is a record of the topic `restore`, written in the same
transaction, and the metadata says at which offset.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_METADATA_BYTES = 2048
"""Brokers cap commit metadata at 4 KB."""
MAX_NOTE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Note:
    """What a commit says beside offsets: the start, where the ledger begins in each output, the operator's marks."""

    start: int = 0
    ledger: Mapping[str, int] = field(default_factory=dict)
    marks: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> str:
        """As text, of ASCII. Raises ValueError beyond MAX_NOTE_BYTES."""
        text = json.dumps([self.start, self.ledger, self.marks], separators=(",", ":"))
        if len(text) > MAX_NOTE_BYTES:
            raise ValueError(
                f"a commit's note of {len(text)} bytes is over {MAX_NOTE_BYTES}: give the role more shards"
            )
        return text

    @classmethod
    def decode(cls, text: str) -> Note:
        return cls(*json.loads(text)) if text else cls()


def pointer(offset: int) -> str:
    """The metadata of a commit whose note lies at `offset` of the topic `restore`."""
    return f"@{offset}"


def pointed_at(metadata: str) -> int | None:
    """The offset of the note that `metadata` points to; None where it is the note itself."""
    return int(metadata[1:]) if metadata.startswith("@") else None

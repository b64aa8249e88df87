"""The note that travels in a commit's metadata: what a restart must know beside offsets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_NOTE_BYTES = 2048
"""Brokers cap commit metadata at 4 KB."""


@dataclass(frozen=True)
class Note:
    """What a commit says beside offsets: the start, where the ledger begins in each output, the operator's marks."""

    start: int = 0
    ledger: Mapping[str, int] = field(default_factory=dict)
    marks: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> str:
        text = json.dumps([self.start, self.ledger, self.marks], separators=(",", ":"))
        if len(text) > MAX_NOTE_BYTES:
            raise ValueError(
                f"a commit's note of {len(text)} bytes is over {MAX_NOTE_BYTES}: too many partitions a shard"
            )
        return text

    @classmethod
    def decode(cls, text: str | None) -> Note:
        return cls(*json.loads(text)) if text else cls()

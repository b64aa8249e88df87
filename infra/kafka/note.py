"""The note of a commit: what a restart must know, written to the compacted topic `restore` in the same transaction.

The topic keeps the last note of every group for ever, so a start depends neither on the retention of group offsets
(seven days by default) nor on the age of the run. Group offsets are committed for Kafka's own tools alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_NOTE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Note:
    """The state of a shard as of one commit. Offsets are by "topic:partition".

    `ledger` is where the ledger begins in each output, `state` the operator's part. `offsets` are the next offsets to
    read of the committed inputs; `commit` counts the commits of the start; `written` are the last offsets of this
    commit's outputs, which the log must still reach when the shard starts again.
    """

    start: int = 0
    ledger: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    commit: int = 0
    written: Mapping[str, int] = field(default_factory=dict)

    def encode(self) -> str:
        """As text, of ASCII. Raises ValueError beyond MAX_NOTE_BYTES."""
        text = json.dumps(
            [self.start, self.ledger, self.state, self.offsets, self.commit, self.written], separators=(",", ":")
        )
        if len(text) > MAX_NOTE_BYTES:
            raise ValueError(
                f"a commit's note of {len(text)} bytes is over {MAX_NOTE_BYTES}: give the role more shards"
            )
        return text

    @classmethod
    def decode(cls, text: str) -> Note:
        """The note that was encoded as `text`. Raises ValueError for text that is none."""
        try:
            return cls(*json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"not a commit's note: {error}: {text[:100]!r}") from error

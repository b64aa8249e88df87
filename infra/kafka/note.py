"""The commit note: the state that a restart needs, written to the compacted topic `restore` in the same transaction.

The topic keeps the last note of every group forever, so a start depends neither on the retention of group offsets
(seven days by default) nor on the age of the run. Group offsets are committed only for Kafka's tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.kafka.session_config import Partition

MAX_NOTE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Note:
    """The state of a shard as of one commit. Offsets are by "topic:partition".

    `ledger` is the first offset of the ledger in each output, `state` the operator's saved state. `offsets` are the
    next offsets of the committed inputs; `commit` counts the commits of the start; `written` are the last offsets of
    its outputs in each partition, which the log must still contain at the next start.
    """

    start: int = 0
    ledger: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    commit: int = 0
    written: Mapping[str, int] = field(default_factory=dict)

    def encode(self) -> str:
        """The note as ASCII text. Raises ValueError if it is over MAX_NOTE_BYTES."""
        text = json.dumps(
            [self.start, self.ledger, self.state, self.offsets, self.commit, self.written], separators=(",", ":")
        )
        if len(text) > MAX_NOTE_BYTES:
            raise ValueError(f"a commit note of {len(text)} bytes is over {MAX_NOTE_BYTES}: give the role more shards")
        return text

    @classmethod
    def decode(cls, text: str) -> Note:
        """The note encoded as `text`. Raises ValueError if it is not a note."""
        try:
            return cls(*json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"not a commit note: {error}: {text[:100]!r}") from error


def name_of(place: tuple[str, int]) -> str:
    """The "topic:partition" by which notes call `place`."""
    return f"{place[0]}:{place[1]}"


def place_of(name: str) -> Partition:
    """The partition that notes call `name`."""
    topic, _, partition = name.rpartition(":")
    return Partition(topic, int(partition))

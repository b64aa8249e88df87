"""How far the groups of a run stand behind what they read."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from kafka import KafkaAdminClient
from kafka.errors import CoordinatorLoadInProgressError

from infra.kafka.admin import beginning_offsets, committed_offsets, end_offsets, list_topics


@dataclass(frozen=True, slots=True)
class Lag:
    """Where a group stands in one partition: its committed offset, and the partition's committed end."""

    group: str
    topic: str
    partition: int
    committed: int
    end: int

    @property
    def lag(self) -> int:
        """Records (and transaction markers) that are not yet committed as done."""
        return max(0, self.end - self.committed)


def list_groups(client: KafkaAdminClient, prefix: str, wait_s: float = 10.0) -> list[str]:
    """The names, sorted, of the groups that begin with a prefix; waits for a broker that has just started."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return sorted(group["group_id"] for group in client.list_groups() if group["group_id"].startswith(prefix))
        except CoordinatorLoadInProgressError:  # it is still reading what groups have committed
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)


def group_lags(client: KafkaAdminClient, groups: Iterable[str]) -> list[Lag]:
    """Where each group stands in each partition that it has committed, sorted; deleted topics are left out."""
    committed = {group: committed_offsets(client, group) for group in groups}
    there = set(list_topics(client))
    topics = sorted({each.topic for offsets in committed.values() for each in offsets} & there)
    ends = end_offsets(client, topics) if topics else {}
    return sorted(
        (
            Lag(group, where.topic, where.partition, found.offset, ends[where])
            for group, offsets in committed.items()
            for where, found in offsets.items()
            if where in ends
        ),
        key=lambda lag: (lag.group, lag.topic, lag.partition),
    )


def record_counts(client: KafkaAdminClient, topics: list[str]) -> dict[str, int]:
    """How many offsets each topic spans: records, transaction markers, and what compaction has taken."""
    counts: dict[str, int] = defaultdict(int)
    first, last = beginning_offsets(client, topics), end_offsets(client, topics)
    for where, end in last.items():
        counts[where.topic] += max(0, end - first[where])
    return dict(counts)

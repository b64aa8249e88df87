"""A run's log as its roles write it, for tests of trims."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from audit_records import assignment, experience, manifest, micro_batch, settled, trajectory
from kafka import KafkaAdminClient, KafkaProducer, OffsetAndMetadata, TopicPartition
from kafka.errors import CoordinatorLoadInProgressError, CoordinatorNotAvailableError, NoError, NotCoordinatorError

from infra.kafka.admin import TopicSpec, admin_client, beginning_offsets, create_topics, end_offsets
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from pipelines.trim.plan import TrimPlan, execute, plan_trim
from schemas.codec import encode
from schemas.records import PolicyVersion
from schemas.topics import (
    BATCHES,
    EXPERIENCES,
    INBOX,
    RELAY,
    SETTLED,
    TRAJECTORIES,
    Topic,
    group_name,
)

TOPICS = (INBOX, TRAJECTORIES, EXPERIENCES, SETTLED, BATCHES, RELAY)
BATCH = 4
"""Trajectories per batch, in two groups."""


class TrimmedRun:
    """A run's topics of one partition, written by the test: batch n is trained into version 1.(n + 1)."""

    def __init__(self, broker: Broker, run: str) -> None:
        self.run, self.servers = run, broker.bootstrap_servers
        self.client = ClientProperties.at(self.servers)
        with admin_client(self.client) as admin:
            create_topics(admin, [TopicSpec(topic.name(run), 1) for topic in TOPICS])
        self.producer = KafkaProducer(bootstrap_servers=self.servers)
        self.batches = 0
        self.write(RELAY, manifest("1.0", None))

    def write(self, topic: Topic, *rows: object) -> None:
        for row in rows:
            value, headers = encode(row)
            key = str(getattr(row, "version", "")).encode() or None
            self.producer.send(topic.name(self.run), value, key, headers=list(headers))
        self.producer.flush()

    def train(self, batches: int) -> None:
        """Write `batches` batches of two groups each, each with one evaluation and one dropped trajectory."""
        for number in range(self.batches, self.batches + batches):
            names = [f"p{BATCH * number + group}.{member}" for group in (0, 1) for member in (0, 1)]
            others = [f"e{number}.0", f"p{BATCH * number + 2}.0"]
            for topic, make in ((INBOX, assignment), (TRAJECTORIES, trajectory), (EXPERIENCES, experience)):
                self.write(topic, *map(make, [*names, *others]))
            self.write(SETTLED, *(settled(name, batch=number) for name in names))
            self.write(SETTLED, settled(others[0], "evaluated", "a round"), settled(others[1], "dropped", "over-age"))
            self.write(BATCHES, micro_batch(number, *names))
            made = manifest(f"1.{number + 1}", f"1.{number}", number)
            self.write(RELAY, replace(made, batch_offsets=(number + 1,)))
        self.batches += batches

    def commit_all(self) -> None:
        """Commit the end offsets for every role and its topics."""
        with admin_client(self.client) as admin:
            ends = end_offsets(admin, [topic.name(self.run) for topic in TOPICS])
            for role in sorted({role for topic in TOPICS for role in topic.consumers}):
                places = [TopicPartition(topic.name(self.run), 0) for topic in TOPICS if role in topic.consumers]
                self._commit(admin, role, {place: ends[place] for place in places})

    def commit(self, role: str, topic: Topic, offset: int) -> None:
        with admin_client(self.client) as admin:
            self._commit(admin, role, {TopicPartition(topic.name(self.run), 0): offset})

    def _commit(self, admin: KafkaAdminClient, role: str, offsets: Mapping[TopicPartition, int]) -> None:
        moved = {place: OffsetAndMetadata(offset, "", -1) for place, offset in offsets.items()}
        deadline = time.monotonic() + 60.0
        while True:
            try:
                errors = set(admin.alter_group_offsets(group_name(self.run, role), moved).values()) - {NoError}
                if not errors:
                    return
                raise errors.pop()
            except (CoordinatorNotAvailableError, CoordinatorLoadInProgressError, NotCoordinatorError):
                assert time.monotonic() < deadline  # the broker creates its offsets topic for the first group

    def plan(self, version: str, **options: Any) -> TrimPlan:
        """Plan a trim to `version`, which has a checkpoint."""
        to = PolicyVersion.parse(version)
        return plan_trim(self.client, self.run, {to: Path("checkpoints") / version}, now=lambda: 7, **options)

    def trim(self, version: str) -> TrimPlan:
        plan = replace(self.plan(version), checkpoint=None)  # the copy of checkpoints has its own test
        execute(self.client, plan, Path("nowhere"))
        return plan

    def begins(self) -> dict[str, int]:
        """The first remaining offset, by the topic's short name."""
        with admin_client(self.client) as admin:
            found = beginning_offsets(admin, [topic.name(self.run) for topic in TOPICS])
        return {where.topic.rpartition(".")[2]: offset for where, offset in found.items()}

"""Extreme, contradictory and foreign records of every class on the topics of a run: no wedge, no wrong training.
That holds after a restart of every role, too.

The real roles run on a real broker. The records are written by a plain producer, so the log files tell them from the
run's own, which are transactional.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from climbing_sampler import CLIMB
from faults.late_run import CONFIG, run_config, wait_until
from faults.log_files import read_topic
from faults.proxied_broker import ProxiedBroker
from faults.role_threads import close_roles, start_roles
from faults.wire import rows_of
from invalid_records import FAR, foreign_levels, invalid_records, level_key

from infra.kafka import topic_reader
from infra.kafka.note import Note
from infra.kafka.producer import BoundedProducer
from pipelines.inspect.audit.audit_run import audit
from pipelines.run.topics import make_topics
from schemas import records as r
from schemas.codec import encode
from schemas.identity import parse_trajectory_id
from schemas.topics import (
    BATCH_ASSEMBLY,
    BATCHES,
    CONTROL,
    CURRICULUM,
    DEAD_LETTERS,
    EXPERIENCES,
    INBOX,
    METRICS,
    PROGRESS,
    PROMPTS,
    RELAY,
    RELAY_CHAIN,
    REPLICAS,
    RESTORE,
    SETTLED,
    TRAJECTORIES,
    Topic,
)

Placed = tuple[Topic, Any, int]
"""A record, its topic and its partition."""
EVERY_S = 0.5
"""Between two reads of the log files."""
AHEAD = 5000
"""By how much prompts of another program are ahead of the run's."""
READERS = {INBOX.short_name: 3, PROGRESS.short_name: 2, RELAY_CHAIN.short_name: 2}
"""How many roles of the run read a topic: inbox also agents and gateway, progress the gateway, relay-chain a relay."""
MORE = 4
"""Batches and settled groups that must follow."""


class Log:
    """The rows of a run in the broker's log files, by whether the run wrote them."""

    def __init__(self, kafka: ProxiedBroker, run: str) -> None:
        self._folder, self._run, self._client = kafka.broker.config.data_dir / "log", run, kafka.direct

    def own(self, topic: Topic) -> list[dict[str, Any]]:
        """The rows that the run has committed."""
        records = read_topic(self._folder, topic.name(self._run))
        mine = [each for each in records if each.outcome == "committed" and each.transaction != each.offset]
        return [row for each in mine for row in rows_of(each.value or b"", dict(each.headers))[1]]

    def step(self) -> int:
        """The newest optimizer step."""
        return max((row["step"] for row in self.own(METRICS) if row["name"] == "trainer"), default=0)

    def readers(self) -> dict[str, int]:
        """How many roles have written dead letters of one record, by the topics in READERS."""
        counts = Counter((row["topic"], row["partition"], row["offset"]) for row in self.own(DEAD_LETTERS))
        return {name: max((n for (topic, *_), n in counts.items() if topic == name), default=0) for name in READERS}

    def levels(self) -> list[int]:
        """The levels that prompts has begun, without immediate repetitions."""
        begun = [row["level"] for row in self.own(CURRICULUM) if "first_prompt" in row]
        return [level for level, _ in itertools.groupby(begun)]

    def records(self, topic: Topic, kind: type, most: int = 8) -> list[tuple[int, Any]]:
        """The first records of class `kind`, decoded, with their partitions."""
        found = topic_reader.read_topic(self._client, topic.name(self._run))
        return [(each.partition, row) for each in found for row in each.rows if isinstance(row, kind)][:most]


def contradictory(log: Log) -> Iterator[Placed]:
    """What contradicts records of the run: repeated ends with other contents, numbers of other processes."""
    for at, done in log.records(TRAJECTORIES, r.Trajectory):
        yield TRAJECTORIES, replace(done, lease=done.lease + 100, text="another answer", replica=1 - done.replica), at
        yield SETTLED, r.Settled(done.trajectory_id, done.prompt.samples, "dropped", "not so", None, None, 1, 0), 0
    for at, scored in log.records(EXPERIENCES, r.Experience):
        yield EXPERIENCES, replace(scored, reward=1e6), at
    for at, part in log.records(BATCHES, r.MicroBatch):
        yield BATCHES, part, at
        yield BATCHES, replace(part, batch=part.batch + 10**6), at
    for at, asked in log.records(PROMPTS, r.Prompt):
        yield PROMPTS, replace(asked, text="another question"), at
        yield PROMPTS, replace(asked, number=asked.number + AHEAD), at
    for at, manifest in log.records(RELAY, r.WeightVersion):
        # One whose batches follow from its parent is valid: Kafka's ACLs protect the topic (docs/security.md).
        yield RELAY, replace(manifest, batches=(77,), trajectories_trained=10**9), at
    for at, status in log.records(REPLICAS, r.ReplicaStatus):
        yield REPLICAS, replace(status, incarnation=status.incarnation - 1, state="stopped"), at
        yield REPLICAS, replace(status, incarnation=10**9), at
    yield RELAY_CHAIN, r.RelayChain(2**52, (), (), "chain", 0), 0
    for _, note in log.records(RESTORE, r.CommitNote, 100):
        yield RESTORE, note, 0
        yield RESTORE, replace(note, note=Note(10**6, state={"never": 1}, commit=1).encode()), 0
        yield RESTORE, replace(note, note="{"), 0
    yield METRICS, r.Metric("trainer", 10**9, {"trajectories": 1.0}, 2**60), 0


def hostile(log: Log, partitions: dict[Topic, int]) -> list[Placed]:
    """Every class at extreme values and foreign to the run, and what contradicts the run, in random order.

    Valid requests pause the run and continue it; the last one lets it continue.
    """
    found: list[Placed] = [*contradictory(log)]
    for topic, record in invalid_records():
        if isinstance(record, r.MicroBatch) and 0 < record.batch < 1000:
            record = replace(record, batch=10**6)  # the next number is the buffer's: Kafka's ACLs protect it
        found += [(topic, record, partition) for partition in range(partitions.get(topic, 1))]
    found += [(CURRICULUM, record, 0) for record in foreign_levels()]
    random.Random(0).shuffle(found)
    return [*found, (CONTROL, r.Pause(1, False, "", "", 0), 0)]


def write(kafka: ProxiedBroker, run: str, records: list[Placed]) -> None:
    """Write `records`, and to each partition one of release 0.1.0."""
    keys, places = {REPLICAS: "rollout-3", INBOX: ""}, set[tuple[Topic, int]]()
    with BoundedProducer(kafka.direct) as producer:
        for topic, record, partition in records:
            key = type(record).__name__ if topic is BATCH_ASSEMBLY else keys.get(topic, "p")
            key = record.group if isinstance(record, r.CommitNote) else key
            key = level_key(record) if topic is CURRICULUM else key
            value, headers = encode(record)
            producer.send(topic.name(run), value, key=key.encode(), headers=headers, partition=partition)
            if (topic, partition) not in places:
                places.add((topic, partition))
                old = (("laminar-schema", f"{type(record).__name__}/1".encode()),)
                producer.send(topic.name(run), b"{}", key=key.encode(), headers=old, partition=partition)
        producer.flush(60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_continues_correctly_among_hostile_records(proxied: ProxiedBroker, run_id: str, tmp_path: Path) -> None:
    curriculum = {
        "prompts": CONFIG["prompts"] | {"levels": [{}, {}, {}]},
        "experience": CONFIG["experience"] | {"sampler": {"name": CLIMB.name}},
    }
    config = run_config(proxied, run_id, tmp_path, placement={"prompt_lead": 8}, **curriculum)
    make_topics(config)
    log = Log(proxied, run_id)
    roles = start_roles(config)
    try:
        wait_until(roles, lambda: log.step() > 0, lambda: "no step before the records", EVERY_S)
        records = hostile(log, {INBOX: 2, TRAJECTORIES: 2, EXPERIENCES: 2, BATCHES: 2})
        write(proxied, run_id, records)
        before, highest = log.step(), max(row["number"] for row in log.own(PROMPTS))
        wait_until(roles, lambda: log.step() > before + MORE, lambda: f"step {log.step()} after step {before}", EVERY_S)

        def later_prompts() -> int:
            trained = [parse_trajectory_id(name).number for part in log.own(BATCHES) for name in part["trajectory_ids"]]
            return len({number for number in trained if number > highest})

        wait_until(
            roles, lambda: later_prompts() > MORE, lambda: f"{later_prompts()} later prompts are trained", EVERY_S
        )
        wait_until(roles, lambda: log.levels() == [1, 2], lambda: f"levels {log.levels()} have begun", EVERY_S)
        wait_until(roles, lambda: log.readers() == READERS, lambda: f"dead letters are by {log.readers()}", EVERY_S)
        assert {role.name: role.starts for role in roles if role.starts != 1} == {}
        close_roles(roles)
        roles = start_roles(config)  # each from its own last note
        before = log.step()
        wait_until(roles, lambda: log.step() > before + MORE, lambda: f"step {log.step()} after step {before}", EVERY_S)
        assert {role.name: role.starts for role in roles if role.starts != 1} == {}
    finally:
        close_roles(roles)
    assert len(records) > 1000
    trained = Counter(name for part in log.own(BATCHES) for name in part["trajectory_ids"])
    assert max(trained.values()) == 1
    assert max(parse_trajectory_id(name).number for name in trained) < min(FAR, AHEAD)
    steps = {row["step"]: row["values"]["trajectories"] for row in log.own(METRICS) if row["name"] == "trainer"}
    sizes = Counter(part["batch"] for part in log.own(BATCHES) for _ in part["trajectory_ids"])
    assert steps == {step: float(sum(sizes[batch] for batch in range(step))) for step in steps}
    found = audit(proxied.direct, run_id)
    copied = {name for topic, row, _ in records if topic is BATCHES for name in row.trajectory_ids}
    assert not {each.trajectory_id for each in found.lost} & trained.keys()
    assert set(found.trained_twice) <= copied
    assert found.trained > 0
    assert found.undecodable > 100
    letters = Counter(letter["step"] for letter in log.own(DEAD_LETTERS))
    old = {each["topic"].split(".")[-1] for each in log.own(DEAD_LETTERS) if "of release 0.1.0" in each["reason"]}
    assert {topic.short_name for topic in (PROMPTS, INBOX, TRAJECTORIES, EXPERIENCES, BATCHES, RELAY)} <= old
    assert letters["read relay"] > 50
    assert letters["train"] > 10
    letters_of_prompts = [each for each in log.own(DEAD_LETTERS) if each["topic"].split(".")[-1] == PROMPTS.short_name]
    assert any("is of another program: the next of prompts is" in each["reason"] for each in letters_of_prompts)
    assert log.levels() == [1, 2]
    assert letters["change levels"] > 10
    assert sum("prompts has not begun level" in each["reason"] for each in log.own(DEAD_LETTERS)) > 10

"""The log of a small example run, as its pipelines write it: two groups of two, one of whose trajectories moves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from kafka import KafkaProducer
from record_samples import PROMPT, SAMPLES, TRAJECTORY
from role_writer import write_as_role

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from schemas import records as r
from schemas.codec import encode
from schemas.columns import flags, floats, integers, token_ids
from schemas.topics import (
    BATCHES,
    EXPERIENCES,
    INBOX,
    METRICS,
    PLANS,
    PROGRESS,
    PROMPTS,
    RELAY,
    REPLICAS,
    SETTLED,
    TRAJECTORIES,
    Topic,
)

RUN = "example-run"
STARTED_AT = 1_700_000_000_000
OLD, NEW = r.PolicyVersion(1, 1), r.PolicyVersion(1, 2)


def response(count: int) -> r.Response:
    return r.Response(
        token_ids(range(count)),
        floats([-0.05, -3.0, -0.7, -9.0, 0.0, -1.5][:count]),
        flags([at != 4 for at in range(count)]),
    )


def prompt(number: int) -> r.Prompt:
    return replace(PROMPT, number=number, samples=2, text=f"What is {number} + 1?", environment="")


def trajectory(number: int, member: int, tokens: int = 6) -> r.Trajectory:
    return replace(
        TRAJECTORY,
        prompt=prompt(number),
        member=member,
        response=response(tokens),
        version_spans=(r.VersionSpan(OLD, tokens),),
        newest_version=NEW,
        replica=1,
        lease=2,
        attempt=0,
    )


@dataclass
class Writer:
    """Writes records with timestamps one second apart."""

    client: ClientProperties
    producer: Any
    seconds: int = 0

    def __call__(self, topic: Topic, *rows: Any, partition: int = 0) -> None:
        value, headers = encode(*rows)
        at = STARTED_AT + 1000 * self.seconds
        self.seconds += 1
        if topic is METRICS:
            write_as_role(self.client, RUN, topic, rows, timestamp_ms=at)
            return
        key = str(rows[0].version).encode() if topic is RELAY else b"k"
        self.producer.send(topic.name(RUN), value, key, list(headers), partition, timestamp_ms=at)


def write_log(write: Writer) -> None:
    """Prompts p0 to p9. p3.1 begins at replica 0, moves to replica 1, and is trained in batch 7 with others."""
    for number in range(10):
        write(PROMPTS, prompt(number))
    plan = SAMPLES[r.RepackPlan]
    assert isinstance(plan, r.RepackPlan)
    assigned = r.Assignment(prompt(3), 1, 1, 0, 0, 4, None, None, STARTED_AT)
    write(INBOX, replace(assigned, member=0))
    write(INBOX, assigned)
    gained = r.Progress("p3.1", 1, 0, 0, 4, 0, response(2), (r.VersionSpan(OLD, 2),), None, STARTED_AT, STARTED_AT)
    write(PROGRESS, gained)
    write(PLANS, replace(plan, plan_id="1-1", moves=(r.PlannedMove(0, 1, ("p3.1", "p9.0"), 9),)))
    write(PLANS, replace(plan, plan_id="1-2"))
    write(INBOX, r.Reserve("1-1", OLD, ("p3.1",), 9, 1, 6), partition=1)
    write(INBOX, r.Release("1-1", ("p3.1",), (2,), 1, 6, 0, 4))
    write(PROGRESS, replace(gained, start=2, gained=response(1), next_owner=r.NextOwner(2, 1, 6)))
    spans = (r.VersionSpan(OLD, 3),)
    write(
        INBOX,
        replace(assigned, lease=2, replica=1, policy_version=OLD, partial=response(3), version_spans=spans),
        partition=1,
    )
    write(PROGRESS, replace(gained, trajectory_id="p9.0", lease=7))
    write(TRAJECTORIES, trajectory(3, 0), partition=1)
    write(TRAJECTORIES, trajectory(3, 1), partition=1)
    write(PROGRESS, r.TrajectoryClosed("p3.1"))
    scored = SAMPLES[r.Experience]
    assert isinstance(scored, r.Experience)
    write(
        EXPERIENCES,
        *(replace(scored, trajectory=trajectory(3, member), reward=0.25 + member) for member in (0, 1)),
        partition=1,
    )
    write(EXPERIENCES, replace(scored, trajectory=trajectory(4, 0), reward=0.5))
    for name in ("p3.0", "p3.1", "p4.0"):
        write(SETTLED, r.Settled(name, 2, "batched", "", 7, 1, 6, STARTED_AT))
    part = SAMPLES[r.MicroBatch]
    assert isinstance(part, r.MicroBatch)
    for number, names, places in (
        (6, ("p2.0",), ((0, 0),)),
        (7, ("p3.0", "p3.1"), ((1, 0),) * 2),
        (7, ("p4.0",), ((0, 0),)),
    ):
        count = len(names)
        sequences = {
            "lengths": integers([10] * count),
            "prompt_lengths": integers([4] * count),
            "rewards": floats([0.25 + int(name[-1]) for name in names]),
            "temperatures": floats([1.0] * count),
            "truncated": flags([False] * count),
            "version_epochs": integers([1] * count),
            "version_numbers": integers([1] * count),
            "staleness": integers([1] * count),
            "lineage_partitions": integers([partition for partition, _ in places]),
            "lineage_offsets": integers([offset for _, offset in places]),
        }
        tokens = pa.concat_arrays([part.token_ids] * count)
        write(BATCHES, replace(part, batch=number, trajectory_ids=names, token_ids=tokens, **sequences))
    manifest = SAMPLES[r.WeightVersion]
    assert isinstance(manifest, r.WeightVersion)
    for version, parent, batches, offset in (
        (r.PolicyVersion(1, 0), None, (), 0),
        (OLD, r.PolicyVersion(1, 0), (6,), 1),
        (NEW, OLD, (7,), 3),
        (r.PolicyVersion(2, 2), OLD, (7,), 3),
    ):
        write(
            RELAY,
            replace(
                manifest, version=version, parent=parent, batches=batches, batch_offsets=(offset,), step=version.number
            ),
        )
    write(METRICS, r.Metric("trainer", 2, {"reward/mean": 0.5, "trajectories": 3.0, "time/update": 0.25}, STARTED_AT))
    write(REPLICAS, SAMPLES[r.ReplicaStatus])
    write(PLANS, SAMPLES[r.MoveOutcome])  # of another plan and other trajectories


def write_run(broker: Broker) -> ClientProperties:
    """Write the run `RUN` and return its client properties."""
    client = ClientProperties.at(broker.bootstrap_servers)
    settings = {"retention.ms": "-1"}  # the timestamps are old
    counts = {TRAJECTORIES: 2, EXPERIENCES: 2, INBOX: 2}
    topics = (PROMPTS, INBOX, PROGRESS, PLANS, TRAJECTORIES, EXPERIENCES, SETTLED, BATCHES, RELAY, METRICS, REPLICAS)
    with admin_client(client) as admin:
        create_topics(admin, [TopicSpec(topic.name(RUN), counts.get(topic, 1), config=settings) for topic in topics])
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers)
    write_log(Writer(client, producer))
    producer.flush()
    producer.close()
    return client

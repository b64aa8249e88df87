"""Topics and group offsets: the few administrative questions that are asked here, over kafka-python's admin client."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType, OffsetSpec
from kafka.errors import RetriableError, TopicAlreadyExistsError, UnknownTopicOrPartitionError, for_code
from kafka.structs import OffsetAndMetadata

from infra.kafka.properties import ClientProperties


class TopicError(RuntimeError):
    """A topic could not be created or deleted, or stands otherwise than it was asked for."""


@dataclass(frozen=True)
class TopicSpec:
    """What a topic is to be. A replication factor of -1 is the cluster's default; `config` is by Kafka's names."""

    name: str
    partitions: int
    replication_factor: int = -1
    config: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TopicDescription:
    """What a topic is: `config` holds only what differs from the broker's default."""

    name: str
    partitions: int
    replication_factor: int
    config: Mapping[str, str]


def admin_client(properties: ClientProperties) -> KafkaAdminClient:
    """Return a connected admin client, a context manager. Raises KafkaTimeoutError when no broker answers."""
    return KafkaAdminClient(**properties.admin())


def create_topics(client: KafkaAdminClient, specs: Iterable[TopicSpec]) -> list[str]:
    """Create the topics that are missing, wait until each has its leaders, and return the names of those created.

    Repeating it changes nothing. Raises TopicError, having looked at every topic, when one that is already there has
    another number of partitions, or one could not be created; RetriableError where another try may succeed.
    """
    wanted = {spec.name: spec for spec in specs}
    if not wanted:
        return []
    missing = {name: wanted[name] for name in wanted.keys() - set(client.list_topics())}
    created, problems = _create(client, missing) if missing else ([], [])
    if not problems:
        client.wait_for_topics(list(wanted), timeout_ms=30_000)
    standing = _existing(client, sorted(wanted.keys() - set(created)))
    problems += [
        f"{name} has {len(partitions)} partitions where {wanted[name].partitions} are wanted; "
        "the number is fixed for a run: delete the topic, or choose another run name"
        for name, partitions in standing.items()
        if len(partitions) != wanted[name].partitions
    ]
    if problems:
        raise TopicError("\n".join(sorted(problems)))
    return sorted(created)


def list_topics(client: KafkaAdminClient, prefix: str = "") -> list[str]:
    """Return the names, sorted, of the topics that begin with a prefix; Kafka's own (`__...`) only when asked for."""
    internal = prefix.startswith("__")
    names = (name for name in client.list_topics() if internal or not name.startswith("__"))
    return sorted(name for name in names if name.startswith(prefix))


def describe(client: KafkaAdminClient, topics: Sequence[str]) -> dict[str, TopicDescription]:
    """Return, for those of the named topics that exist, their partitions, replication and non-default settings."""
    found = _existing(client, topics)
    resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in found]
    configs = client.describe_configs(resources)["topic"] if resources else {}
    return {
        name: TopicDescription(
            name=name,
            partitions=len(partitions),
            replication_factor=len(partitions[0]["replica_nodes"]),
            config={key: entry["value"] for key, entry in configs[name].items()},
        )
        for name, partitions in found.items()
    }


def committed_offsets(client: KafkaAdminClient, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return a group's committed offsets with their metadata; empty for a group that has none.

    Of a transaction that is open, or was committed a moment ago and is being completed, the offsets before it are
    returned; a reader that must not see those asks a read_committed consumer, which waits.
    """
    offsets = client.list_group_offsets(group)[group]
    return {partition: committed for partition, committed in offsets.items() if committed.offset >= 0}


def beginning_offsets(client: KafkaAdminClient, topics: Sequence[str]) -> dict[TopicPartition, int]:
    """Return the first offset that each partition of the topics still has. Raises KafkaError for an unknown topic."""
    return _offsets(client, topics, OffsetSpec.EARLIEST)


def end_offsets(
    client: KafkaAdminClient, topics: Sequence[str], *, committed: bool = True
) -> dict[TopicPartition, int]:
    """Return the offset after the last record of each partition of the topics.

    `committed`: after the last record that a read_committed reader can see now, which an open transaction holds back.
    Raises KafkaError for an unknown topic.
    """
    return _offsets(client, topics, OffsetSpec.LATEST, "read_committed" if committed else "read_uncommitted")


def delete_records(client: KafkaAdminClient, before: Mapping[tuple[str, int], int]) -> None:
    """Delete what stands before an offset, by topic and partition. Raises KafkaError, as for a compacted topic."""
    if before:
        client.delete_records({TopicPartition(*where): offset for where, offset in before.items()})


def delete_topics(client: KafkaAdminClient, prefix: str, timeout_s: float = 30.0) -> list[str]:
    """Delete every topic that begins with a prefix, wait until they are gone, and return their names.

    Raises ValueError for an empty prefix, which would be everything, and TopicError when one is still there after
    `timeout_s` seconds.
    """
    if not prefix:
        raise ValueError("an empty prefix would delete every topic of the cluster")
    names = list_topics(client, prefix)
    if names:
        client.delete_topics(names)
    deadline = time.monotonic() + timeout_s
    while left := sorted(set(names) & set(client.list_topics())):
        if time.monotonic() > deadline:
            raise TopicError(f"still there {timeout_s:g} s after they were deleted: {', '.join(left)}")
        time.sleep(0.05)
    return names


def _create(client: KafkaAdminClient, specs: Mapping[str, TopicSpec]) -> tuple[list[str], list[str]]:
    """Create topics; return the names of those created, and a line for each that could not be."""
    request = {
        name: {
            "num_partitions": spec.partitions,
            "replication_factor": spec.replication_factor,
            "configs": dict(spec.config),
        }
        for name, spec in specs.items()
    }
    created, problems = [], []
    for topic in client.create_topics(request, raise_errors=False)["topics"]:
        error = for_code(topic["error_code"])
        if topic["error_code"] == 0:
            created.append(topic["name"])
        elif issubclass(error, RetriableError):
            raise error(f"{topic['name']} cannot be created yet: {topic['error_message'] or error.__name__}")
        elif error is not TopicAlreadyExistsError:  # another process was quicker: as good
            problems.append(f"{topic['name']} cannot be created: {topic['error_message'] or error.__name__}")
    return created, problems


def _existing(client: KafkaAdminClient, topics: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the partitions, as the brokers' metadata has them, of those of the named topics that exist."""
    if not topics:
        return {}
    described = client.describe_topics(list(topics))
    return {topic["name"]: topic["partitions"] for topic in described if topic["error_code"] == 0}


def _offsets(
    client: KafkaAdminClient, topics: Sequence[str], spec: OffsetSpec, isolation: str = "read_uncommitted"
) -> dict[TopicPartition, int]:
    partitions = _existing(client, topics)
    if unknown := sorted(set(topics) - partitions.keys()):
        raise UnknownTopicOrPartitionError(f"no such topic: {', '.join(unknown)}")
    wanted = {TopicPartition(name, entry["partition_index"]): spec for name in topics for entry in partitions[name]}
    found = client.list_partition_offsets(wanted, isolation_level=isolation)
    return {partition: entry.offset for partition, entry in found.items()}

"""Administration of topics and group offsets, over kafka-python's admin client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType, OffsetSpec
from kafka.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    InvalidReplicationFactorError,
    NotCoordinatorError,
    RetriableError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
    for_code,
)
from kafka.structs import OffsetAndMetadata

from infra.counted import counted
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import retry_transient
from infra.kafka.stored.admin import StoredAdmin

COORDINATOR_S = 30.0
"""How long a new cluster may take to create its topic of group offsets, or a broker that has started to load it."""
_NO_COORDINATOR = CoordinatorNotAvailableError, CoordinatorLoadInProgressError, NotCoordinatorError


class TopicError(RuntimeError):
    """A topic could not be created or deleted, or exists with other settings."""


class OtherPartitions(TopicError):
    """Topics exist with another number of partitions than the configuration gives them."""


@dataclass(frozen=True)
class TopicSpec:
    """The settings of a new topic. Replication factor -1 is the cluster's default; `config` uses Kafka's names.

    `partitions_from` names the setting that decides the number of partitions.
    """

    name: str
    partitions: int
    replication_factor: int = -1
    config: Mapping[str, str] = field(default_factory=dict)
    partitions_from: str = "the number of partitions"


@dataclass(frozen=True)
class TopicDescription:
    """The settings of an existing topic. `config` has only those that differ from the broker's defaults."""

    name: str
    partitions: int
    replication_factor: int
    config: Mapping[str, str]


def admin_client(properties: ClientProperties, **arguments: Any) -> KafkaAdminClient:
    """Return a connected admin client, a context manager; for the log of a stopped broker one that only reads.

    `arguments` are kafka-python's. Raises KafkaTimeoutError if no broker responds.
    """
    if properties.clients is not None:
        return cast("KafkaAdminClient", properties.clients.admin())
    if properties.log is not None:
        return cast("KafkaAdminClient", StoredAdmin(properties.log))
    return KafkaAdminClient(**properties.admin(**arguments))


def cluster_id(client: KafkaAdminClient) -> str:
    """The id of the cluster, which it keeps as long as its data. Raises KafkaError."""
    return str(client.describe_cluster()["cluster_id"])


def create_topics(client: KafkaAdminClient, specs: Iterable[TopicSpec]) -> list[str]:
    """Create the missing topics, wait until each has its leaders, and return the names of those created.

    Idempotent. Raises, after checking every topic, OtherPartitions if an existing one has another number of partitions,
    and TopicError if one could not be created; RetriableError if a retry may succeed.
    """
    wanted = {spec.name: spec for spec in specs}
    if not wanted:
        return []
    missing = {name: wanted[name] for name in wanted.keys() - set(client.list_topics())}
    created, problems = _create(client, missing) if missing else ([], [])
    if not problems:
        client.wait_for_topics(list(wanted), timeout_ms=30_000)
    differing = partition_problems(wanted.values(), partition_counts(client, sorted(wanted.keys() - set(created))))
    if problems or differing:
        raise (OtherPartitions if differing else TopicError)("\n".join(sorted([*problems, *differing])))
    return sorted(created)


def partition_counts(client: KafkaAdminClient, topics: Sequence[str]) -> dict[str, int]:
    """The number of partitions of those of `topics` that exist."""
    return {name: len(partitions) for name, partitions in _existing(client, topics).items()}


def replication_factors(client: KafkaAdminClient, topics: Sequence[str]) -> dict[str, int]:
    """The replication factors of those of `topics` that exist."""
    return {name: len(found[0]["replica_nodes"]) for name, found in _existing(client, topics).items()}


def partition_problems(specs: Iterable[TopicSpec], counts: Mapping[str, int]) -> list[str]:
    """A line for each setting of `specs` that does not fit existing topics, whose partitions are `counts`."""
    found: dict[tuple[str, int, int], list[str]] = {}
    for spec in specs:
        if (count := counts.get(spec.name, spec.partitions)) != spec.partitions:
            found.setdefault((spec.partitions_from, spec.partitions, count), []).append(spec.name)
    return [
        f"{setting} is {wanted}, but {_some(sorted(names))} {'has' if len(names) == 1 else 'have'} "
        f"{counted(count, 'partition')}, a number that is fixed for a run: set {setting} back to {count}, "
        "or choose another run name"
        for (setting, wanted, count), names in found.items()
    ]


def check_new_topics(client: KafkaAdminClient, specs: Iterable[TopicSpec]) -> None:
    """Raise TopicError if the brokers would not create those of `specs` that are missing; creates none."""
    wanted = {spec.name: spec for spec in specs}
    missing = {name: wanted[name] for name in wanted.keys() - set(client.list_topics())}
    if problems := _create(client, missing, validate_only=True)[1] if missing else []:
        raise TopicError("\n".join(sorted(problems)))


def list_topics(client: KafkaAdminClient, prefix: str = "") -> list[str]:
    """Return the sorted names of the topics with a prefix; internal topics (`__...`) only for a prefix `__...`."""
    internal = prefix.startswith("__")
    names = (name for name in client.list_topics() if internal or not name.startswith("__"))
    return sorted(name for name in names if name.startswith(prefix))


def describe(client: KafkaAdminClient, topics: Sequence[str]) -> dict[str, TopicDescription]:
    """Return partitions, replication factor and non-default settings of those of `topics` that exist."""
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

    While a transaction is open, or committed but not yet completed, the offsets before it are returned. A reader that
    needs the later ones must use a read_committed consumer, which waits. Raises KafkaError if the group has no
    coordinator within COORDINATOR_S.
    """
    offsets = retry_transient(lambda: client.list_group_offsets(group)[group], _NO_COORDINATOR, COORDINATOR_S)
    return {partition: committed for partition, committed in offsets.items() if committed.offset >= 0}


def beginning_offsets(client: KafkaAdminClient, topics: Sequence[str]) -> dict[TopicPartition, int]:
    """Return the first available offset of each partition of the topics. Raises KafkaError for an unknown topic."""
    return _offsets(client, topics, OffsetSpec.EARLIEST)


def end_offsets(
    client: KafkaAdminClient, topics: Sequence[str], *, committed: bool = True
) -> dict[TopicPartition, int]:
    """Return the offset after the last record of each partition of the topics.

    `committed`: the last stable offset, which an open transaction holds back.
    Raises KafkaError for an unknown topic.
    """
    return _offsets(client, topics, OffsetSpec.LATEST, "read_committed" if committed else "read_uncommitted")


def delete_records(client: KafkaAdminClient, before: Mapping[tuple[str, int], int]) -> None:
    """Delete the records before an offset, by topic and partition. Raises KafkaError, e.g. for a compacted topic."""
    if before:
        client.delete_records({TopicPartition(*where): offset for where, offset in before.items()})


_DELETED_WITHIN_S = 30.0


def delete_topics(client: KafkaAdminClient, prefix: str) -> list[str]:
    """Delete every topic with a prefix, wait until they are gone, and return their names.

    Raises ValueError for an empty prefix, which would match all topics, and TopicError if one still exists after 30
    seconds.
    """
    if not prefix:
        raise ValueError("an empty prefix would delete every topic of the cluster")
    names = list_topics(client, prefix)
    if names:
        client.delete_topics(names)
    deadline = time.monotonic() + _DELETED_WITHIN_S
    while left := sorted(set(names) & set(client.list_topics())):
        if time.monotonic() > deadline:
            raise TopicError(f"topics still exist {_DELETED_WITHIN_S:g} s after their deletion: {', '.join(left)}")
        time.sleep(0.05)
    return names


def _create(
    client: KafkaAdminClient, specs: Mapping[str, TopicSpec], *, validate_only: bool = False
) -> tuple[list[str], list[str]]:
    """Create topics; return the names of those created, and a line for each reason why others cannot be created."""
    request = {
        name: {
            "num_partitions": spec.partitions,
            "replication_factor": spec.replication_factor,
            "configs": dict(spec.config),
        }
        for name, spec in specs.items()
    }
    created: list[str] = []
    refused: dict[str, list[str]] = {}
    for topic in client.create_topics(request, validate_only=validate_only, raise_errors=False)["topics"]:
        error = for_code(topic["error_code"])
        reason = topic["error_message"] or error.__name__
        if topic["error_code"] == 0:
            created.append(topic["name"])
        elif issubclass(error, RetriableError):
            raise error(f"{topic['name']} cannot be created yet: {reason}")
        elif error is not TopicAlreadyExistsError:  # another process has created it
            advice = "; lower kafka.replication_factor" if error is InvalidReplicationFactorError else ""
            refused.setdefault(reason + advice, []).append(topic["name"])
    return created, [f"{_some(sorted(names))} cannot be created: {reason}" for reason, names in refused.items()]


def _some(names: Sequence[str]) -> str:
    more = len(names) - 1
    return f"{names[0]} and {counted(more, 'more topic')}" if more else names[0]


def _existing(client: KafkaAdminClient, topics: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the partitions, from the brokers' metadata, of those of `topics` that exist."""
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


STABLE_PAUSE_S = 0.05
ABORT_S = 30.0
"""Brokers abort the transaction of a dead process at most so long after its time-out."""


def stable_ends(
    client: KafkaAdminClient,
    topic: str,
    transaction_timeout_s: float,
    pause: Callable[[float], None] = time.sleep,
) -> dict[int, int]:
    """The committed end of each partition, once every record written before the call is committed or aborted.

    The markers of a transaction reach its partitions one by one, and another open transaction hides the records after
    it: without the wait, one partition may show a transaction that another does not show yet. Raises RuntimeError if a
    transaction is still open when the brokers must have aborted it, as `transaction_timeout_s` of the roles has passed.
    """
    written = end_offsets(client, [topic], committed=False)
    left = timeout_s = transaction_timeout_s + ABORT_S
    while any((ends := end_offsets(client, [topic]))[where] < end for where, end in written.items()):
        if left <= 0:
            raise RuntimeError(f"{topic}: a transaction has been open for {timeout_s:g} s; try again later")
        pause(STABLE_PAUSE_S)
        left -= STABLE_PAUSE_S
    return {where.partition: end for where, end in ends.items()}

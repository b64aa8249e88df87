"""Topics and offsets on the real broker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaProducer, TopicPartition
from kafka.errors import CoordinatorNotAvailableError, NotCoordinatorError, UnknownTopicOrPartitionError
from kafka.structs import OffsetAndMetadata
from waiting import until

from infra.kafka.admin import (
    OtherPartitions,
    TopicDescription,
    TopicError,
    TopicSpec,
    admin_client,
    beginning_offsets,
    committed_offsets,
    create_topics,
    delete_topics,
    describe,
    end_offsets,
    list_topics,
)
from infra.kafka.broker import Broker, free_port
from infra.kafka.clients import KafkaClients
from infra.kafka.log_ends import EndsUnknown, log_ends
from infra.kafka.properties import ClientProperties
from infra.kafka.session_config import Partition


@pytest.fixture(scope="module")
def client(broker: Broker) -> Iterator[KafkaAdminClient]:
    with admin_client(ClientProperties.at(broker.bootstrap_servers)) as connected:
        yield connected


def test_create_topics_creates_missing_topics_once(client: KafkaAdminClient, run_id: str) -> None:
    first = TopicSpec(f"{run_id}.a", 3, 1, {"cleanup.policy": "compact"})
    second = TopicSpec(f"{run_id}.b", 1)
    assert create_topics(client, []) == []
    assert create_topics(client, [first]) == [first.name]
    assert create_topics(client, [first, second]) == [second.name]
    assert create_topics(client, [first, second]) == []
    assert describe(client, [first.name, second.name, f"{run_id}.c"]) == {
        first.name: TopicDescription(first.name, 3, 1, {"cleanup.policy": "compact"}),
        second.name: TopicDescription(second.name, 1, 1, {}),
    }


def test_create_topics_rejects_other_partition_count(client: KafkaAdminClient, run_id: str) -> None:
    create_topics(client, [TopicSpec(f"{run_id}.a", 2)])
    spec = TopicSpec(f"{run_id}.a", 4, partitions_from="kafka.partitions")
    with pytest.raises(OtherPartitions) as refused:
        create_topics(client, [spec, TopicSpec(f"{run_id}.b", 1)])
    assert str(refused.value) == (
        f"kafka.partitions is 4, but {run_id}.a has 2 partitions, a number that is fixed for a run: "
        "set kafka.partitions back to 2, or choose another run name"
    )
    assert list_topics(client, run_id) == [f"{run_id}.a", f"{run_id}.b"]


def test_create_topics_reports_rejection_by_broker(client: KafkaAdminClient, run_id: str) -> None:
    with pytest.raises(TopicError, match=r"(?s)\.a cannot be created.*cleanup.*\.b cannot be created.*replication"):
        create_topics(
            client, [TopicSpec(f"{run_id}.a", 1, 1, {"cleanup.policy": "hoard"}), TopicSpec(f"{run_id}.b", 1, 3)]
        )
    assert list_topics(client, run_id) == []


def test_delete_topics_deletes_only_the_prefix(client: KafkaAdminClient, run_id: str) -> None:
    specs = [TopicSpec(f"{run_id}.{name}", 1) for name in ("a.x", "a.y", "b")]
    create_topics(client, specs)
    assert delete_topics(client, f"{run_id}.a.") == [f"{run_id}.a.x", f"{run_id}.a.y"]
    assert list_topics(client, run_id) == [f"{run_id}.b"]
    assert create_topics(client, specs) == [f"{run_id}.a.x", f"{run_id}.a.y"]  # at once: they are really gone
    assert delete_topics(client, f"{run_id}.none") == []
    with pytest.raises(ValueError, match="every topic"):
        delete_topics(client, "")


def test_end_offsets_excludes_open_transaction(broker: Broker, client: KafkaAdminClient, run_id: str) -> None:
    create_topics(client, [TopicSpec(run_id, 2)])
    first, second = TopicPartition(run_id, 0), TopicPartition(run_id, 1)
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, transactional_id=run_id)
    producer.init_transactions()
    try:
        producer.begin_transaction()
        producer.send(run_id, b"1", partition=0)
        producer.send_offsets_to_transaction({first: OffsetAndMetadata(7, "why", -1)}, run_id)
        assert committed_offsets(client, run_id) == {}
        producer.commit_transaction()
        until(lambda: committed_offsets(client, run_id) == {first: OffsetAndMetadata(7, "why", -1)})
        # The record and the commit's marker, which the broker writes a moment after it has confirmed the commit.
        until(lambda: end_offsets(client, [run_id]) == {first: 2, second: 0})

        producer.begin_transaction()
        producer.send(run_id, b"2", partition=0).get(timeout=10)
        assert end_offsets(client, [run_id]) == {first: 2, second: 0}
        assert end_offsets(client, [run_id], committed=False) == {first: 3, second: 0}
        clients = KafkaClients(ClientProperties.at(broker.bootstrap_servers))
        assert log_ends(clients, f"{run_id}.ends", [Partition(*first), Partition(*second)], 60) == {first: 3, second: 0}
        assert log_ends(clients, f"{run_id}.ends", [Partition(*second)], 60) == {second: 2}  # a record, a marker
        producer.abort_transaction()
    finally:
        producer.close()
    assert beginning_offsets(client, [run_id]) == {first: 0, second: 0}


def test_log_ends_are_unknown_without_a_broker() -> None:
    with pytest.raises(EndsUnknown, match="Connection refused"):
        log_ends(KafkaClients(ClientProperties.at(f"127.0.0.1:{free_port()}")), "ends", [Partition("topic", 0)], 60)


def test_end_offsets_rejects_unknown_topic(client: KafkaAdminClient, run_id: str) -> None:
    with pytest.raises(UnknownTopicOrPartitionError, match=rf"no such topic: {run_id}"):
        end_offsets(client, [run_id])
    assert committed_offsets(client, run_id) == {}


def test_committed_offsets_wait_for_a_coordinator(client: KafkaAdminClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new cluster creates its topic of group offsets at the first request."""
    errors = [CoordinatorNotAvailableError("no topic yet"), NotCoordinatorError("moved")]

    def list_offsets(self: KafkaAdminClient, group: str) -> dict[str, dict[Any, Any]]:
        if errors:
            raise errors.pop()
        return {group: {}}

    monkeypatch.setattr(KafkaAdminClient, "list_group_offsets", list_offsets)
    assert committed_offsets(client, "group") == {}
    assert not errors


def test_list_topics_hides_internal_topics(client: KafkaAdminClient, broker: Broker) -> None:
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, transactional_id="internal")
    producer.init_transactions()
    producer.close()
    assert "__transaction_state" in list_topics(client, "__")
    assert not [name for name in list_topics(client) if name.startswith("__")]

"""The log of a stopped broker is read from its files: the same answers as from the broker, without one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.structs import OffsetAndMetadata
from markers import wait_for_markers
from waiting import until

from infra.kafka.admin import (
    TopicSpec,
    admin_client,
    committed_offsets,
    create_topics,
    delete_records,
    describe,
    list_topics,
    stable_ends,
)
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.lag import group_lags, list_groups, record_counts
from infra.kafka.offset_span import parse_span
from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic, partition_ranges, resolve_span
from infra.kafka.topic_reader import StoredRecord, first_offset, last_records, raw_decoder, read_topic

GROUP = "group-of-test"
BEGAN = 1_700_000_000_000
SETTINGS = {"cleanup.policy": "compact", "max.message.bytes": "2000000"}
TOPICS = {"many": 3, "settings": 1, "cut": 1, "empty": 2}


def produce(broker: Broker) -> None:
    """Transactions, one of them aborted, offsets of a group, compressed batches, and deleted records."""
    with admin_client(broker.client()) as admin:
        specs = [TopicSpec(name, partitions) for name, partitions in TOPICS.items() if name != "settings"]
        create_topics(admin, [*specs, TopicSpec("settings", 1, config=SETTINGS)])
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap_servers, transactional_id="t")
    producer.init_transactions()
    for number in range(6):
        producer.begin_transaction()
        for partition in range(3):
            for row in range(5):
                producer.send(
                    "many", b"%d %d" % (number, row), b"key", [("h", b"x")], partition, BEGAN + 1_000 * number
                )
        producer.send_offsets_to_transaction({TopicPartition("many", 1): OffsetAndMetadata(number, "", -1)}, GROUP)
        producer.flush()
        if number == 3:
            producer.abort_transaction()
        else:
            producer.commit_transaction()
    producer.close()
    for compression in (None, "gzip", "lz4"):
        with KafkaProducer(bootstrap_servers=broker.bootstrap_servers, compression_type=compression) as plain:
            plain.send("settings", b"v" * 500, b"k")
            for number in range(4):
                plain.send("cut", str(number).encode(), timestamp_ms=BEGAN + number)
    with admin_client(broker.client()) as admin:
        delete_records(admin, {("cut", 0): 5})
        # A commit returns before its markers are written, those of the offsets included.
        until(lambda: [each.offset for each in committed_offsets(admin, GROUP).values()] == [5])
    wait_for_markers(broker.client(), "many")


def whole_number(value: bytes | None, headers: Any) -> int | None:
    return None if value is None else int(value.split()[0])


def in_order(records: Iterable[StoredRecord]) -> list[StoredRecord]:
    """Partitions are read in any order."""
    return sorted(records, key=lambda each: (each.partition, each.offset))


ANSWERS: dict[str, Callable[[ClientProperties], Any]] = {
    "records": lambda client: [in_order(read_topic(client, name, decoder=raw_decoder)) for name in TOPICS],
    "one partition": lambda client: list(read_topic(client, "many", partitions=[2], decoder=raw_decoder)),
    "newest": lambda client: last_records(client, "many", 7, decoder=raw_decoder),
    "ranges": lambda client: [partition_ranges(client, name) for name in TOPICS],
    "times": lambda client: [
        resolve_span(client, "many", parse_span([f"s@{BEGAN + after}"], 0)) for after in (0, 1_500, 99_000)
    ],
    "bisection": lambda client: [first_offset(client, "many", 0, whole_number, number) for number in range(8)],
}


def lags(client: ClientProperties) -> Any:
    with admin_client(client) as admin:
        groups = list_groups(admin, "group")
        return groups, group_lags(admin, groups), stable_ends(admin, "many", 60.0)


def topics(client: ClientProperties) -> Any:
    with admin_client(client) as admin:
        names = list_topics(admin)
        return names, describe(admin, names), record_counts(admin, names)


ANSWERS |= {"lags": lags, "topics": topics}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The log folder of a stopped broker, and the answers that it gave."""
    data = tmp_path_factory.mktemp("stopped")
    with start_broker(BrokerConfig(data)) as broker:
        produce(broker)
        answers = {name: ask(broker.client()) for name, ask in ANSWERS.items()}
    return data / "log", answers


@pytest.mark.parametrize("name", ANSWERS)
def test_stored_log_answers_as_its_broker(stopped: tuple[Path, dict[str, Any]], name: str) -> None:
    log, expected = stopped
    assert ANSWERS[name](ClientProperties.of_log(log)) == expected[name]
    assert expected[name]


def test_stored_log_reports_an_unknown_topic(stopped: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(UnknownTopic, match="there is no topic missing"):
        list(read_topic(ClientProperties.of_log(stopped[0]), "missing"))


def test_stored_log_opens_no_client(stopped: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(RuntimeError, match="is stopped, and its log can only be read"):
        ClientProperties.of_log(stopped[0]).producer()


def values_of(log: Path, topic: str = "many") -> list[bytes]:
    return [record.rows[0] for record in read_topic(ClientProperties.of_log(log), topic, decoder=raw_decoder)]


def segment(log: Path, partition: str) -> Path:
    """The newest file of `partition`."""
    return max((log / partition).glob("*.log"))


def last_batch(data: bytes) -> int:
    """Where the last batch begins; the length of a batch is at byte 8."""
    at = 0
    while (after := at + 12 + int.from_bytes(data[at + 8 : at + 12])) < len(data):
        at = after
    return at


@pytest.mark.parametrize("tail", [b"\0" * 20, b"\0" * 4096, "half a batch"])
def test_stored_log_ends_before_an_incomplete_batch(
    stopped: tuple[Path, dict[str, Any]], tmp_path: Path, tail: bytes | str
) -> None:
    log = shutil.copytree(stopped[0], tmp_path / "log")
    with segment(log, "settings-0").open("r+b") as file:
        begun = file.read(100) if isinstance(tail, str) else tail
        file.seek(0, 2)
        file.write(begun)
    assert values_of(log, "settings") == values_of(stopped[0], "settings")


def test_stored_log_without_a_marker_has_the_logged_outcome(
    stopped: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The last transaction of the topic was committed; its marker in partition 0 is lost."""
    log = shutil.copytree(stopped[0], tmp_path / "log")
    file = segment(log, "many-0")
    with file.open("r+b") as opened:
        opened.truncate(last_batch(file.read_bytes()))
    assert sorted(values_of(log)) == sorted(values_of(stopped[0]))
    for number in range(4):  # a log without any decision
        segment(log, f"__transaction_state-{number}").write_bytes(b"")
    undecided = shutil.copytree(log, tmp_path / "undecided")
    assert len(values_of(undecided)) == len(values_of(stopped[0])) - 5

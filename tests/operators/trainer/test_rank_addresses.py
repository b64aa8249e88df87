"""The address of rank 0 in a file or a topic: the latest start that has begun counts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.note import Note
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.kafka.role_notes import NotesUnavailable
from infra.kafka.session import Partition, Session, SessionConfig
from operators.trainer.rank_addresses import Addresses, AddressFile, AddressTopic
from operators.trainer.rank_services import PROCESS
from operators.trainer.ranks import Ranks
from operators.trainer.rendezvous import wait_for_ranks
from schemas.records import RankAddress
from schemas.topics import RANKS, RESTORE, group_name

TWO = [Ranks(rank, 2) for rank in range(2)]


class RanksTopic:
    """The topic `ranks` of `run`, whose rank 0 has committed start `begun`."""

    def __init__(self, client: ClientProperties, run: str) -> None:
        self.client, self.run, self.begun, self.available = client, run, 3, True
        with admin_client(client) as admin:
            create_topics(admin, [TopicSpec(RANKS.name(run), 1), TopicSpec(RESTORE.name(run), 1)])

    def open(self) -> AddressTopic:
        return AddressTopic(self.client, self.run, self._notes)

    def _notes(self, pipeline: str) -> dict[int, Note]:
        assert pipeline == "trainer"
        if not self.available:
            raise NotesUnavailable("no broker responds")
        return {0: Note(self.begun), 1: Note(99)}


@pytest.fixture
def topic(broker: Broker, run_id: str) -> RanksTopic:
    return RanksTopic(ClientProperties.at(broker.bootstrap_servers), run_id)


def port_of(addresses: Addresses) -> Iterator[int]:
    """The port of the newest address, after each poll."""
    while True:
        found = addresses.newest()
        if found is not None:
            yield found.port


def address(port: int) -> RankAddress:
    """An address on this machine."""
    return RankAddress("127.0.0.1", port, "of an ended rank", 2, 0, "of 1B", 0)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"host": 3}', "no JSON"])
def test_invalid_address_file_is_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "ranks.json").write_text(content)
    assert AddressFile(tmp_path / "ranks.json").newest() is None


def test_ranks_connect_to_the_newest_address_of_the_topic(topic: RanksTopic) -> None:
    with socket.socket() as unused, ThreadPoolExecutor() as threads:
        unused.bind(("127.0.0.1", 0))  # so that nobody else listens there
        topic.open().write(address(unused.getsockname()[1]), 1)
        with BoundedProducer(topic.client) as producer:
            producer.send(RANKS.name(topic.run), b"garbage", key=b"rank 0")
        second = threads.submit(wait_for_ranks, topic.open(), TWO[1])
        first = threads.submit(wait_for_ranks, topic.open(), TWO[0], start=2)
        for rendezvous in (first.result(60), second.result(60)):
            rendezvous.check()


def test_address_of_a_paused_start_does_not_count(topic: RanksTopic) -> None:
    """It writes after its successor, which it has not noticed yet."""
    for start, port in ((1, 1), (2, 2), (3, 3), (3, 4), (2, 5)):
        topic.open().write(address(port), start)
    with closing(topic.open()) as reader:
        assert next(port_of(reader)) == 4


def test_address_of_a_start_to_come_does_not_count(topic: RanksTopic, caplog: pytest.LogCaptureFixture) -> None:
    """Another program has written it: compaction keeps it for ever."""
    writer = topic.open()
    writer.write(address(1), 3)
    writer.write(address(6666), 9_999_999_999)
    with closing(topic.open()) as reader:
        ports = port_of(reader)
        assert [next(ports) for _ in range(3)] == [1, 1, 1]
        assert caplog.text.count("has an address of start 9999999999 of rank 0, but rank 0 has begun 3") == 1
        writer.write(address(2), 4)
        assert [next(ports) for _ in range(3)] == [1, 1, 1]
        topic.begun = 4
        assert 2 in islice(ports, 10)


def test_rank_waits_on_while_the_notes_cannot_be_read(topic: RanksTopic, caplog: pytest.LogCaptureFixture) -> None:
    writer = topic.open()
    with closing(topic.open()) as reader:
        ports = port_of(reader)
        writer.write(address(1), 3)
        assert next(ports) == 1
        topic.available = False
        writer.write(address(2), 4)
        assert [next(ports) for _ in range(10)] == [1] * 10
        assert 0 < caplog.text.count("is not known: no broker responds") < 10
        topic.available, topic.begun = True, 4
        assert 2 in islice(ports, 10)


def test_start_of_rank_0_has_begun_when_it_writes(topic: RanksTopic) -> None:
    """Its session has committed the number of the start, which other ranks read without a group."""
    config = SessionConfig(topic.client, group_name(topic.run, "trainer"), (), Partition(RESTORE.name(topic.run), 0))
    with closing(Session(config)) as session, closing(PROCESS.addresses(topic.client, topic.run)) as addresses:
        addresses.write(address(1), session.start)
        addresses.write(address(6666), session.start + 1)
        assert next(port_of(addresses)) == 1

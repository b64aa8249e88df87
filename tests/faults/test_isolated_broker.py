"""A broker of three no longer reaches the others, but clients reach it: what it answers is old."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from faults.cluster import PORT, Cluster
from faults.network import Network, NoNetwork, within
from kafka import TopicPartition
from kafka.errors import KafkaError

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.note import last_note, uncommitted_consumer
from infra.kafka.properties import ClientProperties
from infra.kafka.session import Session, SessionLost
from infra.kafka.session_config import Input, Partition, SessionConfig

BROKERS = ("k1", "k2", "k3")
RESTORE = Partition("restore", 0)
PATIENCE_S = 90.0
MOST_STARTS = 40
"""A start takes up to 15 s; about each third one asks the isolated broker first."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three brokers and a host `c` of clients."""
    try:
        with Network((*BROKERS, "c")) as network:
            cluster = Cluster(network, BROKERS, tmp_path_factory.mktemp("isolated"))
            try:
                cluster.start()
                yield cluster
            finally:
                cluster.stop()
    except NoNetwork as error:
        pytest.skip(str(error))


def client_of(cluster: Cluster, names: tuple[str, ...]) -> ClientProperties:
    servers = ",".join(f"{cluster.network.hosts[name].address}:{PORT}" for name in names)
    return ClientProperties({"bootstrap.servers": servers, "request.timeout.ms": "3000", "max.block.ms": "5000"})


def session_of(client: ClientProperties) -> Session:
    inputs = (Input("in", (0,)),)
    return Session(SessionConfig(client, "copier", inputs, RESTORE, ledger=(Partition("out", 0),)))


def leader_of(client: ClientProperties) -> str:
    """The broker that leads the partition of notes, according to the metadata of `client`."""
    with admin_client(client) as admin:
        (topic,) = admin.describe_topics([RESTORE.topic])
    (partition,) = topic["partitions"]
    return BROKERS[partition["leader_id"] - 1]


def noted(client: ClientProperties) -> object:
    """The state in the last note that `client` reads."""
    consumer = uncommitted_consumer(client)
    try:
        note = last_note(consumer, TopicPartition(*RESTORE), "copier")
    except KafkaError as error:
        return error
    finally:
        consumer.close(autocommit=False)
    return None if note is None else note.state


def committed(client: ClientProperties, state: dict[str, int]) -> bool:
    """Whether a start has committed `state`: not if the coordinator is still being elected."""
    try:
        session = session_of(client)
        session.commit([], {}, {}, state)
        session.close()
    except SessionLost:
        return False
    return True


def started(client: ClientProperties) -> object:
    """The state that a start continues from, or why there is none."""
    try:
        session = session_of(client)
    except SessionLost as lost:
        return lost
    session.close()
    return session.note.state


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_start_does_not_continue_from_an_isolated_broker(cluster: Cluster) -> None:
    """A client is given the address of the isolated broker; for metadata it then asks any of the three."""
    network = cluster.network

    def run() -> list[object]:
        with admin_client(cluster.client) as admin:
            create_topics(admin, [TopicSpec(name, 1) for name in ("in", "out", "restore")])
        wait_until(lambda: committed(cluster.client, {"n": 1}))
        wait_until(lambda: noted(cluster.client) == {"n": 1})  # its marker is written
        isolated = leader_of(cluster.client)
        others = client_of(cluster, tuple(name for name in BROKERS if name != isolated))
        for rule in (rule for other in BROKERS if other != isolated for rule in network.both(isolated, other)):
            rule.loss = 1.0
        wait_until(lambda: leader_of(others) != isolated)
        wait_until(lambda: committed(others, {"n": 2}))
        alone = client_of(cluster, (isolated,))
        wait_until(lambda: noted(alone) == {"n": 1})  # the fault has an effect
        starts = list[object]()
        while not starts or "cut off from the others and no longer leads it" not in str(starts[-1]):
            starts.append(started(alone))
            assert {"n": 1} not in starts
            assert "cannot be read" not in str(starts[-1])  # not for long: the client asks for the leaders again
            assert len(starts) < MOST_STARTS
        return starts

    starts = within(network.hosts["c"], run)
    assert all(each == {"n": 2} or isinstance(each, SessionLost) for each in starts)

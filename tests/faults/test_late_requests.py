"""A transactional request that arrives late, after later requests of its client, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults.anomalies import Anomalies, anomalies, settled
from faults.copying_shard import CopyingShard
from faults.kafka_frames import TRANSACTIONAL, Api
from faults.log_files import read_topic
from faults.proxied_broker import ProxiedBroker
from faults.request_faults import (
    LateRequest,
    Match,
    RecordedRequests,
    before_request,
    between_offsets_and_outputs,
)
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from infra.kafka.admin import TopicSpec, admin_client, create_topics

NUMBERS = 2000
LATEST = 10
"""The request is delivered before each of so many later requests: a session's opening and a transaction."""


@pytest.fixture(autouse=True)
def every_transaction_has_group_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that their requests are late, too."""
    monkeypatch.setattr("infra.kafka.group_progress.GROUP_OFFSETS_S", 0.0)


@pytest.fixture(scope="module")
def kafka(proxied: ProxiedBroker) -> ProxiedBroker:
    """A broker with a topic of the numbers that shards copy."""
    with admin_client(proxied.direct) as admin:
        create_topics(admin, [TopicSpec("numbers", 1)])
    with KafkaProducer(**proxied.direct.producer()) as producer:
        for number in range(NUMBERS):
            producer.send("numbers", str(number).encode())
    return proxied


@pytest.fixture
def shard(kafka: ProxiedBroker, run_id: str) -> Iterator[CopyingShard]:
    with admin_client(kafka.direct) as admin:
        create_topics(admin, [TopicSpec(run_id, 2), TopicSpec(f"{run_id}-restore", 1)])
    shard = CopyingShard(kafka.proxied, "numbers", run_id)
    yield shard
    shard.close()
    kafka.proxy.clear()


def anomalies_of(kafka: ProxiedBroker, shard: CopyingShard) -> Anomalies:
    """The anomalies of the copies of `shard`, from the broker's log files."""
    logs = kafka.broker.config.data_dir / "log"
    return anomalies(settled(lambda: read_topic(logs, shard.config.group)), shard.copied)


def test_transaction_writes_outputs_before_offsets(kafka: ProxiedBroker, shard: CopyingShard) -> None:
    """A transaction that is ended between the two then repeats outputs that the ledger knows, and loses none."""
    shard.run(until=lambda: True)
    recorded = kafka.proxy.add(RecordedRequests(Match(TRANSACTIONAL, shard.config.group)))
    before = shard.commits
    shard.run(until=lambda: shard.commits > before + 2)
    apis = [request.api for request in recorded.seen]
    transactions = [[]]
    for api in apis:
        transactions[-1].append(api)
        if api == Api.END_TXN:
            transactions.append([])
    assert len(transactions) == 4
    for transaction in transactions[:3]:
        offsets = transaction.index(Api.ADD_OFFSETS_TO_TXN)
        assert Api.PRODUCE in transaction[:offsets]
        assert transaction.index(Api.TXN_OFFSET_COMMIT) > offsets


CASES = [pytest.param(api, id=api.name.lower()) for api in TRANSACTIONAL]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("api", CASES)
def test_session_loses_nothing_by_a_late_request(kafka: ProxiedBroker, shard: CopyingShard, api: Api) -> None:
    """The late request is delivered before the first, second, ... request that its client sends afterwards."""
    reader = KafkaConsumer(**kafka.direct.consumer(group_id=shard.config.group, isolation_level="read_committed"))
    shard.run(until=lambda: True)
    went_back = []
    for when in [*map(before_request, range(1, LATEST + 1)), between_offsets_and_outputs()]:
        late = kafka.proxy.add(LateRequest(Match([api], shard.config.group), when))
        if api == Api.INIT_PRODUCER_ID:
            shard.close()  # the next session asks for one
        shard.run(until=late.released.is_set)
        kafka.proxy.clear()
        late.check_outcome()
        if (offset := reader.committed(TopicPartition("numbers", 0))) != shard.copied:
            went_back.append(f"offset {offset} where {shard.copied} was committed, after {late.seen[-1]}")
    reader.close(autocommit=False)
    shard.run(until=lambda: True)
    found = anomalies_of(kafka, shard)
    assert not found, f"{found}\n{kafka.proxy.describe()}"
    assert not went_back, kafka.proxy.describe()

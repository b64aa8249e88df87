"""On a Kafka with a low transaction.max.timeout.ms all transactions keep to the run's kafka.transaction_timeout_s."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kafka import KafkaProducer

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker, BrokerConfig, start_broker
from infra.kafka.session import Partition, Session
from infra.kafka.session_config import Input, SessionConfig
from operators.io.config import ShardConfig
from operators.io.elements import PartitionKey, Restored
from operators.placement.config import PlacementConfig
from operators.placement.place_trajectories import PlaceTrajectories
from schemas.topics import EXPERIENCES, METRICS, RESTORE, SETTLED, TRAJECTORIES, group_name

RUN = "low-bound"
BOUND_S = 9.0
TOPICS = EXPERIENCES, METRICS, RESTORE, SETTLED, TRAJECTORIES


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    bound = {"transaction.max.timeout.ms": str(int(BOUND_S * 1000))}
    # A command may come later than the broker would have ended the transaction itself.
    bound["transaction.abort.timed.out.transaction.cleanup.interval.ms"] = "3600000"
    with start_broker(BrokerConfig(tmp_path_factory.mktemp("kafka"), overrides=bound)) as broker:
        with admin_client(broker.client()) as admin:
            create_topics(admin, [TopicSpec(topic.name(RUN), 1) for topic in TOPICS])
        yield broker


@pytest.fixture
def laminar(
    bounded: Broker,
    command: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, str, str]]:
    """A command for the run, whose folder has its configuration."""
    folder = tmp_path / "runs" / RUN
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f"[kafka]\ntransaction_timeout_s = {BOUND_S}")
    monkeypatch.chdir(tmp_path)
    return lambda *words: command(*words, "--run", RUN, "-b", bounded.bootstrap_servers)


def begin(broker: Broker, group: str) -> KafkaProducer:
    """A producer with an open transaction in the topic `settled`."""
    producer = KafkaProducer(
        **broker.client().producer(transactional_id=group, transaction_timeout_ms=int(BOUND_S * 1000))
    )
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(SETTLED.name(RUN), b"undecided").get(10)
    return producer


def test_placement_fences_and_reads_ends(bounded: Broker) -> None:
    shard = ShardConfig(bounded.client(), RUN, "placement", transaction_timeout_s=BOUND_S)
    fold = PlaceTrajectories(PlacementConfig(), shard, 1, 1).restore(Restored(shard.group, 1, (), {}, {}))
    begin(bounded, group_name(RUN, "rollout", 3)).close()
    fold._fence(3)
    place = PartitionKey("trajectories", 0)
    assert fold._ended._read_ends([place]) == {place: 0}


def test_abort_ends_an_open_transaction(bounded: Broker, laminar: Callable[..., tuple[int, str, str]]) -> None:
    writer = begin(bounded, group_name(RUN, "experience"))
    found = json.loads(laminar("topics", "transactions", "list", "--json")[1])
    number = next(row["producer_id"] for row in found if row["transactional_id"] == group_name(RUN, "experience"))
    code, out, err = laminar("topics", "transactions", "abort", str(number), "--execute")
    assert (code, "aborted, producer fenced" in out) == (0, True), err
    writer.close()


def test_reset_moves_offsets(bounded: Broker, laminar: Callable[..., tuple[int, str, str]]) -> None:
    place = Partition(SETTLED.name(RUN), 0)
    inputs, restore = (Input(place.topic, (0,)),), Partition(RESTORE.name(RUN), 0)
    config = SessionConfig(
        bounded.client(), group_name(RUN, "placement"), inputs, restore, transaction_timeout_s=BOUND_S
    )
    session = Session(config)
    session.commit([], {place: 0}, {}, {}, last=True)
    session.close()
    code, _, err = laminar("topics", "reset", "placement", "settled", "--to", "beginning", "--execute")
    assert code == 0, err


@pytest.mark.parametrize("words", [("--transaction-timeout", "9"), ()])
def test_export_and_import_begin(words: tuple[str, ...], laminar: Callable[..., tuple[int, str, str]]) -> None:
    """By the option where there is no configuration, as in a container, else by the configuration."""
    if words:
        Path("runs", RUN, "config.toml").unlink()
    for command in (("export", "experiences", "data"), ("import", "data")):
        code, _, err = laminar(*command, *words)
        assert code == 0, err

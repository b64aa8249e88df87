"""Runs on a real broker, whole ones and ones with something planted: the audit names what is wrong, and only that."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from kafka import KafkaConsumer, KafkaProducer, OffsetAndMetadata, TopicPartition
from run_stories import assignment, experience, manifest, micro_batch, settled, trajectory

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.properties import ClientProperties
from pipelines.audit.audit_run import audit
from pipelines.audit.balance import Placed
from pipelines.cli.main import main
from schemas.codec import encode
from schemas.topics import BATCHES, EXPERIENCES, INBOX, RELAY, SETTLED, TRAJECTORIES, Topic, group_name

TOPICS = (INBOX, TRAJECTORIES, EXPERIENCES, SETTLED, BATCHES, RELAY)
NAMES = [f"p{number}.{member}" for number in range(4) for member in range(2)]


class Run:
    """A run's topics, two partitions each, written by hand; a group of trajectories keeps to one partition."""

    def __init__(self, broker: Broker, run: str) -> None:
        self.run = run
        self.servers = broker.bootstrap_servers
        self.client = ClientProperties.at(self.servers)
        with admin_client(self.client) as admin:
            create_topics(admin, [TopicSpec(topic.name(run), 2) for topic in TOPICS])
        self.producer = KafkaProducer(bootstrap_servers=self.servers)

    def write(self, topic: Topic, *rows: object, partition: int = 0) -> None:
        """Each row as a record of its own."""
        for row in rows:
            value, headers = encode(row)
            self.producer.send(topic.name(self.run), value, headers=list(headers), partition=partition)
        self.producer.flush()

    def done(self, pipeline: str, topic: Topic, offset: int, partition: int = 0) -> None:
        """Commit `offset` as the pipeline's restore offset."""
        consumer = KafkaConsumer(
            bootstrap_servers=self.servers, group_id=group_name(self.run, pipeline), enable_auto_commit=False
        )
        consumer.commit({TopicPartition(topic.name(self.run), partition): OffsetAndMetadata(offset, "", -1)})
        consumer.close()

    def live(self) -> None:
        """Eight trajectories: six trained in two batches, one dropped, one that score has yet to look at."""
        self.write(INBOX, *map(assignment, NAMES))
        self.write(TRAJECTORIES, *map(trajectory, NAMES))
        self.write(EXPERIENCES, *map(experience, NAMES[:7]))
        self.done("score", TRAJECTORIES, 7)
        for batch, names in ((0, NAMES[0:3]), (1, NAMES[3:6])):
            self.write(SETTLED, *(settled(name, batch=batch) for name in names))
            self.write(BATCHES, micro_batch(batch, *names))
        self.write(SETTLED, settled(NAMES[6], "dropped", "over-age"))
        self.done("experience", EXPERIENCES, 7)
        self.write(RELAY, manifest("1.0", None), manifest("1.1", "1.0", 0), manifest("1.2", "1.1", 1))


@pytest.fixture
def run(broker: Broker, run_id: str) -> Iterator[Run]:
    made = Run(broker, run_id)
    made.live()
    yield made
    made.producer.close()


def test_a_run_at_work_balances(run: Run) -> None:
    found = audit(run.client, run.run)
    assert found.balanced
    numbers = {name: number for name, number in found.numbers().items() if number}
    assert numbers == {"dispatched": 8, "trained": 6, "dropped": 1, "in_flight": 1}
    assert found.in_flight == {"score": 1}


def lose_at_score(run: Run) -> None:
    run.done("score", TRAJECTORIES, 8)


def lose_in_the_buffer(run: Run) -> None:
    run.write(INBOX, assignment("p9.0"))
    run.write(TRAJECTORIES, trajectory("p9.0"), partition=1)
    run.write(EXPERIENCES, experience("p9.0"), partition=1)
    run.done("experience", EXPERIENCES, 1, partition=1)


def lose_in_evaluation(run: Run) -> None:
    run.write(EXPERIENCES, experience("e9.0"), partition=1)
    run.done("evaluation", EXPERIENCES, 1, partition=1)


def lose_on_the_way_to_a_batch(run: Run) -> None:
    run.write(SETTLED, settled("p9.0", batch=1))


def lose_at_the_trainer(run: Run) -> None:
    run.write(SETTLED, settled("p9.0", batch=2))
    run.write(BATCHES, micro_batch(2, "p9.0"))
    run.write(RELAY, manifest("1.3", "1.2", 3))


@pytest.mark.parametrize(
    ("plant", "lost"),
    [
        (lose_at_score, Placed("p3.1", "score")),
        (lose_in_the_buffer, Placed("p9.0", "experience")),
        (lose_in_evaluation, Placed("e9.0", "evaluation")),
        (lose_on_the_way_to_a_batch, Placed("p9.0", "experience")),
        (lose_at_the_trainer, Placed("p9.0", "training")),
    ],
)
def test_a_lost_trajectory_is_named_with_the_stage_that_lost_it(
    run: Run, plant: Callable[[Run], None], lost: Placed
) -> None:
    plant(run)
    found = audit(run.client, run.run)
    assert found.lost == (lost,)
    assert not found.balanced


def test_a_duplicate_finish_is_counted_and_nothing_is_wrong(run: Run) -> None:
    run.write(TRAJECTORIES, trajectory(NAMES[0]))
    found = audit(run.client, run.run)
    assert found.balanced
    assert found.duplicate_finishes == 1


def test_what_is_aborted_does_not_count_and_what_is_open_is_waited_for(run: Run) -> None:
    producer = KafkaProducer(bootstrap_servers=run.servers, transactional_id=group_name(run.run, "score"))
    producer.init_transactions()
    value, headers = encode(experience(NAMES[7]))
    producer.begin_transaction()
    producer.send(EXPERIENCES.name(run.run), value, headers=list(headers), partition=0).get(timeout=10)
    producer.abort_transaction()
    assert audit(run.client, run.run).in_flight == {"score": 1}
    producer.begin_transaction()
    producer.send(EXPERIENCES.name(run.run), value, headers=list(headers), partition=0)
    producer.commit_transaction()
    producer.close()
    assert audit(run.client, run.run).in_flight == {"experience": 1}


def test_what_cannot_be_decoded_is_counted(run: Run) -> None:
    run.producer.send(BATCHES.name(run.run), b"rubbish", partition=1).get(timeout=10)
    assert audit(run.client, run.run).undecodable == 1


def test_what_retention_took_is_expired_not_lost(run: Run) -> None:
    with admin_client(run.client) as admin:
        admin.delete_records({TopicPartition(BATCHES.name(run.run), 0): 1})
    found = audit(run.client, run.run)
    assert found.numbers()["expired"] == 3
    assert found.trained == 3
    assert found.balanced


def test_a_run_that_is_not_there_is_an_error(run: Run) -> None:
    with pytest.raises(RuntimeError, match="nothing to audit"):
        audit(run.client, "never-was")


def laminar(run: Run, *words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["runs", "audit", "--run", run.run, "-b", run.servers, *words])
    return int(ended.value.code or 0)


def test_the_command_prints_the_balance(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert laminar(run) == 0
    printed = capsys.readouterr().out
    assert "balanced" in printed
    assert NAMES[7] not in printed
    assert laminar(run, "--ended", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["balanced"] is True
    assert found["named"]["waiting"] == [{"trajectory_id": NAMES[7], "stage": "score"}]


def test_the_command_names_everything_that_is_wrong(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    lose_at_score(run)
    run.write(SETTLED, settled("p7.0", "dropped", ""))
    run.write(BATCHES, micro_batch(1, NAMES[0]))
    assert laminar(run) == 1
    printed = capsys.readouterr().out
    assert "NOT BALANCED" in printed
    for line in ("lost at score: p3.1", "trained twice: p0.0", "dropped without a reason: p7.0"):
        assert line in printed

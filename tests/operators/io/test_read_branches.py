"""Two shards as branches of one pipeline, on a real broker and Beam's embedded runner."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
from apache_beam.io.restriction_trackers import OffsetRange
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from shuffling_pipeline import OUTPUT, SOURCE, build, shard

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.broker import Broker
from infra.kafka.sessions import SESSIONS
from infra.runners.run import run_pipeline
from infra.runners.stopping import STOPPING
from operators.io import read_branches
from operators.io.branch_polls import BranchPoll, BranchPolls
from operators.io.config import ShardConfig
from operators.io.elements import Polled, ReceivedRecord
from operators.io.poll_range import PollTracker
from operators.io.read_branches import _PollBranchesFn
from operators.io.shards import close_shards
from pipelines.branches import build_branches
from schemas.codec import decode, encode
from schemas.records import Metric
from schemas.topics import DEAD_LETTERS, RESTORE


@pytest.fixture
def shards(broker: Broker, run_id: str) -> Iterator[list[ShardConfig]]:
    """Two shards with topics of their own."""
    found = [shard(broker.bootstrap_servers, f"{run_id}-{which}") for which in ("first", "second")]
    for config in found:
        with admin_client(config.client) as admin:
            topics = (SOURCE, OUTPUT, DEAD_LETTERS, RESTORE)
            create_topics(admin, [TopicSpec(topic.name(config.run), 1) for topic in topics])
    yield found
    close_shards()


def feed(config: ShardConfig, steps: range) -> None:
    with KafkaProducer(**config.client.producer()) as producer:
        for step in steps:
            value, headers = encode(Metric("a", step, {}, 0))
            producer.send(SOURCE.name(config.run), value, headers=list(headers))
        producer.flush()


def committed_steps(config: ShardConfig, count: int) -> list[int]:
    """The steps of `count` committed outputs, or more, in order; waits for them."""
    consumer = KafkaConsumer(**config.client.consumer(group_id=None, isolation_level="read_committed"))
    partition = TopicPartition(OUTPUT.name(config.run), 0)
    consumer.assign([partition])
    consumer.seek_to_beginning(partition)
    steps: list[int] = []
    for _ in range(600):
        for records in consumer.poll(timeout_ms=100).values():
            steps += [row.step for record in records for row in decode(record.value, record.headers)]
        if len(steps) >= count:
            break
    consumer.close()
    return sorted(steps)


def test_branches_process_their_shards_and_continue_after_a_stop(shards: list[ShardConfig]) -> None:
    builds = {config.run: partial(_build, config=config) for config in shards}
    for start in (1, 2):
        for config in shards:
            feed(config, range(20 * start - 20, 20 * start))
        running = threading.Thread(
            target=run_pipeline,
            args=(partial(build_branches, builds=builds), "embedded", (), close_shards),
            daemon=True,
        )
        running.start()
        try:
            assert [committed_steps(config, 20 * start) for config in shards] == [list(range(20 * start))] * 2
            starts = [session.start for config in shards if (session := SESSIONS.get(config.group)) is not None]
            assert starts == [start, start]
        finally:
            STOPPING.set()
            running.join(30)
        assert not running.is_alive()
        assert [SESSIONS.get(config.group) for config in shards] == [None, None]
        assert not any(thread.name.startswith("poll ") for thread in threading.enumerate())


class _Polls(BranchPolls):
    """Polls that have been made: none is made by a thread."""

    def __init__(self, *elements: Polled) -> None:
        super().__init__([], lambda config: pytest.fail("no source"), lambda group: 0.0)
        self._folded = {"group": threading.Semaphore(0)}
        for element in elements:
            self.put_back(BranchPoll("branch", "group", element))


class _Tracker(PollTracker):
    """Accepts one poll."""

    def __init__(self) -> None:
        super().__init__(OffsetRange(0, 1))


def test_branches_keep_an_element_that_the_runner_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (
        Polled("group", 1, (ReceivedRecord("prompts", 0, offset, None, 1000 + offset),), (), {}, caught_up=True)
        for offset in range(2)
    )
    polls, watermark = _Polls(first, second), ManualWatermarkEstimator(None)
    monkeypatch.setattr(read_branches, "_polls_of", lambda shards: polls)
    emitted = list(_PollBranchesFn(60.0).process((), _Tracker(), watermark))  # type: ignore[arg-type]
    assert [(each.tag, each.value.value, each.value.timestamp) for each in emitted] == [("branch", first, 1)]
    assert watermark.current_watermark() == 1
    assert [each.element for each in polls.stop()] == [second]


def _build(begin: object, config: ShardConfig) -> None:
    build(begin, config)  # type: ignore[arg-type]

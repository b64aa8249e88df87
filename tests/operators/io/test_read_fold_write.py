"""Source, step and sink on a real broker, driven as by a runner, also by one that fails."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from apache_beam.io.restriction_trackers import OffsetRange
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.runners.sdf_utils import RestrictionTrackerView, ThreadsafeRestrictionTracker
from apache_beam.transforms.window import TimestampedValue
from kafka import KafkaAdminClient, KafkaProducer, TopicPartition
from shuffling_pipeline import OUTPUT, SOURCE, Shuffle, Shuffler, build, shard
from unrun_pipelines import unrun_pipeline
from waiting import until

from infra.kafka.admin import TopicSpec, admin_client, committed_offsets, create_topics
from infra.kafka.broker import Broker
from infra.kafka.log_gaps import LogTruncated
from infra.kafka.note import last_note, uncommitted_consumer
from infra.kafka.sessions import SESSIONS
from infra.kafka.topic_reader import read_topic
from infra.runners.options import RunnerName
from infra.runners.run import run_pipeline
from infra.runners.stopping import STOPPING
from operators.io.config import ShardConfig
from operators.io.elements import Emission, Polled, Restored
from operators.io.fold_records import _FoldFn, is_busy
from operators.io.poll_range import FOREVER, PollTracker
from operators.io.read_topics import ReadTopics, _PollTopicsFn
from operators.io.shards import close_shards
from operators.io.write_transactionally import _CommitFn
from schemas.codec import encode
from schemas.records import DeadLetter, Metric
from schemas.topics import DEAD_LETTERS, RESTORE


@pytest.fixture
def config(broker: Broker, run_id: str) -> Iterator[ShardConfig]:
    config = shard(broker.bootstrap_servers, run_id, commit_s=0.0)
    with admin_client(config.client) as admin:
        create_topics(admin, [TopicSpec(topic.name(run_id), 1) for topic in (SOURCE, OUTPUT, DEAD_LETTERS, RESTORE)])
    yield config
    close_shards()


def feed(config: ShardConfig, steps: Sequence[int], *garbage: bytes) -> None:
    producer = KafkaProducer(**config.client.producer())
    for value in garbage:
        producer.send(SOURCE.name(config.run), value)
    for step in steps:
        value, headers = encode(Metric("a", step, {}, 0))
        producer.send(SOURCE.name(config.run), value, headers=list(headers))
    producer.flush()
    producer.close()


def written(config: ShardConfig, topic: str) -> list[Any]:
    """Every committed record of a topic, in order."""
    return [row for record in read_topic(config.client, topic) for row in record.rows]


def is_at(admin: KafkaAdminClient, group: str, offsets: list[int]) -> bool:
    """Whether the group has committed `offsets`."""
    return [each.offset for each in committed_offsets(admin, group).values()] == offsets


def steps(config: ShardConfig) -> list[int]:
    return sorted(row.step for row in written(config, OUTPUT.name(config.run)))


class ManualRunner:
    """Runs slices of the graph: from a restriction to its residual."""

    def __init__(self, config: ShardConfig, fold: _FoldFn | None = None) -> None:
        self.config = config
        self._poll, self._fold = _PollTopicsFn((config,), 5.0), fold or _FoldFn(Shuffle())
        self._commit = _CommitFn((config,))
        self.starts: list[int] = []
        self.emissions: list[Emission] = []
        self.watermark = ManualWatermarkEstimator(None)

    def slice(self, start: int = 0, elements: int = 20) -> int:
        """Run a bundle of at most `elements` elements from poll `start`; return the poll to continue at."""
        tracker = ThreadsafeRestrictionTracker(PollTracker(OffsetRange(start, FOREVER)))
        seen = 0
        for polled in self._poll.process(self.config.group, RestrictionTrackerView(tracker), self.watermark):
            element = polled.value if isinstance(polled, TimestampedValue) else polled
            if isinstance(element, Restored):
                self.starts.append(element.start)
            for emission in self._fold.process(element):
                self.emissions.append(emission)
                self._commit.process(emission)
            seen += 1
            if seen == elements:
                tracker.try_split(0)
        self._commit.finish_bundle()
        residual = tracker.deferred_status()
        return residual[0].start if residual else start + seen

    def until(self, holds: Callable[[], bool], start: int, limit: int = 50) -> int:
        while not holds() and limit:
            start, limit = self.slice(start), limit - 1
        assert holds()
        return start


def test_runner_at_an_old_checkpoint_begins_a_new_session(
    config: ShardConfig,
) -> None:
    """The runner restores a checkpoint older than the last commit of the sink, and repeats outputs."""
    feed(config, range(40))
    runner = ManualRunner(config)
    old = runner.slice(0, elements=3)
    feed(config, range(40, 60))
    runner.until(lambda: len(steps(config)) == 60, old)
    session = SESSIONS.get(config.group)
    replayed = list(runner.emissions)

    restored = ManualRunner(config)
    for emission in replayed[1:]:  # in flight when the runner made its checkpoint
        restored._commit.process(emission)
    at = restored.slice(old)
    for emission in replayed[2:]:
        restored._commit.process(emission)
    assert (runner.starts, restored.starts) == ([1], [2])
    assert SESSIONS.get(config.group) is not session
    feed(config, range(60, 70))
    restored.until(lambda: len(steps(config)) >= 70, at)
    assert steps(config) == list(range(70))


class _FailsOnce(_FoldFn):
    failures = 1

    def process(self, element: Restored | Polled) -> Iterator[Emission]:
        if isinstance(element, Polled) and element.records and self.failures:
            self.failures -= 1
            raise ValueError("a bundle that fails")
        yield from super().process(element)


def test_records_of_a_failed_bundle_are_polled_again(config: ShardConfig) -> None:
    feed(config, range(20))
    runner = ManualRunner(config, _FailsOnce(Shuffle()))
    at = runner.slice(0, elements=1)
    with pytest.raises(ValueError, match="fails"):
        runner.until(lambda: False, at, limit=500)
    runner.until(lambda: len(steps(config)) == 20, at)
    assert runner.starts == [1, 2]
    assert steps(config) == list(range(20))


def test_dead_letter_is_in_the_transaction_that_skips_its_record(config: ShardConfig) -> None:
    feed(config, [], b"\x00garbage", b"{}")
    runner = ManualRunner(config)
    runner.slice(0, elements=1)
    commits: list[tuple[set[str], int]] = []
    session = SESSIONS.get(config.group)
    assert session is not None
    commit = session.commit

    def recording_commit(outputs: Any, offsets: Any, *rest: Any) -> dict[str, int]:
        outputs = list(outputs)
        if outputs or offsets:
            commits.append(({o.topic for o in outputs}, *offsets.values()))
        return commit(outputs, offsets, *rest)

    session.commit = recording_commit  # type: ignore[method-assign]
    dead = DEAD_LETTERS.name(config.run)
    runner.until(lambda: len(written(config, dead)) == 2, 1)
    assert ({dead}, 2) in commits
    assert all(offset == 0 for topics, offset in commits[: commits.index(({dead}, 2))])
    letters = written(config, dead)
    assert [(letter.offset, letter.payload) for letter in letters] == [(0, b"\x00garbage"), (1, b"{}")]
    assert {type(letter) for letter in letters} == {DeadLetter}


def test_close_shards_commits_and_the_next_run_is_a_new_start(config: ShardConfig) -> None:
    class Closing(Shuffler):
        closed = 0

        def close(self) -> None:
            Closing.closed += 1
            assert SESSIONS.get(config.group) is not None  # folds are closed before sessions

    @dataclass(frozen=True)
    class Steps:
        def restore(self, restored: Restored) -> Shuffler:
            return Closing(restored)

    feed(config, range(5))
    runner = ManualRunner(config, _FoldFn(Steps()))
    at = runner.slice(0, elements=30)
    close_shards()
    assert (Closing.closed, SESSIONS.get(config.group)) == (1, None)
    close_shards()  # idempotent
    assert Closing.closed == 1
    runner.slice(at)
    assert runner.starts == [1, 2]


def test_finished_bundle_has_committed_its_emissions(config: ShardConfig) -> None:
    runner = ManualRunner(config)
    at = runner.slice(0, elements=1)
    session = SESSIONS.get(config.group)
    assert session is not None
    commit, commits = session.commit, 0

    def slow(*arguments: Any) -> dict[str, int]:
        nonlocal commits
        time.sleep(0.3)
        first = commit(*arguments)
        commits += 1
        return first

    session.commit = slow  # type: ignore[method-assign]
    runner.slice(at, elements=1)
    assert (len(runner.emissions), commits) == (1, 1)


def test_source_does_not_wait_for_input_of_a_busy_step(config: ShardConfig) -> None:
    class Busy(Shuffler):
        def busy(self) -> bool:
            return True

    @dataclass(frozen=True)
    class Steps:
        def restore(self, restored: Restored) -> Shuffler:
            return Busy(restored)

    idle = ManualRunner(replace(config, slice_s=0.3, poll_s=0.1))
    at = idle.slice(0, elements=10_000)
    assert at <= 5
    close_shards()
    busy = ManualRunner(replace(config, slice_s=20.0, poll_s=20.0), _FoldFn(Steps()))
    busy.slice(0, elements=1)
    assert is_busy(config.group)
    assert busy.slice(1, elements=30) > 20


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.9])
def test_restriction_is_checkpointed_but_never_split(fraction: float) -> None:
    tracker = PollTracker(OffsetRange(0, FOREVER))
    assert tracker.try_claim(3)
    split = tracker.try_split(fraction)
    assert split == (None if fraction else (OffsetRange(0, 4), OffsetRange(4, FOREVER)))
    assert tracker.try_claim(4) == (split is None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # raised by Beam when Flink stops
def test_pipeline_stops_and_runs_again_in_the_same_process(
    config: ShardConfig, run_id: str, runner: RunnerName
) -> None:
    for start in (1, 2):
        feed(config, range(20 * start - 20, 20 * start))
        running = threading.Thread(
            target=run_pipeline, args=(lambda p: build(p, config), runner, (), close_shards), daemon=True
        )
        running.start()
        try:
            deadline = time.monotonic() + 120
            while len(steps(config)) < 20 * start and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            STOPPING.set()
            running.join(30)
        assert not running.is_alive()
        assert not STOPPING.is_set()
        assert steps(config) == list(range(20 * start))
        with contextlib.closing(uncommitted_consumer(config.client)) as observer:
            note = last_note(observer, TopicPartition(*config.session().restore), config.group)
        assert note is not None
        assert note.start == start
        with admin_client(config.client) as admin:  # Kafka shows the group's once the marker is written
            until(partial(is_at, admin, config.group, list(note.offsets.values())))


@pytest.mark.parametrize(("option", "seconds"), [("--runner=FnApiRunner", 600.0), ("--runner=PrismRunner", 5.0)])
def test_slice_length_depends_on_the_runner(config: ShardConfig, option: str, seconds: float) -> None:
    polled = unrun_pipeline(option) | ReadTopics(config)
    assert polled.producer.transform.fn._slice_s == seconds


def test_pipeline_fails_if_its_log_was_truncated(config: ShardConfig) -> None:
    feed(config, range(20))
    runner = ManualRunner(config)
    runner.until(lambda: len(steps(config)) == 20, runner.slice(0, elements=1))
    feed(config, range(20, 40))
    close_shards()
    with admin_client(config.client) as admin:
        admin.delete_records({TopicPartition(SOURCE.name(config.run), 0): -1})
    with pytest.raises(LogTruncated, match=r"begins at offset \d+, after \d+\. Unprocessed records are gone"):
        run_pipeline(lambda pipeline: build(pipeline, config), "embedded", (), close_shards)

"""The rollout's fold: which commands it handles, when it publishes, and its heartbeats."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from in_memory_log import Log, Shard
from record_factories import PARTITIONS, manifest, prompt, shard, topic_input, version
from scripted_engine import ScriptedBackend, ScriptedEngine, ScriptedWeights, SilentHeartbeats

from operators.io.config import TopicInput
from operators.io.elements import Polled, Restored, ShardFold
from operators.io.repartition import repartition
from operators.rollout.config import RolloutConfig
from operators.rollout.generate_trajectories import FENCE_PROBE_S, RolloutFold
from operators.rollout.replica import Replica
from operators.rollout.report_events import report_events
from schemas.columns import token_ids
from schemas.records import Assignment, Cancel, Progress, Release
from schemas.topics import DEAD_LETTERS, INBOX, PROGRESS, RELAY, TRAJECTORIES

report = partial(report_events, partitions=PARTITIONS)


class Rollout:
    """Process 1 of two with two replicas each, on a log in memory."""

    def __init__(self, steps: int = 1, **config: Any) -> None:
        self.log, self.now = Log(), 100.0
        self.config = RolloutConfig(**{"processes": 2, "replicas": 2, "step_s": 0.0, "linger_s": 0.0, **config})
        self.weights = ScriptedWeights()
        self.beats = SilentHeartbeats()
        self.engines: list[ScriptedEngine] = []
        self.backend = ScriptedBackend(self.weights)
        self.steps = steps
        inbox = TopicInput(INBOX, tuple(self.config.hosted(1)), start="latest")
        self.shard = Shard(self.log, shard("rollout", inbox, topic_input(RELAY)), self._restore, report, repartition)
        self.publish(0)
        self.shard.start()

    def _restore(self, restored: Restored) -> ShardFold:
        self.engines = [ScriptedEngine(steps=lambda name: self.steps, context=8) for _ in self.config.hosted(1)]
        replicas = [
            Replica(index, restored.start, engine, self.weights, str, lambda: 0)
            for index, engine in zip(self.config.hosted(1), self.engines, strict=True)
        ]
        return RolloutFold(self.config, replicas, self.beats, self.backend, lambda: self.now)  # type: ignore[arg-type]

    def publish(self, number: int) -> None:
        self.weights.add(version(number))
        self.log.append(RELAY, manifest(version(number)))

    def assign(self, number: int, replica: int = 2, incarnation: int = 1, length: int = 3) -> None:
        asked = prompt(number, 1, token_ids=token_ids([1] * length))
        self.log.append(INBOX, Assignment(asked, 0, 1, 1, replica, incarnation, None, None, 0), partition=replica)

    def finished(self, turns: int = 1) -> list[tuple[str, int | None]]:
        """The finished and rejected trajectories, with their partition."""
        outputs = self.shard.run(turns)
        return [(o.record.trajectory_id, o.partition) for o in outputs if o.topic in (TRAJECTORIES, PROGRESS)]


def test_trajectories_go_to_the_partition_of_their_group() -> None:
    rollout = Rollout()
    rollout.assign(3, replica=2)
    rollout.assign(4, replica=3)
    assert rollout.finished() == [("p3.0", 1), ("p4.0", 0)]
    assert {r.trajectory_id: r.replica for r in rollout.log.rows(TRAJECTORIES)} == {"p3.0": 2, "p4.0": 3}


def test_commands_for_another_incarnation_are_ignored() -> None:
    rollout = Rollout(steps=2)
    rollout.assign(0, incarnation=2)
    assert rollout.finished(3) == []
    rollout.assign(1)
    rollout.finished()
    rollout.log.append(INBOX, Cancel(("p1.0",), (9,), 2, 2), partition=2)
    assert rollout.finished(3) == [("p1.0", 1)]


def test_command_for_a_foreign_replica_is_a_dead_letter() -> None:
    rollout = Rollout()
    rollout.log.append(INBOX, Cancel(("p1.0",), (9,), 7, 1), partition=2)
    rollout.assign(1)
    outputs = rollout.shard.run(1)
    assert [o.record.reason for o in outputs if o.topic is DEAD_LETTERS] == ["replica 7 is not hosted here"]
    assert [o.record.trajectory_id for o in outputs if o.topic is TRAJECTORIES] == ["p1.0"]


def test_cancel_stops_a_trajectory() -> None:
    rollout = Rollout(steps=3)
    rollout.assign(1)
    rollout.finished()
    rollout.log.append(INBOX, Cancel(("p1.0",), (9,), 2, 1), partition=2)
    assert rollout.finished(5) == []


def test_new_start_reads_its_inbox_from_the_end() -> None:
    rollout = Rollout(steps=5)
    rollout.assign(1, incarnation=2)
    engines = rollout.engines
    rollout.shard.start()
    assert all(engine.closed for engine in engines)
    assert rollout.beats.closed
    assert rollout.backend.closed == 1
    assert rollout.finished(9) == []
    rollout.assign(2, incarnation=2)
    assert rollout.finished(9) == [("p2.0", 0)]


def test_finished_trajectories_linger() -> None:
    rollout = Rollout(linger_s=1.0)
    rollout.assign(1, replica=2)
    assert rollout.finished() == [("p1.0", 1)]  # no other trajectory runs, so it does not linger
    rollout.steps = 6
    rollout.assign(2, replica=3)
    rollout.finished()
    rollout.steps = 1
    rollout.assign(3, replica=2)
    assert rollout.finished() == []
    assert rollout.shard.fold.busy()
    rollout.now += 0.6
    rollout.assign(4, replica=2)
    assert rollout.finished() == []
    rollout.now += 0.6  # the first has waited long enough
    assert rollout.finished() == [("p3.0", 1), ("p4.0", 0)]


def test_progress_is_published_before_the_process_stops() -> None:
    rollout = Rollout(steps=4, linger_s=100.0)
    rollout.assign(1)
    rollout.assign(2)
    assert rollout.finished(2) == []
    assert rollout.shard.fold is not None
    reported = rollout.shard.fold.fold(Polled("", 1, (), (), {}, True, last=True))
    assert [(each.trajectory_id, each.start, len(each.gained.token_ids)) for each in reported] == [
        ("p1.0", 0, 2),
        ("p2.0", 0, 2),
    ]


def test_hand_over_is_published_before_the_next_step() -> None:
    rollout = Rollout(steps=9)
    rollout.assign(0)
    rollout.assign(1, replica=3)
    assert rollout.finished() == []
    made = [engine.generated_tokens for engine in rollout.engines]
    rollout.log.append(INBOX, Release("1-1.0", ("p0.0",), (5,), 0, 1, 2, 1), partition=2)
    outputs = [type(output.record) for output in rollout.shard.run()]
    assert outputs == [Progress, Assignment]
    assert [engine.generated_tokens for engine in rollout.engines] == made
    rollout.log.append(INBOX, Release("1-1.0", ("p7.0",), (6,), 0, 1, 2, 1), partition=2)  # unknown trajectory
    rollout.shard.run()
    assert rollout.engines[1].generated_tokens == made[1] + 1


def test_engine_error_ends_the_process() -> None:
    rollout = Rollout()
    rollout.assign(0)

    def broken() -> list:
        raise RuntimeError("an illegal memory access was encountered")

    for engine in rollout.engines:
        engine.step = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        rollout.shard.run()  # not caught: the accelerator is in an unknown state
    rollout.shard.start()
    rollout.assign(0, incarnation=2)
    assert rollout.finished() == [("p0.0", 0)]


def test_rejection_is_published_to_progress() -> None:
    rollout = Rollout()
    rollout.assign(0, length=8)
    assert rollout.finished() == [("p0.0", None)]
    (refused,) = rollout.log.rows(PROGRESS)
    assert (refused.lease, refused.replica, refused.incarnation, refused.retry) == (1, 2, 1, False)


def test_weight_load_triggers_a_heartbeat() -> None:
    rollout = Rollout()
    rollout.finished()
    assert rollout.beats.changes == 2
    rollout.publish(1)
    rollout.finished(2)
    assert rollout.beats.changes == 4


@pytest.mark.parametrize(("seconds", "news"), [(0.0, False), (FENCE_PROBE_S, True)])
def test_idle_process_commits_to_detect_fencing(seconds: float, news: bool) -> None:
    rollout = Rollout()
    before = rollout.shard.fold.checkpoint({})
    rollout.now += seconds
    assert (rollout.shard.fold.checkpoint({}) != before) is news

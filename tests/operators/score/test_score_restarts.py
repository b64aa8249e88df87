"""The score operator scores each trajectory once, at its first finish, across restarts at any point."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from in_memory_log import Log, Shard
from record_factories import PARTITIONS, failed, prompt, shard, topic_input, trajectory

from operators.io.elements import Polled, Restored, ShardFold
from operators.score import error_counts, score_trajectories
from operators.score.attempt import AnswerContext
from operators.score.config import RewardSpec, Rubric, ScoreConfig
from operators.score.pool import VerifierResult
from operators.score.score_trajectories import ScoreTrajectories, split_state
from schemas.records import Experience, Metric, Trajectory
from schemas.topics import EXPERIENCES, METRICS, TRAJECTORIES, partition_of


class Judge:
    """Returns the number of the prompt as the reward."""

    def __init__(self, config: ScoreConfig) -> None:
        self.config = config
        self.closed = False

    def rubric(self, task: str) -> Rubric:
        return self.config

    def judge(self, answers: Sequence[AnswerContext]) -> list[list[VerifierResult]]:
        return [[VerifierResult(float(answer.prompt.removeprefix("question ")), None)] for answer in answers]

    def close(self) -> None:
        self.closed = True


class Score:
    """The score operator on a log in memory."""

    def __init__(self) -> None:
        self.log, self.now = Log(), 1_000_000
        config = ScoreConfig(rewards=[RewardSpec("exact")])
        self._step = ScoreTrajectories(config, PARTITIONS)
        self.shard = Shard(
            self.log, shard("score", topic_input(TRAJECTORIES, blocks=True), ledger=("experiences",)), self._restore
        )
        self.shard.start()

    def _restore(self, restored: Restored) -> ShardFold:
        return self._step.restore(restored, lambda: self.now)

    def finish(self, *records: Trajectory) -> None:
        for record in records:
            where = partition_of(record.prompt.number, PARTITIONS)
            self.log.append(TRAJECTORIES, record, record.prompt.prompt_id, where)

    def scored(self) -> list[str]:
        records: list[Experience] = self.log.rows(EXPERIENCES)
        return [record.trajectory.trajectory_id for record in records]


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> Score:
    monkeypatch.setattr(score_trajectories, "Scorer", Judge)
    return Score()


def test_experience_has_the_partition_of_its_trajectory(score: Score) -> None:
    score.finish(trajectory(prompt(3), 1), failed(prompt(2), 0))
    outputs = [output for output in score.shard.run() if output.topic is EXPERIENCES]
    rows = [(output.key, output.partition, output.record.records()[0]) for output in outputs]
    assert [(key, partition, row.reward) for key, partition, row in rows] == [("p2", 0, 0.0), ("p3", 1, 3.0)]
    assert rows[0][2].error == "generation failed: given up"


def test_groups_of_one_poll_and_purpose_share_a_record(score: Score) -> None:
    prompts = [prompt(2), prompt(4), prompt(4, purpose="evaluation"), prompt(6)]
    score.finish(*(trajectory(each, member) for member in range(2) for each in prompts))
    outputs = [output for output in score.shard.run() if output.topic is EXPERIENCES]
    keys = [[row.trajectory.trajectory_id for row in output.record.records()] for output in outputs]
    assert [output.key for output in outputs] == ["p2", "e4"]
    assert keys == [["p2.0", "p4.0", "p6.0", "p2.1", "p4.1", "p6.1"], ["e4.0", "e4.1"]]


def test_first_finish_is_scored_with_any_lease(score: Score) -> None:
    score.finish(trajectory(prompt(0), 0, lease=3), trajectory(prompt(0), 0, lease=9))
    score.shard.run()
    score.finish(trajectory(prompt(0), 0, lease=4))
    score.shard.run()
    assert [r.trajectory.lease for r in score.log.rows(EXPERIENCES)] == [3]


def test_second_finish_after_a_restart_is_ignored(score: Score) -> None:
    for number in (0, 2, 4):
        score.finish(trajectory(prompt(number), 0))
        score.shard.run()
    score.shard.run()
    fold = score.shard.fold
    score.shard.start()
    assert fold._scorer.closed  # type: ignore[union-attr]
    score.finish(*(trajectory(prompt(number), member) for number in (0, 2, 4) for member in (0, 1)))
    score.shard.run()
    assert sorted(score.scored()) == [f"p{number}.{member}" for number in (0, 2, 4) for member in (0, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_restarts_score_and_count_every_trajectory_once(
    score: Score, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(error_counts, "EVERY_MS", 0)
    rng = random.Random(seed)
    names = [(number, member) for number in range(16) for member in range(2)]
    finishes = names + rng.sample(names, 12)
    rng.shuffle(finishes)
    while finishes:
        what = rng.random()
        if what < 0.5:
            number, member = finishes.pop()
            score.finish(trajectory(prompt(number), member))
        elif what < 0.6:
            score.shard.start()
        elif what < 0.85:
            score.shard.turn(rng.choice([1, 99]), rng.sample(score.shard.places, rng.randint(1, 2)))
        else:
            score.shard.commit()
    score.shard.run()
    assert sorted(score.scored()) == sorted(f"p{number}.{member}" for number, member in names)
    metrics: list[Metric] = score.log.rows(METRICS)
    assert [metric.step for metric in metrics] == sorted({metric.step for metric in metrics})  # none is repeated
    counts = {"trajectories": 32, 'trajectories{task="chain_sum"}': 32}
    assert metrics[-1].values == {**dict.fromkeys(error_counts.COUNTS, 0), **counts}


def test_metric_waits_for_experiences(score: Score) -> None:
    """Alone it costs a transaction of its own: it follows five seconds later, or with the last poll."""

    def counted(*numbers: int, after_s: float) -> list[int]:
        score.now += int(after_s * 1000)
        score.finish(*(trajectory(prompt(number), 0) for number in numbers))
        return [each.record.step for each in score.shard.run() if each.topic is METRICS]

    assert counted(0, after_s=0) == [1]
    assert counted(1, after_s=0.5) == []  # too early
    assert counted(after_s=1) == []
    assert counted(2, after_s=1) == [3]
    assert counted(3, after_s=0.5) == []
    assert counted(after_s=4) == []
    assert counted(after_s=0.5) == [4]
    assert counted(4, after_s=0.5) == []
    assert score.shard.fold is not None
    (final,) = score.shard.fold.fold(Polled("score", 1, (), (), {}, True, last=True))
    assert final.record.step == 5


def test_split_state_gives_each_shard_its_partitions_marks() -> None:
    one = {"scored": {"t0": 5, "t1": 4, "t2": 3, "e1": 2}, "counts": {"trajectories": 9}}
    split = [split_state([one], one if shard == 0 else {}, shard, 2) for shard in range(2)]
    assert split == [
        {"scored": {"t0": 5, "t2": 3}, "counts": {"trajectories": 9}},
        {"scored": {"t1": 4, "e1": 2}, "counts": {}},
    ]
    assert split_state(split, split[0], 0, 1) == one

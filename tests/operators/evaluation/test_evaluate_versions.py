"""EvaluateVersions: each chosen version once, only its own answers count, also across restarts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from in_memory_log import Log, Shard
from record_factories import PARTITIONS, experience, failed, manifest, prompt, shard, topic_input, trajectory, version

from operators.evaluation.config import EvaluationConfig
from operators.evaluation.evaluate_versions import REPUBLISH_S, EvaluateVersions
from operators.evaluation.report_rounds import ask_questions, report_rounds
from operators.evaluation.rounds import open_round, round_name
from schemas.metric_labels import labelled
from schemas.records import Metric, PolicyVersion, Prompt, RewardComponent
from schemas.topics import EVAL_PROMPTS, EXPERIENCES, METRICS, RELAY, SETTLED, partition_of


class Evaluation:
    """The evaluation operator on a log in memory, with `questions` held-out ones."""

    def __init__(self, questions: int = 3, tasks: Sequence[str] = ("chain_sum",), **config: Any) -> None:
        self.log = Log()
        held_out = [
            prompt(number, 1, purpose="evaluation", text=f"held out {number}", task=tasks[number % len(tasks)])
            for number in range(questions)
        ]
        settings = EvaluationConfig(**{"every": 5, "periodic_questions": 2, **config})
        inputs = topic_input(EXPERIENCES, keys=("e",)), topic_input(RELAY)
        restore = EvaluateVersions(settings, lambda: held_out).restore
        self.shard = Shard(self.log, shard("evaluation", *inputs), restore, ask_questions, report_rounds)
        self.shard.start()
        self._answered = 0

    def publish(self, number: int, epoch: int = 1, final: bool = False) -> None:
        self.log.append(RELAY, manifest(version(number, epoch), final=final))

    def asked(self) -> Counter[str]:
        """The number of questions of each round."""
        return Counter(p.round for p in self.log.rows(EVAL_PROMPTS))

    def answer(self, most: int = 10**6, under: PolicyVersion | None = None, reward: float = 1.0) -> None:
        """Answer the next questions under their own version, or under `under`."""
        questions: list[Prompt] = self.log.rows(EVAL_PROMPTS)[self._answered :][:most]
        for asked in questions:
            made = trajectory(asked, 0, under=under or asked.policy_version)
            self.score(experience(made, reward))
        self._answered += len(questions)

    def score(self, record: Any) -> None:
        asked = record.trajectory.prompt
        self.log.append(EXPERIENCES, record, asked.prompt_id, partition_of(asked.number, PARTITIONS))

    def points(self) -> list[tuple[int, dict[str, float]]]:
        records: list[Metric] = self.log.rows(METRICS)
        return [(record.step, record.values) for record in records]


def test_first_version_is_evaluated_fully_in_both_modes() -> None:
    evaluation = Evaluation()
    evaluation.publish(0)
    evaluation.shard.run()
    assert evaluation.asked() == {"1.0/greedy": 3, "1.0/sampled": 3}
    prompts: list[Prompt] = evaluation.log.rows(EVAL_PROMPTS)
    assert [(p.number, p.text, p.sampling.temperature) for p in prompts] == [
        *((n, f"held out {n}", 0.0) for n in range(3)),
        *((n + 3, f"held out {n}", 1.0) for n in range(3)),
    ]
    assert {(p.policy_version, p.purpose, p.samples) for p in prompts} == {(version(0), "evaluation", 1)}
    assert evaluation.shard.run() == []


def test_complete_round_is_settled_and_published() -> None:
    evaluation = Evaluation(sampled=False)
    evaluation.publish(0)
    evaluation.shard.run()
    evaluation.answer(2, reward=1.0)
    assert evaluation.shard.run() == []
    evaluation.answer(1, reward=0.0)
    evaluation.shard.run()
    means = {"accuracy/greedy": pytest.approx(2 / 3), "reward/greedy": pytest.approx(2 / 3)}
    assert evaluation.points() == [(0, {"questions": 3.0, "final": 0.0, **means})]
    assert {(r.trajectory_id, r.outcome) for r in evaluation.log.rows(SETTLED)} == {
        (f"e{number}.0", "evaluated") for number in range(3)
    }


def test_metric_has_accuracy_by_task_for_several_tasks() -> None:
    evaluation = Evaluation(4, tasks=("sums", "words"), sampled=False)
    evaluation.publish(0)
    evaluation.shard.run()
    for reward in (1.0, 0.5, 0.0, 0.0):
        evaluation.answer(1, reward=reward)
    evaluation.shard.run()
    ((_, values),) = evaluation.points()
    figures = {
        "": (4.0, 0.25, 0.375),
        '{task="sums"}': (2.0, 0.5, 0.5),
        '{task="words"}': (2.0, 0.0, 0.25),
    }  # half a reward: not correct
    assert values == {"final": 0.0} | {
        f"{name}{task}": figure
        for task, found in figures.items()
        for name, figure in zip(("questions", "accuracy/greedy", "reward/greedy"), found, strict=True)
    }


def test_metric_counts_only_answers_of_the_version() -> None:
    evaluation = Evaluation(40, sampled=False)
    evaluation.publish(0)
    evaluation.shard.run()
    *others, second, third = evaluation.log.rows(EVAL_PROMPTS)
    right = RewardComponent("accuracy", 1.0, 0.0)
    for asked in others:
        evaluation.score(experience(trajectory(asked, 0), reward=-7.0, components=(right,)))
    evaluation.score(experience(trajectory(second, 0, under=version(4))))
    evaluation.score(experience(failed(third, 0), reward=0.0))
    evaluation.shard.run()
    means = {"unanswered/greedy": 2.0, "accuracy/greedy": 1.0, "reward/greedy": -7.0}
    assert evaluation.points() == [(0, {"questions": 38.0, "final": 0.0, **means})]


def test_round_with_few_answers_is_not_measured() -> None:
    """Two of 40 survivors are no accuracy: their version is gone, so the others never get an answer."""
    evaluation = Evaluation(40, tasks=("sums", "words"), sampled=False)
    evaluation.publish(0)
    evaluation.shard.run()
    evaluation.answer(2)
    for asked in evaluation.log.rows(EVAL_PROMPTS)[2:]:
        evaluation.score(experience(failed(asked, 0, "weight version 1.0 is gone")))
    evaluation.shard.run()
    ((_, values),) = evaluation.points()
    assert values == {
        "final": 0.0,
        "questions": 2.0,
        "unanswered/greedy": 38.0,
        **{labelled("questions", task=task): 1.0 for task in ("sums", "words")},
        **{labelled("unanswered/greedy", task=task): 19.0 for task in ("sums", "words")},
    }


@pytest.mark.parametrize("lost", [True, False])
def test_round_without_valid_answers_has_no_accuracy(lost: bool) -> None:
    """A final round of failures is given up at once: its version is not gone."""
    evaluation = Evaluation(questions=1, sampled=False)
    evaluation.publish(6, final=not lost)
    evaluation.shard.run()
    (asked,) = evaluation.log.rows(EVAL_PROMPTS)
    gone, made = failed(asked, 0, "weight version 1.0 is gone"), trajectory(asked, 0, under=version(6))
    evaluation.score(experience(gone) if lost else experience(made, error="raised"))
    evaluation.shard.run()
    values = {"final": 0.0} if lost else {"failed/greedy": 1.0, "final": 1.0, "given_up": 1.0}
    assert evaluation.points() == [(6, {"questions": 0.0, "unanswered/greedy": 1.0, **values})]
    assert len(evaluation.log.rows(SETTLED)) == 1


@pytest.mark.parametrize("late", [False, True])
def test_lost_final_version_is_evaluated_again_if_republished(late: bool) -> None:
    evaluation = Evaluation(questions=2)
    evaluation.publish(6, final=True)
    evaluation.shard.run()
    if not late:
        evaluation.publish(6, epoch=2, final=True)
        evaluation.shard.run()
    evaluation.answer(1)
    for asked in evaluation.log.rows(EVAL_PROMPTS)[1:4]:
        evaluation.score(experience(failed(asked, 0, "weight version 1.6 is gone")))
    evaluation.shard.run()
    evaluation.shard.start()
    evaluation.publish(6, epoch=2 + late, final=True)
    evaluation.shard.run()
    again = f"{2 + late}.6"
    assert evaluation.asked() - Counter({f"{again}/greedy/final": 2, f"{again}/sampled/final": 2}) == {
        "1.6/greedy/final": 2,
        "1.6/sampled/final": 2,
    }
    evaluation._answered = 4
    evaluation.answer()
    evaluation.shard.run()
    evaluation.publish(6, epoch=5, final=True)
    assert evaluation.shard.run() == []
    assert evaluation.points()[-1] == (
        6,
        {"questions": 2.0, "final": 1.0, "accuracy/sampled": 1.0, "reward/sampled": 1.0},
    )


def test_lost_final_version_is_given_up_unless_republished() -> None:
    """The run would otherwise wait for its final accuracy for ever."""
    evaluation = Evaluation(questions=2, sampled=False)
    evaluation.publish(6, final=True)
    evaluation.shard.run()
    for asked in evaluation.log.rows(EVAL_PROMPTS):
        evaluation.score(experience(failed(asked, 0, "weight version 1.6 is gone")))
    evaluation.shard.run()
    unmeasured = (6, {"questions": 0.0, "unanswered/greedy": 2.0, "final": 1.0})
    assert evaluation.points() == [unmeasured]
    evaluation.shard.start()
    fold = evaluation.shard.fold
    later = fold._clock() + REPUBLISH_S  # type: ignore[union-attr]
    fold._clock = lambda: later  # type: ignore[union-attr]
    evaluation.shard.turn()
    evaluation.shard.run()
    assert evaluation.points() == [unmeasured, unmeasured, (6, {**unmeasured[1], "given_up": 1.0})]
    evaluation.publish(6, epoch=2, final=True)
    evaluation.shard.run()
    assert evaluation.asked()["2.6/greedy/final"] == 2


@pytest.mark.parametrize(
    ("every", "published", "expected"),
    [
        (5, [4, 5, 6, 9, 10], ["1.5/greedy", "1.10/greedy"]),
        (5, [4, 7, 11], ["1.7/greedy", "1.11/greedy"]),
        (0, [5, 10], []),
        (5, [4], []),
    ],
)
def test_periodic_rounds_are_greedy_and_short(every: int, published: list[int], expected: list[str]) -> None:
    evaluation = Evaluation(sampled=False, every=every)
    evaluation.publish(0)
    evaluation.shard.run()
    evaluation.answer()
    evaluation.shard.run()
    for number in published:
        evaluation.publish(number)
        evaluation.shard.run()
        evaluation.answer()
        evaluation.shard.run()
    assert evaluation.asked() - Counter({"1.0/greedy": 3}) == dict.fromkeys(expected, 2)


def test_periodic_round_waits_and_then_takes_the_newest() -> None:
    evaluation = Evaluation(sampled=False)
    evaluation.publish(0)
    evaluation.shard.run()
    for number in (5, 6):
        evaluation.publish(number)
        assert evaluation.shard.run() == []
    evaluation.answer()
    evaluation.shard.run()
    assert evaluation.asked() == {"1.0/greedy": 3, "1.6/greedy": 2}


def test_final_version_is_evaluated_fully_beside_open_rounds() -> None:
    evaluation = Evaluation()
    evaluation.publish(0)
    evaluation.publish(3, final=True)
    evaluation.shard.run()
    assert evaluation.asked() == {"1.0/greedy": 3, "1.0/sampled": 3, "1.3/greedy/final": 3, "1.3/sampled/final": 3}
    evaluation.answer()
    evaluation.shard.run()
    assert [(step, values["final"]) for step, values in evaluation.points()] == [(0, 0.0), (0, 0.0), (3, 1.0), (3, 1.0)]
    evaluation.publish(3, epoch=2, final=True)
    assert evaluation.shard.run() == []


def test_final_version_of_a_later_goal_is_evaluated() -> None:
    evaluation = Evaluation(sampled=False)
    evaluation.publish(0)
    evaluation.publish(3, final=True)
    evaluation.shard.run()
    evaluation.answer()
    evaluation.shard.run()
    evaluation.shard.start()
    evaluation.publish(5, epoch=2, final=True)
    evaluation.shard.run()
    assert evaluation.asked()["2.5/greedy/final"] == 3


def test_replayed_versions_are_not_evaluated_again() -> None:
    evaluation = Evaluation(sampled=False)
    for number in (0, 5):
        evaluation.publish(number)
        evaluation.shard.run()
        evaluation.answer()
        evaluation.shard.run()
    evaluation.publish(0, epoch=2)
    evaluation.publish(5, epoch=2)
    assert evaluation.shard.run() == []


def test_no_round_without_questions() -> None:
    evaluation = Evaluation(questions=0)
    evaluation.publish(0, final=True)
    assert evaluation.shard.run(3) == []


def test_unexpected_and_repeated_answers_are_ignored() -> None:
    evaluation = Evaluation(sampled=False)
    evaluation.publish(0)
    evaluation.shard.run()
    evaluation.answer(2)
    first = evaluation.log.rows(EVAL_PROMPTS)[0]
    stray = prompt(9, 1, purpose="evaluation", policy_version=version(0), round="1.0/greedy")
    evaluation.score(experience(trajectory(first, 0), reward=0.0))
    evaluation.score(experience(trajectory(stray, 0)))
    assert evaluation.shard.run() == []
    evaluation.answer()
    evaluation.shard.run()
    assert evaluation.points() == [(0, {"questions": 3.0, "final": 0.0, "accuracy/greedy": 1.0, "reward/greedy": 1.0})]
    group = evaluation.log.committed(evaluation.shard.config.group)
    assert all(group.offsets[place] == evaluation.log.end(place) for place in evaluation.shard.places)


def test_late_start_evaluates_the_newest_version_only() -> None:
    evaluation = Evaluation(sampled=False)
    evaluation.publish(0)
    evaluation.shard.run()
    evaluation.answer()
    evaluation.shard.run()
    for number in (5, 10):
        evaluation.publish(number)
    evaluation.shard.start()
    for _ in range(3):
        evaluation.shard.turn(most=1)
    evaluation.shard.run()
    assert evaluation.asked() == {"1.0/greedy": 3, "1.10/greedy": 2}


def test_restart_continues_two_open_rounds() -> None:
    evaluation = Evaluation()
    evaluation.publish(0)
    evaluation.shard.run()
    evaluation.answer(4)
    evaluation.shard.run()  # one round is complete, the other has one answer
    assert len(evaluation.points()) == 1
    evaluation.shard.run()
    evaluation.shard.start()
    assert evaluation.shard.run() == []
    evaluation.answer()
    evaluation.shard.run()
    assert len(evaluation.points()) == 2
    evaluation.publish(5)
    evaluation.shard.run()
    assert evaluation.asked()["1.5/greedy"] == 2


@pytest.mark.parametrize("seed", range(20))
def test_restarts_evaluate_and_count_every_answer_once(seed: int) -> None:
    rng = random.Random(seed)
    evaluation = Evaluation(questions=4)
    number = 0
    evaluation.publish(0)
    for _ in range(150):
        what = rng.random()
        if what < 0.1 and number < 12:
            number += 1
            evaluation.publish(number, final=number == 12)
        elif what < 0.2:
            evaluation.shard.start()
        elif what < 0.4:
            evaluation.answer(rng.randint(1, 3))
        elif what < 0.8:
            places = evaluation.shard.places
            evaluation.shard.turn(rng.choice([1, 2, 99]), rng.sample(places, rng.randint(1, len(places))))
        else:
            evaluation.shard.commit()
    for last in range(number + 1, 13):
        evaluation.publish(last, final=last == 12)
    for _ in range(8):
        evaluation.shard.run()
        evaluation.answer()
    asked = evaluation.asked()
    assert {name: count for name, count in asked.items() if "final" in name} == {
        "1.12/greedy/final": 4,
        "1.12/sampled/final": 4,
    }
    assert (asked["1.0/greedy"], asked["1.0/sampled"]) == (4, 4)
    assert len(set(map(repr, evaluation.points()))) == len(asked)  # a start repeats the metrics of the final version
    names = [r.trajectory_id for r in evaluation.log.rows(SETTLED)]
    assert len(names) == len(set(names)) == sum(asked.values())
    assert sorted(p.number for p in evaluation.log.rows(EVAL_PROMPTS)) == list(range(len(names)))


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("final", [True, False])
def test_open_round_parses_round_names(mode: Any, final: bool) -> None:
    name = round_name(version(7, epoch=3), mode, final)
    found = open_round(name, range(4, 6))
    assert (found.name, found.version, found.mode, found.final) == (name, version(7, epoch=3), mode, final)


@pytest.mark.parametrize("name", ["", "1.2", "1.2/other", "x/greedy"])
def test_open_round_raises_for_other_names(name: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        open_round(name, range(1))


@pytest.mark.parametrize(("field", "value"), [("every", -1), ("periodic_questions", 0)])
def test_config_error_names_the_field(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        EvaluationConfig(**{field: value})

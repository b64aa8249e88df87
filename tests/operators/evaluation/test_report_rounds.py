"""PublishQuestions and ReportRounds: an opened round becomes prompts; a closed one, Settled records and metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decisions import assert_maps
from record_factories import SAMPLING, experience, prompt, trajectory, version

from operators.evaluation.report_rounds import ClosedRound, OpenedRound, PublishQuestions, ReportRounds
from operators.evaluation.rounds import Mode, Round
from operators.io.elements import Output
from schemas.records import Episode, Metric, Settled
from schemas.topics import EVAL_PROMPTS, METRICS, SETTLED

METRIC = Metric("evaluation", 1, {"questions": 1.0}, 9)
OTHER = Output(METRICS, "other", METRIC)


@pytest.mark.parametrize(("mode", "temperature"), [("greedy", 0.0), ("sampled", SAMPLING.temperature)])
def test_publish_questions_numbers_the_prompts_of_a_round(mode: Mode, temperature: float) -> None:
    opened = OpenedRound("1.1/x", version(1), mode, 7, [prompt(0), prompt(1)])
    sampling = replace(SAMPLING, temperature=temperature)
    fields = {"purpose": "evaluation", "sampling": sampling, "policy_version": version(1), "round": "1.1/x"}
    asked = [prompt(7, 1, text="question 0", **fields), prompt(8, 1, text="question 1", **fields)]
    assert_maps(
        PublishQuestions(),
        [OTHER, opened],
        [OTHER, *(Output(EVAL_PROMPTS, each.prompt_id, each) for each in asked)],
    )


def test_report_rounds_settles_answers_and_writes_the_metric() -> None:
    answer = experience(trajectory(prompt(3, 1, purpose="evaluation"), 0, tokens=4))
    settled = Settled("e3.0", 1, "evaluated", "round 1.1/greedy", None, None, 4, 9)
    metric = Output(METRICS, "evaluation", METRIC)
    closed = ClosedRound("1.1/greedy", (answer,), METRIC)
    assert_maps(ReportRounds(), [METRIC, closed], [metric, Output(SETTLED, "", settled), metric])


def test_rewards_that_cancel_out_have_the_mean_0() -> None:
    answered = Round(version(3), "greedy", False, range(3))
    for number, reward in enumerate((0.1, 0.2, -0.3)):
        answered.answers[number] = experience(trajectory(prompt(number), 0, under=version(3)), reward=reward)
    assert str(answered.values()["reward/greedy"]) == "0.0"


@pytest.mark.parametrize(("failures", "measured"), [(2, True), (3, False)])
@pytest.mark.parametrize("kind", ["episode", "reward", "large"])
def test_failed_episodes_and_rewards_are_no_answers(kind: str, failures: int, measured: bool) -> None:
    answered = Round(version(3), "greedy", True, range(40))
    for number in range(40):
        answer = trajectory(prompt(number), 0, under=version(3))
        answered.answers[number] = experience(answer)
        if number < failures:
            if kind == "episode":
                answer = replace(answer, finish_reason="failed", error="raised", episode=Episode((), "failed"))
            error = None if kind == "large" else "raised"
            answered.answers[number] = experience(answer, reward=0.0 if error else 1.7e308, error=error)
    counts = {"questions": 40.0 - failures, "unanswered/greedy": failures, "failed/greedy": failures, "final": 1.0}
    means = {"accuracy/greedy": 1.0, "reward/greedy": 1.0}
    assert answered.values() == counts | (means if measured else {})
    assert (answered.is_measured(), answered.is_lost()) == (measured, False)

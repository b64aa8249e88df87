"""Scoring: weights, components and errors."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scored_trajectories import CONFIG, FixedJudge, scored, trajectory

from operators.evaluation.rounds import accuracy_of
from operators.score.config import RewardSpec, ScoreConfig, TaskRubric
from operators.score.error_counts import ScoreCounters
from operators.score.pool import VerifierResult
from operators.score.scorer import Scorer
from operators.score.scoring import score_trajectories
from operators.score.verifiers import reasoning
from schemas.block import Block
from schemas.metric_labels import labelled, values_by_task
from schemas.records import Episode, RewardComponent

MY_REWARD = str(Path(__file__).parents[3] / "examples" / "my_rewards.py:shows_work")


def test_reward_is_the_weighted_sum() -> None:
    judge = FixedJudge(CONFIG, VerifierResult(1.0, None), VerifierResult(0.75, None), VerifierResult(0.5, None))
    (experience,) = scored([trajectory("#4")], judge, now=77)
    assert experience.reward == 0.25 + 1.5 - 0.5
    assert experience.components == (
        RewardComponent("format", 1.0, 0.25),
        RewardComponent("exact", 0.75, 2.0),
        RewardComponent("extra", 0.5, -1.0),
        RewardComponent("accuracy", 0.0, 0.0),
    )
    assert (experience.error, experience.scored_at) == (None, 77)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (VerifierResult(None, "took too long"), "exact: took too long"),
        (VerifierResult(float("nan"), None), "exact: returned nan"),
        (VerifierResult(float("inf"), None), "exact: returned inf"),
        (VerifierResult(1.7e308, None), "exact: returned 1.7e+308"),
    ],
)
def test_failed_verifier_gives_on_error_and_keeps_other_parts(result: VerifierResult, message: str) -> None:
    judge = FixedJudge(CONFIG, VerifierResult(1.0, None), result, VerifierResult(0.5, None))
    (experience,) = scored([trajectory("#4")], judge)
    assert (experience.reward, experience.error) == (-0.5, message)
    assert [component.name for component in experience.components] == ["format", "extra"]


@pytest.mark.parametrize(("value", "correct"), [(0.9, 1.0), (0.5, 1.0), (0.4, 0.0)])
def test_accuracy_is_that_of_the_reward_with_correct_from(value: float, correct: float) -> None:
    """A solved episode whose steps cost has no reward of 1; other rewards do not count for the accuracy."""
    config = ScoreConfig(rewards=(RewardSpec("exact"), RewardSpec("environment", correct_from=0.5)))
    (experience,) = scored(
        [trajectory("#4")], FixedJudge(config, VerifierResult(0.0, None), VerifierResult(value, None))
    )
    assert experience.components[-1] == RewardComponent("accuracy", correct, 0.0)
    assert accuracy_of(experience) == correct


def test_tracebacks_follow_the_first_line_of_an_error() -> None:
    failures = [VerifierResult(None, f"KeyError: {name}\n  File my.py, {name}") for name in "ab"]
    (experience,) = scored([trajectory("#4")], FixedJudge(CONFIG, failures[0], VerifierResult(1.0, None), failures[1]))
    heads, *traces = str(experience.error).split("\n")
    assert heads == "format: KeyError: a; extra: KeyError: b"
    assert traces == ["  File my.py, a", "  File my.py, b"]


def test_error_counts_separate_rewards_episodes_and_generation() -> None:
    episode = replace(trajectory("").prompt, environment="guess")
    failed = trajectory("", finish_reason="failed", error="reset raised")
    rows = [trajectory("#4"), failed, replace(failed, prompt=episode), replace(failed, prompt=episode)]
    rows += [replace(failed, prompt=replace(each, purpose="evaluation")) for each in (failed.prompt, episode)]
    judge = FixedJudge(CONFIG, VerifierResult(None, "raised"), *[VerifierResult(1.0, None)] * 2)
    counts = ScoreCounters("g", {"trajectories": 10, "episode_errors": 1})
    counts.add(score_trajectories(Block.of(rows), judge, 0))
    metric = counts.metric(5_000)
    assert metric is not None
    assert (metric.name, metric.step) == ("score", 16)
    errors = {"reward_errors": 1, "episode_errors": 3, "generation_errors": 1}
    task = failed.prompt.task
    by_task = {
        labelled("trajectories", task=task): 4,
        labelled("errors", task=task): 4,
        labelled("first_error", task=task, text="format: raised"): 1,
    }
    assert metric.values == {"trajectories": 14, **errors, "heldout_trajectories": 2, "heldout_errors": 2, **by_task}
    assert counts.metric(9_000) is None  # nothing new
    counts.add(score_trajectories(Block.of(rows), judge, 0))
    assert counts.metric(5_999) is None  # too early
    assert counts.metric(6_000) is not None
    assert ScoreCounters("g", counts.state()).state() == counts.state()


def test_counts_by_task_are_of_the_first_tasks_and_others() -> None:
    names = ["x" * 1000, *(f"task {number}" for number in range(300))]
    judge = FixedJudge(CONFIG, *[VerifierResult(1.0, None)] * 3)
    block = score_trajectories(Block.of([trajectory("#4", task=name) for name in names]), judge, 0)
    counts = ScoreCounters("g", {labelled("trajectories", task=name): 1 for name in names})  # as 0.2.0 had them
    for _ in range(2):
        counts.add(block)
    by_task = values_by_task(counts.state(), "trajectories")
    assert by_task == {"other": 3 * 173} | dict.fromkeys(names[1:129], 3)
    assert ScoreCounters("g", counts.state()).state() == counts.state()


def test_episodes_are_counted_with_turns_and_endings() -> None:
    plain = trajectory("#4")
    endings = (((0.0, 0.0, 1.0), "done"), ((0.0,), "turns"), ((), "failed"), ((1.0,), "done"), ((1.0,), "done"))
    rows = [replace(plain, episode=Episode(rewards, ending)) for rewards, ending in endings]
    rows[3] = replace(rows[3], prompt=replace(plain.prompt, environment="agent"))
    rows[4] = replace(rows[4], prompt=replace(plain.prompt, purpose="evaluation"))
    counts = ScoreCounters("g")
    for _ in range(2):
        counts.add(
            score_trajectories(Block.of([plain, *rows]), FixedJudge(CONFIG, *[VerifierResult(1.0, None)] * 3), 0)
        )
    endings_of = {labelled("episode_endings", ending=ending): 2 for ending in ("done", "turns", "failed")}
    expected = {"episodes": 6, "episode_turns": 8, **endings_of}
    assert {name: count for name, count in counts.state().items() if name in expected} == expected


def test_too_large_weighted_sum_is_an_error() -> None:
    huge, none = VerifierResult(1e100, None), VerifierResult(0.0, None)
    (experience,) = scored([trajectory("#4")], FixedJudge(CONFIG, none, huge, none))
    assert (experience.reward, experience.error) == (-0.5, "the weighted sum is 2e+100")


def test_failed_trajectories_are_not_judged_and_keep_their_order() -> None:
    judge = FixedJudge(CONFIG, VerifierResult(1.0, None), VerifierResult(1.0, None), VerifierResult(0.0, None))
    failed = trajectory("", finish_reason="failed", error="engine died")
    rows = [trajectory("#1"), failed, trajectory("#2")]
    experiences = scored(rows, judge)
    assert [experience.trajectory for experience in experiences] == rows
    assert [experience.reward for experience in experiences] == [2.25, -0.5, 2.25]
    assert experiences[1].error == "generation failed: engine died"
    assert experiences[1].components == ()
    assert judge.judged == 2


def test_accuracy_excludes_partial_credit() -> None:
    entry = {"answer": "7", "question": "?", "metadata": {}}
    rows = [trajectory(text, entry, task="gcd") for text in ("#7", "#17", "7")]
    with Scorer(ScoreConfig()) as scorer:
        experiences = scored(rows, scorer)
    assert [experience.reward for experience in experiences] == [1.0, 0.5, 0.0]
    assert [experience.components[-1] for experience in experiences] == [
        RewardComponent("accuracy", value, 0.0) for value in (1.0, 0.0, 0.0)
    ]


def test_scorer_judges_each_task_by_its_own_rubric() -> None:
    config = ScoreConfig(
        rewards=(RewardSpec("numeric"),),
        on_error=-1.0,
        tasks=(
            TaskRubric((RewardSpec("exact", 2.0), RewardSpec("format", 0.5)), "whole", name="words"),
            TaskRubric((RewardSpec("numeric"), RewardSpec(MY_REWARD)), "regex", answer_regex=r"<(\d)>", name="digits"),
        ),
        workers=1,
    )
    rows = [trajectory(text, task=task) for task in ("sums", "words", "digits") for text in ("#4.0", "4", "<4> #9")]
    lost = [trajectory("", task=task, finish_reason="failed", error="gone") for task in ("sums", "words")]
    with Scorer(config) as scorer:
        experiences = scored([*rows, *lost], scorer)
    assert [each.reward for each in experiences] == [1.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 1.5, -1.0, 0.0]
    named = [[component.name for component in each.components] for each in experiences]
    assert named[0] == ["numeric", "accuracy"]
    assert named[3] == ["exact", "format", "accuracy"]
    assert named[6] == ["numeric", "shows_work", "accuracy"]


def test_reasoning_gym_task_of_the_reference_takes_precedence() -> None:
    entry = {"answer": "7", "question": "?", "metadata": {}, "task": "gcd"}
    with Scorer(ScoreConfig()) as scorer:
        assert [each.reward for each in scored([trajectory("#17", entry, task="divisors")], scorer)] == [0.5]
    assert not reasoning.is_safe_in_process(reasoning.library_task('{"task": "countdown"}', "chain_sum"))
    assert reasoning.library_task("[", "gcd") == reasoning.library_task("[]", "gcd") == "gcd"


def test_bad_reference_fails_only_its_own_trajectory() -> None:
    bad = trajectory("#4")
    bad = replace(bad, prompt=replace(bad.prompt, reference="{"))
    rows = [trajectory("#4"), bad, trajectory("#4", {}), trajectory("#4", [1]), trajectory("x"), trajectory("#4")]
    with Scorer(ScoreConfig(rewards=(RewardSpec("exact"),), on_error=-1.0)) as scorer:
        experiences = scored(rows, scorer)
    assert [experience.reward for experience in experiences] == [1.0, -1.0, -1.0, -1.0, 0.0, 1.0]
    errors = [experience.error or "" for experience in experiences]
    for error, message in zip(errors, ("", "JSONDecodeError", "no answer", "not a JSON object", "", ""), strict=True):
        assert message in error
        assert bool(message) == bool(error)


def test_scorer_combines_in_process_and_pooled_rewards() -> None:
    specs = (
        RewardSpec("numeric", 1.0),
        RewardSpec(MY_REWARD, 0.5, {"steps": 2}),
        RewardSpec("regex", 0.25, {"pattern": "^4"}),
        RewardSpec("overlong", 1.0, {"limit": 10, "buffer": 5}),
    )
    with Scorer(ScoreConfig(rewards=specs, workers=1)) as scorer:
        rows = [trajectory("4-1=3;3+1=4;#4"), trajectory("#4.0", tokens=10), trajectory("4")]
        experiences = scored(rows, scorer)
    assert [experience.error for experience in experiences] == [None] * 3
    assert [experience.reward for experience in experiences] == [1.75, 0.0, 0.25]
    names = [component.name for component in experiences[0].components]
    assert names == ["numeric", "shows_work", "regex", "overlong", "accuracy"]


def test_environment_reward_is_the_sum_over_turns() -> None:
    config = ScoreConfig(
        rewards=(RewardSpec("environment", 2.0), RewardSpec("length", options={"target": 9, "limit": 99}))
    )
    played = [Episode((0.25, 0.75), "done"), Episode((), "turns"), None]
    with Scorer(config) as scorer:
        rewarded = scored([trajectory("4", episode=episode) for episode in played], scorer)
    assert [experience.reward for experience in rewarded] == [3.0, 1.0, 0.0]
    assert rewarded[0].components[0] == RewardComponent("environment", 1.0, 2.0)
    assert rewarded[0].components[-1] == RewardComponent("accuracy", 1.0, 0.0)
    assert "the prompt has no environment: set prompts.environment" in (rewarded[2].error or "")


@pytest.mark.parametrize("rewards", [(1.7e308, 1.7e308), (-1.7e308, -1.7e308), (1e100, 1e100)])
def test_too_large_environment_reward_fails_its_trajectory(rewards: tuple[float, ...]) -> None:
    config = ScoreConfig(rewards=(RewardSpec("environment"), RewardSpec(MY_REWARD)), workers=1)
    rows = [trajectory("4", episode=Episode(each, "done")) for each in (rewards, (1.0,))]
    with Scorer(config) as scorer:
        errors = [each.error or "" for each in scored(rows, scorer)]
    assert "environment: ValueError: returned" in errors[0]
    assert "at most 1e+100" in errors[0]
    assert errors[1] == ""


def test_endless_answer_pattern_fails_only_its_own_trajectory() -> None:
    config = ScoreConfig(
        rewards=(RewardSpec("exact"),),
        answer="regex",
        answer_regex=r"(\d+)+$",
        workers=1,
        time_limit_s=3.0,
        on_error=-1.0,
    )
    with Scorer(config) as scorer:
        rows = [trajectory("so 4"), trajectory("1" * 60 + "x"), trajectory("so 4")]
        experiences = scored(rows, scorer)
    assert [experience.reward for experience in experiences] == [1.0, -1.0, 1.0]
    assert "took longer than 3 s" in (experiences[1].error or "")


def test_task_that_evaluates_answers_runs_in_the_pool() -> None:
    """The verifier of spiral_matrix calls eval() on the answer, which must not block this process."""
    entry = {"answer": "1 2 4 3", "question": "?", "metadata": {}}
    texts = ("#1 2 4 3", "#[1, 2, 4, 3]", "#[1 for _ in iter(int, 1)]")
    with Scorer(ScoreConfig(workers=1, time_limit_s=3.0, on_error=-1.0)) as scorer:
        rows = [trajectory(text, entry, task="spiral_matrix") for text in texts]
        experiences = scored(rows, scorer)
    assert [experience.reward for experience in experiences] == [1.0, 0.1, -1.0]


def test_math_verify_works_outside_the_main_thread() -> None:
    results: list[float] = []

    def work() -> None:
        with Scorer(ScoreConfig(rewards=(RewardSpec("math_verify"),), answer="boxed", workers=1)) as scorer:
            rows = [trajectory(text, {"answer": "1/2"}) for text in (r"\boxed{\frac{2}{4}}", r"\boxed{2}", "no")]
            results.extend(experience.reward for experience in scored(rows, scorer))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RewardSpec("exakt"), "did you mean 'exact'"),
        (lambda: RewardSpec("exact", options={"ignore_cas": True}), "did you mean 'ignore_case'"),
        (lambda: RewardSpec("regex"), "regex needs option 'pattern'"),
        (lambda: RewardSpec("regex", options={"pattern": "("}), "not a regular expression"),
        (lambda: RewardSpec("overlong", options={"limit": 4, "buffer": 5}), "buffer <= limit"),
        (lambda: RewardSpec("length", options={"limit": 4, "target": 4}), "target < limit"),
        (lambda: RewardSpec("length", options={"limit": float("inf"), "target": 4}), "finite number as 'limit'"),
        (lambda: RewardSpec("format", options={"tags": "think"}), "a list of one .* as 'tags', not 'think'"),
        (lambda: RewardSpec("format", options={"tags": []}), r"format needs a list of one .* as 'tags', not \[\]"),
        (lambda: RewardSpec("format", options={"tags": ["think", 1]}), "format needs a list of one or more texts"),
        (lambda: RewardSpec("numeric", options={"tolerance": "0.1"}), "a finite number as 'tolerance', not '0.1'"),
        (lambda: RewardSpec("numeric", options={"tolerance": True}), "a finite number as 'tolerance', not True"),
        (lambda: RewardSpec("numeric", options={"tolerance": -1.0}), "'tolerance' of at least 0, not -1.0"),
        (lambda: RewardSpec("exact", options={"ignore_case": "false"}), "true or false as 'ignore_case', not 'false'"),
        (lambda: RewardSpec("code", options={"partial": "false"}), "true or false as 'partial', not 'false'"),
        (lambda: RewardSpec("code", options={"memory_mb": 512.0}), "code needs a whole number as 'memory_mb'"),
        (lambda: RewardSpec("exact", weight=float("nan")), "weight"),
        (lambda: RewardSpec("module:"), "module:function"),
        (lambda: RewardSpec("exact", correct_from=float("nan")), "correct_from must be"),
        (
            lambda: ScoreConfig(rewards=(RewardSpec("exact", correct_from=1), RewardSpec("code", correct_from=1))),
            "only one reward may have correct_from",
        ),
        (lambda: ScoreConfig(rewards=()), "rewards must name"),
        (
            lambda: ScoreConfig(rewards=(RewardSpec("exact"), RewardSpec("exact"))),
            "two components .* 'exact'; set label",
        ),
        (lambda: ScoreConfig(answer="box"), "answer must be one of marker, regex, boxed, fenced, whole, not 'box'"),
        (lambda: ScoreConfig(answer="regex"), "answer_regex must not be empty"),
        (lambda: ScoreConfig(answer_marker=""), "answer_marker"),
        (lambda: ScoreConfig(workers=0), "workers must be at least 1, not 0"),
        (lambda: ScoreConfig(time_limit_s=float("nan")), "time_limit_s"),
        (lambda: ScoreConfig(on_error=float("inf")), "on_error"),
    ],
)
def test_score_config_names_the_field_that_does_not_fit(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_score_and_prompt_configs_import_nothing_heavy() -> None:
    program = "import sys, operators.score.config, operators.prompts.config; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert not {"reasoning_gym", "math_verify", "numpy", "pyarrow", "apache_beam", "torch"} & set(loaded)

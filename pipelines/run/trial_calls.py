"""The trial's calls of user code: rewards and environments are used on the first prompts of each task.

A failure on all prompts is a problem. A failure on some is a warning: in a run it costs only the trajectories of such
prompts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from infra.workers.error_text import first_line
from operators.prompts.config import TaskConfig
from operators.rollout.environments.config import EnvironmentSpec
from operators.rollout.environments.pool import EnvironmentFailed, EnvironmentPool, EnvironmentUnavailable
from operators.score.attempt import AnswerContext
from operators.score.config import Rubric, ScoreConfig
from operators.score.pool import VerifierResult, VerifierUnavailable
from operators.score.scorer import Scorer
from operators.score.scoring import score_answer
from pipelines.config import Config
from pipelines.run.trial_result import TrialResult
from schemas.records import Prompt

TRIED_PROMPTS = 8
"""Prompts of each task on which its rewards and its environment are tried, as far as `run.check_timeout_s` allows."""

Started = Callable[[str], None]


class TaskPrompts(NamedTuple):
    """A task and the first of its prompts, at least one."""

    task: TaskConfig
    prompts: Sequence[Prompt]


class Failure(NamedTuple):
    """What failed (a reward, a method), the index of the prompt, and the error."""

    subject: str
    prompt: int
    error: str


def check_rewards(config: Config, tasks: Sequence[TaskPrompts], found: TrialResult, started: Started) -> None:
    """Call the rewards of each task on its first prompts, each with a response that ends with the reference's answer.

    Without any prompt the rewards are loaded only. The first response of each task is added to `found.tried`.
    """
    limit = config.run.check_timeout_s
    if not tasks:
        for rubric in config.score.tasks or (config.score,):
            started(f"the import of {_names(rubric)}")
            _judge(_alone(rubric, config.score), (), limit, found)
    named: set[str] = set()
    for task, prompts in tasks:
        name = prompts[0].task
        of_task = rubric_of(config.score, name)
        one = _alone(of_task, config.score)
        started(f"{_names(of_task)} on the first prompts of task {name!r}")
        environment = 0.0 if task.environment else None
        answers = [_answer(each, of_task, environment) for each in prompts if each.task == name]
        if not (results := _judge(one, answers, limit, found)):
            continue
        first = score_answer(results[0], of_task)
        found.tried.append(
            {
                "task": name,
                "prompt": answers[0].prompt,
                "response": answers[0].text,
                "reward": None if first.error else first.reward,
            }
        )
        for number, spec in enumerate(one.rewards):
            failures = [
                Failure(spec.name, at, str(each[number].error))
                for at, each in enumerate(results)
                if each[number].value is None
            ]
            if not failures or f"{spec.name} {first_line(failures[0].error)}" in named:  # of several tasks, the first
                continue
            named.add(f"{spec.name} {first_line(failures[0].error)}")
            text = answers[failures[0].prompt].text[:60]
            _report(
                found,
                f"score.rewards: {spec.name} fails",
                failures,
                len(results),
                f" of task {name!r} with the response {text!r}",
                ". Such trajectories "
                + (
                    "are not trained (score.on_error is not set)"
                    if of_task.on_error is None
                    else f"get score.on_error = {of_task.on_error:g}"
                ),
            )


def rubric_of(score: ScoreConfig, task: str) -> Rubric:
    """The rubric for answers to prompts of `task`."""
    return next((each for each in score.tasks if each.name == task), score)


def trial_response(prompt: Prompt, rubric: Rubric) -> str:
    """A response to `prompt` with an answer in the form that `rubric` extracts: the reference's if there is one."""
    reference = json.loads(prompt.reference)
    answer = reference.get("answer") if isinstance(reference, Mapping) else None
    text = str(answer[0] if isinstance(answer, list) and answer else answer or 1)
    forms: Mapping[str, Callable[[], str]] = {
        "marker": lambda: f"{rubric.answer_marker} {text}",
        "boxed": lambda: f"\\boxed{{{text}}}",
        "fenced": lambda: f"```\n{text}\n```",
    }
    return forms.get(rubric.answer, lambda: text)()


def check_environments(config: Config, tasks: Sequence[TaskPrompts], found: TrialResult, started: Started) -> None:
    """Start each environment; reset it on the first prompts that use it, and make one step with a response."""
    used = {task.environment: prompts for task, prompts in reversed(tasks) if task.environment}
    for spec in config.rollout.environments:
        prompts = used.get(spec.resolved_name)
        if prompts is None:
            continue
        started(f"environment {spec.resolved_name}")
        texts = [trial_response(each, rubric_of(config.score, each.task)) for each in prompts]
        _try_environment(spec, prompts, texts, config.run.check_timeout_s, found)


def _try_environment(
    spec: EnvironmentSpec, prompts: Sequence[Prompt], texts: Sequence[str], limit_s: float, found: TrialResult
) -> None:
    try:
        pool = EnvironmentPool(spec, start_limit_s=limit_s)
    except EnvironmentUnavailable as error:
        found.add_problem(_unavailable("rollout.environments", error, limit_s))
        return
    failures: list[Failure] = []
    deadline, tried = time.monotonic() + limit_s, 0
    try:
        for prompt, text in zip(prompts, texts, strict=True):
            begun = time.monotonic()
            if failure := _play(pool, prompt, tried, text):
                failures.append(failure)
            tried += 1
            if (now := time.monotonic()) > deadline or now - begun >= spec.seconds:  # a call that hangs is not repeated
                break
    finally:
        pool.close()
    if failures:
        method = failures[0].subject
        text = f" with the response {texts[failures[0].prompt][:60]!r}" if method == "step" else ""
        head = f"rollout.environments: {spec.resolved_name} fails at its {method}"
        _report(found, head, failures, tried, text, ". Such episodes fail")


def _play(pool: EnvironmentPool, prompt: Prompt, number: int, text: str) -> Failure | None:
    """Reset an episode of `prompt`, and make one step with `text` unless it is done."""
    fields: dict[str, Any] = {"text": prompt.text, "task": prompt.task, "number": prompt.number}
    fields["reference"] = json.loads(prompt.reference)
    method = "reset"
    try:
        pool.play(f"trial {number}", fields, (), last=False).result()
        method = "step"
        pool.play(f"trial {number}", fields, (text,), last=True).result()
    except EnvironmentFailed as error:
        return Failure(method, number, error.reason)
    return None


def _report(
    found: TrialResult, head: str, failures: Sequence[Failure], tried: int, context: str, consequence: str
) -> None:
    """Add a problem if all `tried` prompts failed, else a warning, with the first error and its traceback."""
    line, newline, trace = failures[0].error.partition("\n")
    if len(failures) == tried:
        place = "on the first prompt" if tried == 1 else f"on each of the first {tried} prompts"
        found.add_problem(f"{head} {place}{context}: {failures[0].error}")
        return
    place = f"on {len(failures)} of the first {tried} prompts"
    found.warnings.append(f"{head} {place}{context}: {line}{consequence}{newline}{trace}")


def _answer(prompt: Prompt, rubric: Rubric, environment: float | None) -> AnswerContext:
    text = trial_response(prompt, rubric)
    return AnswerContext(text, len(text), prompt.text, prompt.task, prompt.reference, environment)


def _judge(
    score: ScoreConfig, answers: Sequence[AnswerContext], limit_s: float, found: TrialResult
) -> list[list[VerifierResult]]:
    """The results of `answers` until `limit_s` is over; none, and a problem, if the rewards cannot be loaded."""
    results: list[list[VerifierResult]] = []
    try:
        with Scorer(score, start_limit_s=limit_s) as scorer:
            deadline = time.monotonic() + limit_s
            for answer in answers:
                begun = time.monotonic()
                results += scorer.judge([answer])
                if (now := time.monotonic()) > deadline or now - begun >= score.time_limit_s:  # not a second hang
                    break
    except (VerifierUnavailable, ValueError, ImportError, OSError) as error:
        found.add_problem(_unavailable("score.rewards", error, limit_s))
    return results


def _names(rubric: Rubric) -> str:
    """The rewards of `rubric`, for a person."""
    return f"reward{'s' * (len(rubric.rewards) > 1)} {', '.join(spec.name for spec in rubric.rewards)}"


def _unavailable(key: str, error: Exception, limit_s: float) -> str:
    slow = any(words in str(error) for words in ("took longer than", "does not start within"))
    hint = f". It may be slow, or the machine busy: raise run.check_timeout_s (now {limit_s:g})" if slow else ""
    return f"{key}: {error}{hint}"


def _alone(rubric: Rubric, score: ScoreConfig) -> ScoreConfig:
    """`rubric` as a configuration of its own, with one verifier process and the limits of `score`."""
    shared = {name: getattr(rubric, name) for name in Rubric.__dataclass_fields__}
    limits = {name: getattr(score, name) for name in ("time_limit_s", "memory_limit_mb", "allow_processes")}
    return ScoreConfig(**shared, **limits, workers=1)

"""The trial's calls of user code: rewards and environments are used on the first prompts of each task.

A failure on all prompts is a problem. A failure on some is a warning: in a run it costs only the trajectories of such
prompts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from infra.workers.error_text import first_line
from operators.prompts.config import TaskConfig
from operators.rollout.environments.config import EnvironmentSpec
from operators.rollout.environments.pool import EnvironmentFailed, EnvironmentPool, EnvironmentUnavailable
from operators.score.attempt import AnswerContext
from operators.score.config import RewardSpec, Rubric, ScoreConfig
from operators.score.pool import VerifierResult, VerifierUnavailable
from operators.score.scorer import Scorer
from operators.score.scoring import ScoredAnswer, score_answer
from pipelines.config import Config
from pipelines.run.trial_result import TrialResult
from schemas.records import AGENT, Prompt

TRIED_PROMPTS = 8
"""Prompts of each task on which its rewards and its environment are tried, as far as `run.check_timeout_s` allows."""

Started = Callable[[str], None]


class TaskPrompts(NamedTuple):
    """A task and the first of its prompts, at least one; `encode` gives the tokens of an observation."""

    task: TaskConfig
    prompts: Sequence[Prompt]
    encode: Callable[[str], Sequence[int]]


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
    named: set[str] = set()
    if not tasks:
        for rubric in config.score.tasks or (config.score,):
            if (subject := f"the import of {_names(rubric)}") not in named:  # of several tasks, the first
                started(subject)
            named.add(subject)
            _judge(_alone(rubric, config.score), (), limit, found)
    for task, prompts, _ in tasks:
        name = prompts[0].task
        of_task = rubric_of(config.score, name)
        one = _alone(of_task, config.score)
        started(f"{_names(of_task)} on the first prompts of task {name!r}")
        environment = 0.0 if task.environment else None
        answers = [_answer(each, of_task, environment) for each in prompts if each.task == name]
        variants = [] if task.environment else _variants(prompts, answers)
        loaded, judged = _judge(one, [*answers, *variants], limit, found)
        if not judged:
            continue
        results, of_variants = judged[: len(answers)], judged[len(answers) :]
        of_variants = of_variants if len(of_variants) == len(variants) else []  # the time was over
        first = score_answer(results[0], replace(of_task, rewards=loaded))
        found.tried.append(
            {
                "task": name,
                "environment": task.environment,
                "prompt": answers[0].prompt,
                "response": answers[0].text,
                "reward": None if first.error or loaded != of_task.rewards else first.reward,
            }
        )
        if len(of_variants) > 2 and loaded == of_task.rewards:
            wrong = score_answer(of_variants[2], of_task)
            _check_wrong_answer(of_task, (answers[0].text, first), (variants[2].text, wrong), found)
        for number, spec in enumerate(loaded):
            failures = [
                Failure(spec.name, at, str(each[number].error))
                for at, each in enumerate(results)
                if each[number].value is None
            ]
            alone, whole = (each[number] for each in of_variants[:2]) if of_variants else (None, None)
            context = f" of task {name!r} with the response "
            if failures and _is_first(failures[0], named):
                text = answers[failures[0].prompt].text[:60]
                unset = "are not trained (score.on_error is not set)"
                given = unset if of_task.on_error is None else f"get score.on_error = {of_task.on_error:g}"
                consequence = f". Such trajectories {given}"
                hint = _extraction_hint(of_task) if alone is not None and alone.value is not None else ""
                head = f"score.rewards: {spec.name} fails"
                _report(found, head, failures, len(results), f"{context}{text!r}", consequence, hint)
            elif not failures and whole is not None and whole.value is None:
                line, newline, trace = str(whole.error).partition("\n")
                if _is_first(Failure(spec.name, 0, line), named):
                    text = f"{spec.name} fails on the response {variants[1].text[:60]!r} of task {name!r}: {line}"
                    found.warnings.append(f"score.rewards: {text}{_extraction_hint(of_task)}{newline}{trace}")


def _is_first(failure: Failure, named: set[str]) -> bool:
    """Whether no earlier task had this failure; adds it to `named`."""
    text = f"{failure.subject} {first_line(failure.error)}"
    is_first = text not in named
    named.add(text)
    return is_first


def _variants(prompts: Sequence[Prompt], answers: Sequence[AnswerContext]) -> list[AnswerContext]:
    """The first of `answers` with other responses: the reference's answer alone, a whole sentence, as models write, and
    the answer of another question, if one differs."""
    first = answers[0]
    other = [each.text for each in answers if each.text != first.text][:1]
    return [
        first._replace(text=each) for each in (_reference_answer(prompts[0]), f"The answer is {first.text}", *other)
    ]


def _check_wrong_answer(
    rubric: Rubric, right: tuple[str, ScoredAnswer], wrong: tuple[str, ScoredAnswer], found: TrialResult
) -> None:
    """Warn if the answer of another question, `wrong`, has the same reward of 1 or more as `right`."""
    if right[1].error or wrong[1].error or not 1 <= right[1].reward == wrong[1].reward:
        return
    found.warnings.append(
        f"score.rewards: the response {wrong[0][:60]!r}, the answer of another question, has the same reward "
        f"({wrong[1].reward:g}) as {right[0][:60]!r}: {_names(rubric)} may not compare it with the reference. The "
        'argument `answer` is the answer in the response; that of the data is reference["answer"]'
    )


def _extraction_hint(rubric: Rubric) -> str:
    """What to do with a reward that works with an answer alone, and not with a response that has more."""
    setting = "set score.answer (now 'whole'), and " if rubric.answer == "whole" else ""
    return (
        f". It works with the answer alone: {setting}take the parameter answer, which has the answer that score.answer "
        "extracts from the response"
    )


def rubric_of(score: ScoreConfig, task: str) -> Rubric:
    """The rubric for answers to prompts of `task`."""
    return next((each for each in score.tasks if each.name == task), score)


def trial_response(prompt: Prompt, rubric: Rubric) -> str:
    """A response to `prompt` with an answer in the form that `rubric` extracts: the reference's if there is one."""
    text = _reference_answer(prompt)
    forms: Mapping[str, Callable[[], str]] = {
        "marker": lambda: f"{rubric.answer_marker} {text}",
        "boxed": lambda: f"\\boxed{{{text}}}",
        "fenced": lambda: f"```\n{text}\n```",
    }
    return forms.get(rubric.answer, lambda: text)()


def _reference_answer(prompt: Prompt) -> str:
    """The reference's answer, "1" without one; 0 and false are answers."""
    reference = json.loads(prompt.reference)
    answer = reference.get("answer") if isinstance(reference, Mapping) else None
    if isinstance(answer, list) and answer:
        return str(answer[0])
    return str(1 if answer in (None, "", []) else answer)


def check_environments(config: Config, tasks: Sequence[TaskPrompts], found: TrialResult, started: Started) -> None:
    """Start each environment; reset it on the first prompts that use it, and make one step with a response."""
    used = {each.task.environment: each for each in reversed(tasks) if each.task.environment}
    for spec in config.rollout.environments:
        task = used.get(spec.resolved_name)
        if task is None:
            continue
        started(f"environment {spec.resolved_name}")
        texts = [trial_response(each, rubric_of(config.score, each.task)) for each in task.prompts]
        _try_environment(spec, task, texts, config.run.check_timeout_s, found)


def _try_environment(
    spec: EnvironmentSpec, task: TaskPrompts, texts: Sequence[str], limit_s: float, found: TrialResult
) -> None:
    try:
        pool = EnvironmentPool(spec, start_limit_s=limit_s)
    except EnvironmentUnavailable as error:
        found.add_problem(_unavailable("rollout.environments", error, limit_s))
        return
    failures: list[Failure] = []
    cut: list[Failure] = []
    deadline, tried = time.monotonic() + limit_s, 0
    try:
        for prompt, text in zip(task.prompts, texts, strict=True):
            begun = time.monotonic()
            if failure := _play(pool, prompt, tried, text, task, cut):
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
    if cut:
        at_reset = [each for each in cut if each.subject == "reset"]
        first = (at_reset or cut)[0]
        when = "before the first turn" if at_reset else "after the first turn"
        of = f"{len(at_reset or cut)} of the first {tried} prompts"
        text = f"rollout.environments: {spec.resolved_name}: on {of}, {when} {first.error}"
        (found.add_problem if len(at_reset) == tried else found.warnings.append)(text)


def _play(
    pool: EnvironmentPool,
    prompt: Prompt,
    number: int,
    text: str,
    task: TaskPrompts,
    cut: list[Failure],
) -> Failure | None:
    """Reset an episode of `prompt`, and make one step with `text`. Adds to `cut` why no other turn can follow."""
    fields: dict[str, Any] = {"text": prompt.text, "task": prompt.task, "number": prompt.number}
    fields["reference"] = json.loads(prompt.reference)
    tokens, most = 0, prompt.sampling.max_new_tokens
    steps: tuple[tuple[str, tuple[str, ...]], ...] = ("reset", ()), ("step", (text,))
    for method, texts in steps:
        try:
            state = pool.play(f"trial {number}", fields, texts, last=bool(texts)).result()
        except EnvironmentFailed as error:
            return Failure(method, number, error.reason)
        tokens += len(task.encode(state.observations[-1] or ""))
        if tokens >= most and not state.done and len(texts) < pool.spec.turns:
            is_set = most == task.task.max_new_tokens
            room = f"an episode's max_new_tokens = {most}" if is_set else f"the {most} tokens that the context leaves"
            how = "raise prompts.max_new_tokens, or shorten them" if is_set else "shorten them, or the prompts"
            reason = f"{tokens} tokens of observations leave no room for a turn in {room}: {how}"
            cut.append(Failure(method, number, reason))
            return None
    return None


def _report(
    found: TrialResult,
    head: str,
    failures: Sequence[Failure],
    tried: int,
    context: str,
    consequence: str,
    hint: str = "",
) -> None:
    """Add a problem if all `tried` prompts failed, else a warning, with the first error, `hint` and its traceback."""
    line, newline, trace = failures[0].error.partition("\n")
    if len(failures) == tried:
        place = "on the first prompt" if tried == 1 else f"on each of the first {tried} prompts"
        found.add_problem(f"{head} {place}{context}: {line}{hint}{newline}{trace}")
        return
    place = f"on {len(failures)} of the first {tried} prompts"
    found.warnings.append(f"{head} {place}{context}: {line}{consequence}{newline}{trace}")


def _answer(prompt: Prompt, rubric: Rubric, environment: float | None) -> AnswerContext:
    text = trial_response(prompt, rubric)
    messages: tuple[str, ...] = ()
    if prompt.environment == AGENT:
        messages = (json.dumps([{"role": "user", "content": prompt.text}, {"role": "assistant", "content": text}]),)
    return AnswerContext(text, len(text), prompt.text, prompt.task, prompt.reference, environment, messages)


def _judge(
    score: ScoreConfig, answers: Sequence[AnswerContext], limit_s: float, found: TrialResult
) -> tuple[tuple[RewardSpec, ...], list[list[VerifierResult]]]:
    """The rewards that can be loaded, and their results of `answers` until `limit_s` is over.

    Each reward that cannot be loaded is a problem.
    """
    try:
        return score.rewards, _results(score, answers, limit_s)
    except (VerifierUnavailable, ValueError, ImportError, OSError) as error:
        problem = _unavailable("score.rewards", error, limit_s)
    singles = [replace(score, rewards=(spec,)) for spec in score.rewards]
    if len(singles) > 1:
        loaded = tuple(spec for each in singles for spec in _judge(each, (), limit_s, found)[0])
        if 0 < len(loaded) < len(singles):
            return _judge(replace(score, rewards=loaded), answers, limit_s, found)
        if not loaded:
            return (), []
    found.add_problem(problem)
    return (), []


def _results(score: ScoreConfig, answers: Sequence[AnswerContext], limit_s: float) -> list[list[VerifierResult]]:
    results: list[list[VerifierResult]] = []
    with Scorer(score, start_limit_s=limit_s) as scorer:
        deadline = time.monotonic() + limit_s
        for answer in answers:
            begun = time.monotonic()
            results += scorer.judge([answer])
            if (now := time.monotonic()) > deadline or now - begun >= score.time_limit_s:  # not a second hang
                break
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

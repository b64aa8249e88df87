"""Runs the rewards of a configuration over trajectories: quick harmless verifiers here, all others in a pool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from types import TracebackType
from typing import Any, NamedTuple

from infra.workers.limits import describe_error
from operators.score.attempt import AnswerContext, Attempt, Extraction, extract_answer
from operators.score.config import RewardSpec, Rubric, ScoreConfig
from operators.score.pool import VerifierCall, VerifierPool, VerifierResult
from operators.score.rewards import REWARDS, Judge, is_custom, make_judge


class _Ready(NamedTuple):
    """A reward: `judge` is None where it never runs here; `pooled` is its number in the pool where it may run there."""

    spec: RewardSpec
    extraction: Extraction
    judge: Judge | None
    pooled: int


class Scorer:
    """The rewards of `config`, ready to judge.

    Making one fetches the verifiers' libraries and starts the processes, which takes seconds; close it. Raises
    VerifierUnavailable if a reward cannot be loaded there.
    """

    def __init__(self, config: ScoreConfig) -> None:
        self._config = config
        self._pool: VerifierPool | None = None
        self._pooled: list[tuple[RewardSpec, Rubric]] = []
        self._others = self._prepare(config)
        self._of = {task.name: self._prepare(task) for task in config.tasks}
        if any(each.judge is None for each in (*self._others, *chain(*self._of.values()))):
            self._pool = self._open_pool()

    def rubric(self, task: str) -> Rubric:
        """What answers to prompts of `task` are judged by."""
        return next((each for each in self._config.tasks if each.name == task), self._config)

    def judge(self, answers: Sequence[AnswerContext]) -> list[list[VerifierResult]]:
        """For every answer, one outcome a reward of its task's rubric, in the order of both.

        Raises VerifierUnavailable if verifier processes that were lost cannot be replaced; nothing for an answer.
        """
        outcomes: list[list[VerifierResult | None]] = []
        places: list[tuple[int, int]] = []
        calls: list[VerifierCall] = []
        for row, answer in enumerate(answers):
            outcomes.append([])
            attempt: Attempt | VerifierResult | None = None
            for number, reward in enumerate(self._of.get(answer.task, self._others)):
                if reward.judge is None or not _harmless(reward.spec, answer):
                    outcomes[row].append(None)
                    places.append((row, number))
                    calls.append(VerifierCall(reward.pooled, answer._asdict()))
                    continue
                attempt = attempt or _read(answer, reward.extraction)
                outcomes[row].append(attempt if isinstance(attempt, VerifierResult) else _judge(reward.judge, attempt))
        if calls:
            self._pool = self._pool or self._open_pool()
            for (row, number), outcome in zip(places, self._pool.score_all(calls), strict=True):
                outcomes[row][number] = outcome
        return [[outcome for outcome in row if outcome is not None] for row in outcomes]

    def close(self) -> None:
        """End the verifier processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, rubric: Rubric) -> list[_Ready]:
        """The rewards of `rubric`, those that may need the pool numbered there."""
        ready = []
        for spec in rubric.rewards:
            # A pattern that finds answers may backtrack for ever on what a model writes, so it is applied in the pool.
            never = is_custom(spec.name) or rubric.answer == "regex" or REWARDS[spec.name].in_process is False
            judge = None if never else make_judge(spec.name, spec.options)
            ready.append(_Ready(spec, rubric.extraction, judge, len(self._pooled)))
            if never or REWARDS[spec.name].in_process is not True:
                self._pooled.append((spec, rubric))
        return ready

    def _open_pool(self) -> VerifierPool:
        config = self._config
        setup = {
            "rewards": [
                {"name": spec.name, "options": dict(spec.options), "extraction": rubric.extraction}
                for spec, rubric in self._pooled
            ],
            "memory_limit_mb": config.memory_limit_mb,
            "allow_processes": config.allow_processes
            or any(not is_custom(spec.name) and REWARDS[spec.name].processes for spec, _ in self._pooled),
        }
        return VerifierPool(setup, config.workers, config.time_limit_s)


def _harmless(spec: RewardSpec, answer: AnswerContext) -> bool:
    here = REWARDS[spec.name].in_process
    return here if isinstance(here, bool) else here(answer)


def _read(answer: AnswerContext, extraction: Extraction) -> Attempt | VerifierResult:
    try:
        reference = _parsed(answer.reference)
    except ValueError as error:
        return VerifierResult(None, describe_error(error))
    found = extract_answer(answer.text, extraction)
    return Attempt(answer.text, found, answer.tokens, answer.prompt, answer.task, reference, answer.environment)


@lru_cache(maxsize=1024)
def _parsed(reference: str) -> Mapping[str, Any]:
    """`reference` read once for all samples of a prompt. Raises ValueError."""
    value = json.loads(reference)
    if not isinstance(value, dict):
        raise ValueError("the reference is no JSON object")
    return value


def _judge(judge: Judge, attempt: Attempt) -> VerifierResult:
    try:
        return VerifierResult(judge(attempt), None)
    except Exception as error:  # noqa: BLE001 - verifiers of a hundred tasks, each with errors of its own
        return VerifierResult(None, describe_error(error))

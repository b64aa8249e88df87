"""Runs the configured rewards over trajectories: fast and safe verifiers in this process, all others in a pool."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from infra.closing import ClosedAtExit
from infra.workers.error_text import ErrorText
from operators.score.attempt import AnswerContext, Attempt, Extraction, make_attempt, parse_reference
from operators.score.config import RewardSpec, Rubric, ScoreConfig
from operators.score.pool import VerifierCall, VerifierPool, VerifierResult, result_of
from operators.score.rewards import REWARDS, Judge, is_custom, make_judge


class _PreparedReward(NamedTuple):
    """A reward; `judge` is None if it always runs in the pool, `pool_index` its index there if it may run there."""

    spec: RewardSpec
    extraction: Extraction
    judge: Judge | None
    pool_index: int


class Scorer(ClosedAtExit):
    """Judges answers by the rewards of `config`. Close it after use.

    The constructor imports the verifiers' libraries and starts their processes, which takes seconds. Raises
    VerifierUnavailable if a verifier process cannot load a reward. With `start_limit_s` a process that takes longer to
    load them is not tried again.
    """

    def __init__(self, config: ScoreConfig, start_limit_s: float | None = None) -> None:
        self._config, self._start_limit_s = config, start_limit_s
        self._pool: VerifierPool | None = None
        self._pooled: list[tuple[RewardSpec, Rubric]] = []
        self._errors = ErrorText()
        self._default = self._prepare(config)
        self._by_task = {task.name: self._prepare(task) for task in config.tasks}
        if any(each.judge is None for each in (*self._default, *chain(*self._by_task.values()))):
            self._pool = self._open_pool()

    def rubric(self, task: str) -> Rubric:
        """The rubric for answers to prompts of `task`."""
        return next((each for each in self._config.tasks if each.name == task), self._config)

    def judge(self, answers: Sequence[AnswerContext]) -> list[list[VerifierResult]]:
        """For every answer, one result for each reward of its task's rubric, in the order of both.

        A bad answer or verifier gives an error result. Raises VerifierUnavailable only if ended verifier processes
        cannot be replaced.
        """
        results: list[list[VerifierResult | None]] = []
        pooled: list[tuple[int, int]] = []
        calls: list[VerifierCall] = []
        for row, answer in enumerate(answers):
            results.append([])
            attempt: Attempt | VerifierResult | None = None
            for number, reward in enumerate(self._by_task.get(answer.task, self._default)):
                if reward.judge is None or not _runs_in_process(reward.spec, answer):
                    results[row].append(None)
                    pooled.append((row, number))
                    reads_all = is_custom(reward.spec.name) or reward.spec.name == "environment"
                    given = answer if reads_all else answer._replace(messages=(), reported=())
                    calls.append(VerifierCall(reward.pool_index, given._asdict()))
                    continue
                attempt = attempt or self._attempt_of(answer, reward.extraction)
                if isinstance(attempt, Attempt):
                    results[row].append(self._judge(reward.judge, attempt))
                else:
                    results[row].append(attempt)
        if calls:
            self._pool = self._pool or self._open_pool()
            for (row, number), result in zip(pooled, self._pool.score_all(calls), strict=True):
                results[row][number] = result
        return [[result for result in row if result is not None] for row in results]

    def close(self) -> None:
        """Stop the verifier processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _prepare(self, rubric: Rubric) -> list[_PreparedReward]:
        """The rewards of `rubric`; adds those that may run in the pool to `_pooled`."""
        prepared = []
        for spec in rubric.rewards:
            pool_only = rubric.needs_process(spec)
            judge = None if pool_only else make_judge(spec.name, spec.options)
            prepared.append(_PreparedReward(spec, rubric.extraction, judge, len(self._pooled)))
            if pool_only or REWARDS[spec.name].in_process is not True:
                self._pooled.append((spec, rubric))
        return prepared

    def _attempt_of(self, answer: AnswerContext, extraction: Extraction) -> Attempt | VerifierResult:
        try:
            return make_attempt(answer, _parsed(answer.reference), extraction)
        except ValueError as error:
            return VerifierResult(None, self._errors.describe(error))

    def _judge(self, judge: Judge, attempt: Attempt) -> VerifierResult:
        try:
            return result_of(judge(attempt))
        except Exception as error:  # noqa: BLE001 - the verifiers of a hundred tasks raise errors of many kinds
            return VerifierResult(None, self._errors.describe(error))

    def _open_pool(self) -> VerifierPool:
        config = self._config
        setup = {
            "rewards": [
                {"name": spec.name, "options": dict(spec.options), "extraction": rubric.extraction}
                for spec, rubric in self._pooled
            ],
            "memory_limit_mb": config.memory_limit_mb,
            "allow_processes": config.allow_processes
            or any(not is_custom(spec.name) and REWARDS[spec.name].starts_processes for spec, _ in self._pooled),
        }
        return VerifierPool(setup, config.workers, config.time_limit_s, self._start_limit_s)


def _runs_in_process(spec: RewardSpec, answer: AnswerContext) -> bool:
    in_process = REWARDS[spec.name].in_process
    return in_process if isinstance(in_process, bool) else in_process(answer)


_parsed = lru_cache(maxsize=1024)(parse_reference)
"""A reference is parsed once for all samples of a prompt."""

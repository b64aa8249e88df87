"""Runs the rewards of a configuration over trajectories: quick harmless verifiers here, all others in a pool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any

from infra.workers.limits import describe
from operators.score.attempt import Answer, Attempt, extract_answer
from operators.score.config import ScoreConfig
from operators.score.pool import Call, Outcome, VerifierPool
from operators.score.rewards import REWARDS, Judge, is_custom, make_judge


class Scorer:
    """The rewards of `config`, ready to judge.

    Making one fetches the verifiers' libraries and starts the processes, which takes seconds; close it. Raises
    VerifierUnavailable if a reward cannot be loaded there.
    """

    def __init__(self, config: ScoreConfig) -> None:
        self.config = config
        self._pool: VerifierPool | None = None
        self._judges: list[Judge | None] = []
        """By reward; None where it never runs here."""
        self._pooled: dict[int, int] = {}
        """From a reward to its number in the pool."""
        for number, spec in enumerate(config.rewards):
            # A pattern that finds answers may backtrack for ever on what a model writes, so it is applied in the pool.
            never = is_custom(spec.name) or config.answer == "regex" or REWARDS[spec.name].in_process is False
            self._judges.append(None if never else make_judge(spec.name, spec.options))
            if never or REWARDS[spec.name].in_process is not True:
                self._pooled[number] = len(self._pooled)
        if None in self._judges:
            self._pool = self._open_pool()

    def judge(self, answers: Sequence[Answer]) -> list[list[Outcome]]:
        """For every answer, one outcome a reward, in the order of both.

        Raises VerifierUnavailable if verifier processes that were lost cannot be replaced; nothing for an answer.
        """
        outcomes: list[list[Outcome | None]] = []
        places: list[tuple[int, int]] = []
        calls: list[Call] = []
        for row, answer in enumerate(answers):
            outcomes.append([])
            attempt: Attempt | Outcome | None = None
            for number, judge in enumerate(self._judges):
                if judge is None or not self._harmless(number, answer.task):
                    outcomes[row].append(None)
                    places.append((row, number))
                    calls.append(Call(self._pooled[number], answer._asdict()))
                    continue
                attempt = attempt or self._read(answer)
                outcomes[row].append(attempt if isinstance(attempt, Outcome) else _judge(judge, attempt))
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

    def _harmless(self, number: int, task: str) -> bool:
        here = REWARDS[self.config.rewards[number].name].in_process
        return here if isinstance(here, bool) else here(task)

    def _read(self, answer: Answer) -> Attempt | Outcome:
        try:
            reference = _parsed(answer.reference)
        except ValueError as error:
            return Outcome(None, describe(error))
        found = extract_answer(answer.text, self.config.extraction)
        return Attempt(answer.text, found, answer.tokens, answer.prompt, answer.task, reference, answer.environment)

    def _open_pool(self) -> VerifierPool:
        rewards = [self.config.rewards[number] for number in self._pooled]
        setup = {
            "rewards": [{"name": spec.name, "options": dict(spec.options)} for spec in rewards],
            "extraction": self.config.extraction,
            "memory_limit_mb": self.config.memory_limit_mb,
            "allow_processes": self.config.allow_processes
            or any(not is_custom(spec.name) and REWARDS[spec.name].processes for spec in rewards),
        }
        return VerifierPool(setup, self.config.workers, self.config.time_limit_s)


@lru_cache(maxsize=1024)
def _parsed(reference: str) -> Mapping[str, Any]:
    """`reference` read once for all samples of a prompt. Raises ValueError."""
    value = json.loads(reference)
    if not isinstance(value, dict):
        raise ValueError("the reference is no JSON object")
    return value


def _judge(judge: Judge, attempt: Attempt) -> Outcome:
    try:
        return Outcome(judge(attempt), None)
    except Exception as error:  # noqa: BLE001 - verifiers of a hundred tasks, each with errors of its own
        return Outcome(None, describe(error))

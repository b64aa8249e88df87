"""From trajectories to experiences: every finished trajectory gets a reward, whatever happens to its verifiers.

So groups always complete. What went wrong stands in the experience's `error`; its reward is then the configured one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from operators.score.attempt import AnswerContext
from operators.score.config import Rubric
from operators.score.pool import VerifierResult
from operators.score.rewards import REWARDS, is_custom
from schemas.arrow import arrow_schema
from schemas.block import Block
from schemas.records import Experience

ACCURACY = "accuracy"
"""Component of weight 0: 1 if the first reward that can tell says the answer is right (gives 1 or more), else 0.

Kept apart from the reward because some verifiers give partial credit: reasoning-gym's gcd does wherever the right
number occurs in the answer.
"""


class Judge(Protocol):
    """What a Scorer is to the functions here."""

    def rubric(self, task: str) -> Rubric:
        """What answers to prompts of `task` are judged by."""

    def judge(self, answers: Sequence[AnswerContext]) -> list[list[VerifierResult]]:
        """For every answer, one outcome a reward of its task's rubric."""


class WeightedReward(NamedTuple):
    """As RewardComponent has it."""

    name: str
    value: float
    weight: float


class Weighed(NamedTuple):
    """What one answer was worth; `error` says what went wrong."""

    reward: float
    components: Sequence[WeightedReward]
    error: str | None


def score_trajectories(trajectories: Block, scorer: Judge, now: int) -> Block:
    """The experiences of `trajectories`, in their order, scored at `now` (Unix milliseconds). Tokens are not touched.

    Raises nothing for a bad trajectory or verifier; VerifierUnavailable where verifier processes cannot be had at all.
    """
    failed = [reason == "failed" for reason in trajectories.column("finish_reason").to_pylist()]
    answers = read_answers(trajectories)
    outcomes = iter(scorer.judge([answer for answer, lost in zip(answers, failed, strict=True) if not lost]))
    errors = trajectories.column("error").to_pylist()
    rubrics = {task: scorer.rubric(task) for task in {answer.task for answer in answers}}
    weighed = [
        Weighed(float(rubrics[answer.task].on_error), (), f"generation failed: {error or 'no reason given'}")
        if lost
        else weigh(next(outcomes), rubrics[answer.task])
        for answer, lost, error in zip(answers, failed, errors, strict=True)
    ]
    return _experiences(trajectories, weighed, now)


def read_answers(trajectories: Block) -> list[AnswerContext]:
    """What verifiers are told of each of `trajectories`."""
    prompts = (trajectories.column(f"prompt.{name}").to_pylist() for name in ("text", "task", "reference"))
    tokens = np.diff(trajectories.column("response.token_ids").offsets.to_numpy()).tolist()
    given = trajectories.column("episode.rewards").to_pylist()
    environment = [None if rewards is None else math.fsum(rewards) for rewards in given]
    return list(map(AnswerContext, trajectories.column("text").to_pylist(), tokens, *prompts, environment))


def weigh(outcomes: Sequence[VerifierResult], rubric: Rubric) -> Weighed:
    """The weighted sum of `outcomes`, one a reward of `rubric`; components where there is a value."""
    components: list[WeightedReward] = []
    errors: list[str] = []
    accuracy: list[WeightedReward] = []
    for spec, outcome in zip(rubric.rewards, outcomes, strict=True):
        if outcome.value is None or not math.isfinite(outcome.value):
            errors.append(f"{spec.component}: {outcome.error or f'gave {outcome.value}'}")
            continue
        components.append(WeightedReward(spec.component, outcome.value, float(spec.weight)))
        if not accuracy and not is_custom(spec.name) and REWARDS[spec.name].accuracy:
            accuracy.append(WeightedReward(ACCURACY, float(outcome.value >= 1), 0.0))
    reward = sum(component.value * component.weight for component in components)
    if not math.isfinite(reward):
        errors.append(f"the weighted sum is {reward}")
    error = "; ".join(errors) or None
    return Weighed(float(rubric.on_error) if error else reward, (*components, *accuracy), error)


def _experiences(trajectories: Block, weighed: Sequence[Weighed], now: int) -> Block:
    kind = arrow_schema(Experience).field("components").type
    parts = zip(*(component for each in weighed for component in each.components), strict=True)
    columns = [pa.array(values, field.type) for values, field in zip(parts, kind.value_type, strict=False)]
    flat = columns or [pa.array([], field.type) for field in kind.value_type]
    ends = [0, *accumulate(len(each.components) for each in weighed)]
    values = pa.StructArray.from_arrays(flat, fields=list(kind.value_type))
    return Block.from_columns(
        Experience,
        {
            **{f"trajectory.{name}": trajectories.column(name) for name in trajectories.batch.schema.names},
            "reward": [each.reward for each in weighed],
            "components": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values, type=kind),
            "error": [each.error for each in weighed],
            "scored_at": [now] * len(weighed),
        },
    )

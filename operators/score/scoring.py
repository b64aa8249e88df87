"""From trajectories to experiences: every finished trajectory gets a reward, whatever happens to its verifiers.

So groups always complete. What went wrong stands in the experience's `error`; its reward is then the configured one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from operators.score.config import ScoreConfig
from operators.score.pool import Outcome
from operators.score.rewards import REWARDS, is_custom
from schemas.records import Experience, RewardComponent, Trajectory

ACCURACY = "accuracy"
"""Component of weight 0: 1 if the first reward that can tell says the answer is right (gives 1 or more), else 0.

Kept apart from the reward because some verifiers give partial credit: reasoning-gym's gcd does wherever the right
number occurs in the answer.
"""


class Judge(Protocol):
    """What a Scorer is to the functions here."""

    config: ScoreConfig

    def judge(self, trajectories: Sequence[Trajectory]) -> list[list[Outcome]]:
        """For every trajectory, one outcome a reward."""


def score_trajectories(trajectories: Sequence[Trajectory], scorer: Judge, now: int) -> list[Experience]:
    """One experience a trajectory, in their order, scored at `now` (Unix milliseconds).

    Raises nothing for a bad trajectory or verifier; VerifierUnavailable where verifier processes cannot be had at all.
    """
    generated = [trajectory for trajectory in trajectories if trajectory.finish_reason != "failed"]
    outcomes = iter(scorer.judge(generated))
    return [
        _failed(trajectory, scorer.config, now)
        if trajectory.finish_reason == "failed"
        else weigh(trajectory, next(outcomes), scorer.config, now)
        for trajectory in trajectories
    ]


def weigh(trajectory: Trajectory, outcomes: Sequence[Outcome], config: ScoreConfig, now: int) -> Experience:
    """`trajectory` with the weighted sum of `outcomes`, one a reward of `config`; components where there is a value."""
    components: list[RewardComponent] = []
    errors: list[str] = []
    accuracy: list[RewardComponent] = []
    for spec, outcome in zip(config.rewards, outcomes, strict=True):
        if outcome.value is None or not math.isfinite(outcome.value):
            errors.append(f"{spec.component}: {outcome.error or f'gave {outcome.value}'}")
            continue
        components.append(RewardComponent(spec.component, outcome.value, float(spec.weight)))
        if not accuracy and not is_custom(spec.name) and REWARDS[spec.name].accuracy:
            accuracy.append(RewardComponent(ACCURACY, float(outcome.value >= 1), 0.0))
    reward = sum(component.value * component.weight for component in components)
    if not math.isfinite(reward):
        errors.append(f"the weighted sum is {reward}")
    error = "; ".join(errors) or None
    return Experience(trajectory, float(config.on_error) if error else reward, (*components, *accuracy), error, now)


def _failed(trajectory: Trajectory, config: ScoreConfig, now: int) -> Experience:
    error = f"generation failed: {trajectory.error or 'no reason given'}"
    return Experience(trajectory, float(config.on_error), (), error, now)

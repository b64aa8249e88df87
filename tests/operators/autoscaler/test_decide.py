"""The decision of the autoscaler, as a table; and its target under a measurement that flaps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.autoscaler.config import AutoscalingConfig
from operators.autoscaler.decide import History, ScalingLimits, decide
from operators.autoscaler.observation import Observation
from operators.autoscaler.policies import make_policy

LIMITS = ScalingLimits(minimum=1, maximum=8, stable_s=30.0, cooldown_s=60.0, max_step=4)
POLICY = make_policy(AutoscalingConfig())
SEEN = Observation(0.0, running=2, slots=20, requests=15, rollout_idle=0.0, trainer_idle=0.1)


def history(*idle: float | None, target: int = 2, changeable_at: float = 0.0, **changes: Any) -> History:
    """Observations every ten seconds from second 100 on, each with the trainer idle for this share of its time."""
    seen = [replace(SEEN, at=100.0 + 10 * n, trainer_idle=share, **changes) for n, share in enumerate(idle)]
    return History(tuple(seen), target, changeable_at)


BUSY, WAITS, MUCH = 0.1, 0.5, 0.95
TABLE: dict[str, tuple[History, ScalingLimits, int, str]] = {
    "nothing observed": (history(), LIMITS, 2, "nothing has been observed"),
    "observed too shortly": (history(WAITS, WAITS, WAITS), LIMITS, 2, "observed for 20 of 30 s"),
    "the trainer waits": (history(*4 * [WAITS]), LIMITS, 4, "the trainer waits 50 % of its time, above 20 %"),
    "within the band": (history(*4 * [BUSY]), LIMITS, 2, "the trainer waits 10 % of its time"),
    "one observation disagrees": (history(WAITS, WAITS, BUSY, WAITS), LIMITS, 2, "not all observations agree"),
    "an old one may disagree": (history(BUSY, WAITS, WAITS, WAITS), LIMITS, 4, "the trainer waits"),
    "the least counts": (history(WAITS, MUCH, WAITS, 0.3), LIMITS, 3, "the trainer waits 30 %"),
    "one measurement missing": (
        history(WAITS, WAITS, None, WAITS),
        LIMITS,
        2,
        "a measurement of the policy is missing",
    ),
    "cooling down": (history(*4 * [WAITS], changeable_at=140.0), LIMITS, 2, "cooling down for 10 s more"),
    "cool-down just over": (history(*4 * [WAITS], changeable_at=130.0), LIMITS, 4, "the trainer waits 50 %"),
    "largest step": (history(*4 * [MUCH]), LIMITS, 6, "the trainer waits 95 %"),
    "at the maximum": (history(*4 * [WAITS], target=2), replace(LIMITS, maximum=2), 2, "2 is the limit"),
    "above the maximum": (history(*4 * [BUSY], target=9), LIMITS, 8, "9 is not within 1 to 8"),
    "below the minimum": (history(BUSY, target=2), replace(LIMITS, minimum=3), 3, "2 is not within 3 to 8"),
    "paused": (history(*4 * [WAITS], paused=True), LIMITS, 2, "the run is paused"),
    "others are starting": (history(*4 * [WAITS], target=5), LIMITS, 5, "the trainer waits 50 %"),
    "half of the replicas idle": (
        history(*4 * [0.0], target=6, running=6, rollout_idle=0.5),
        LIMITS,
        3,
        "the trainer waits 0 % of its time, below 5 %, and 50 % of the replicas are idle",
    ),
    "never below the minimum": (history(*4 * [0.0], rollout_idle=1.0), LIMITS, 1, "100 % of the replicas are idle"),
}


@pytest.mark.parametrize("name", TABLE)
def test_decide_returns_the_target_and_its_reason(name: str) -> None:
    seen, limits, target, reason = TABLE[name]
    found = decide(seen, POLICY, limits)
    assert found.target == target
    assert reason in found.reason


@given(idle=st.lists(st.floats(0, 1), min_size=1, max_size=200), every_s=st.sampled_from([1.0, 5.0, 10.0, 31.0]))
@settings(max_examples=200, deadline=None)
def test_target_changes_at_most_once_a_cooldown(idle: list[float], every_s: float) -> None:
    seen: list[Observation] = []
    target, changeable_at = 2, 0.0
    changes: list[float] = []
    for number, share in enumerate(idle):
        at = 1000.0 + number * every_s
        seen.append(replace(SEEN, at=at, running=target, trainer_idle=share, rollout_idle=1 - share))
        found = decide(History(tuple(seen), target, changeable_at), POLICY, LIMITS)
        assert 1 <= found.target <= 8
        assert abs(found.target - target) <= LIMITS.max_step
        if found.target != target:
            target, changeable_at = found.target, at + LIMITS.cooldown_s
            changes.append(at)
    assert all(later - earlier >= LIMITS.cooldown_s for earlier, later in pairwise(changes))


def test_measurement_that_oscillates_changes_nothing() -> None:
    flapping = history(*[WAITS if n % 3 else 0.0 for n in range(60)], rollout_idle=0.5)
    for stop in range(1, 61):
        part = replace(flapping, observations=flapping.observations[:stop])
        assert decide(part, POLICY, replace(LIMITS, stable_s=35.0)).target == 2

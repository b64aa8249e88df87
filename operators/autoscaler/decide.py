"""The decision how many rollout processes a run has: a pure function of what was observed and of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from operators.autoscaler.observation import Observation
from operators.autoscaler.policies import Policy, ScalingRequest


@dataclass(frozen=True)
class ScalingLimits:
    """The bounds of the target, and how slowly it changes, see AutoscalingConfig."""

    minimum: int
    maximum: int
    stable_s: float
    cooldown_s: float
    max_step: int

    def clamp(self, processes: int) -> int:
        """`processes` within the bounds."""
        return min(max(processes, self.minimum), self.maximum)


@dataclass(frozen=True)
class History:
    """The observations of at least the last `stable_s` seconds, oldest first, and the present `target`.

    All times are seconds of one process's monotonic clock: the target may change again at `changeable_at`.
    """

    observations: tuple[Observation, ...]
    target: int
    changeable_at: float


@dataclass(frozen=True)
class Decision:
    """The target from now on, which may be the present one, and why."""

    target: int
    reason: str


def decide(history: History, policy: Policy, limits: ScalingLimits) -> Decision:
    """The target after the last of the observations; the present one if nothing justifies another.

    The target rises if every observation of `stable_s` seconds asks for more, to the least of what they ask for; it
    falls likewise. So a measurement that oscillates changes nothing.
    """
    target = history.target
    if not history.observations:
        return Decision(target, "nothing has been observed")
    now = history.observations[-1].at
    if now < history.changeable_at:
        return Decision(target, f"cooling down for {history.changeable_at - now:.0f} s more")
    if (bounded := limits.clamp(target)) != target:
        return Decision(bounded, f"{target} is not within {limits.minimum} to {limits.maximum}")
    recent = [seen for seen in history.observations if seen.at > now - limits.stable_s]
    if any(seen.paused for seen in recent):
        return Decision(target, "the run is paused")
    if history.observations[0].at > now - limits.stable_s:
        return Decision(target, f"observed for {now - history.observations[0].at:.0f} of {limits.stable_s:g} s")
    requests = [policy.request(seen) for seen in recent]
    known = [request for request in requests if request is not None]
    if len(known) < len(requests):
        return Decision(target, "a measurement of the policy is missing")
    return _decide_by_requests(known, target, limits)


def _decide_by_requests(requests: Sequence[ScalingRequest], target: int, limits: ScalingLimits) -> Decision:
    wanted, reason = [limits.clamp(request.target(target)) for request in requests], requests[-1].reason
    if min(wanted) > target:
        return Decision(min(*wanted, target + limits.max_step), reason)
    if max(wanted) < target:
        return Decision(max(*wanted, target - limits.max_step), reason)
    if wanted[-1] != target:
        return Decision(target, f"not all observations agree; the last: {reason}")
    is_bound = requests[-1].target(target) != target
    return Decision(target, f"{reason}; {target} is the limit" if is_bound else reason)

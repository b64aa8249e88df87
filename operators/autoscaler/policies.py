"""Policies: how many rollout processes one observation asks for, and why. Pure functions of the observation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from infra.name_lookup import load_class
from operators.autoscaler.config import AutoscalingConfig
from operators.autoscaler.observation import Observation
from operators.autoscaler.split import changed_split, measured_work

MIN_BUSY = 0.1
"""A trainer counts as busy for at least this share of its time: one decision multiplies processes by ten at most."""


class ScalingRequest(NamedTuple):
    """What an observation asks for, and the reason as a text for people.

    `exactly` so many `processes`; or `more` than now, up to `processes`; or `fewer`, down to `processes`; or `keep` the
    present target. A number computed from the processes that generate now is `more` or `fewer`: others may be starting.
    """

    kind: Literal["exactly", "more", "fewer", "keep"]
    processes: int
    reason: str

    def target(self, present: int) -> int:
        """The target that is asked for, if the target is `present` now."""
        match self.kind:
            case "exactly":
                return self.processes
            case "more":
                return max(present, self.processes)
            case "fewer":
                return min(present, self.processes)
            case "keep":
                return present


class Policy(ABC):
    """The base class of policies. A user's class gets `autoscaling.options` as keyword arguments."""

    @abstractmethod
    def request(self, seen: Observation) -> ScalingRequest | None:
        """What `seen` asks for; None if a measurement is missing, so that nothing is decided."""


class _BuiltInPolicy(Policy):
    def __init__(self, function: _PolicyFunction, config: AutoscalingConfig) -> None:
        self._function, self._config = function, config

    def request(self, seen: Observation) -> ScalingRequest | None:
        return self._function(self._config, seen)


def make_policy(config: AutoscalingConfig) -> Policy:
    """The policy that `config` names. Raises ValueError for a class that cannot be loaded."""
    if config.policy in _BUILT_IN:
        return _BuiltInPolicy(_BUILT_IN[config.policy], config)
    kind: Callable[..., Policy] = load_class("autoscaling.policy", config.policy, Policy)  # type: ignore[type-abstract]
    try:
        return kind(**config.options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"autoscaling.policy: {config.policy}: {error}") from error


def by_trainer_idle(config: AutoscalingConfig, seen: Observation) -> ScalingRequest | None:
    """More processes if the trainer waits: it is busy in proportion to what they generate. A trainer that never waits
    does not show how much is too much, so then as many processes leave as there are idle replicas.
    """
    idle, (low, high) = seen.trainer_idle, config.band
    if idle is None:
        return None
    waits = f"the trainer waits {_percent(idle)} of its time"
    if idle > high:
        wanted = math.ceil(seen.running * (1 - (low + high) / 2) / max(1 - idle, MIN_BUSY))
        return ScalingRequest("more", wanted, f"{waits}, above {_percent(high)}")
    if idle < low and seen.rollout_idle is not None:
        text = f"{waits}, below {_percent(low)}, and {_percent(seen.rollout_idle)} of the replicas are idle"
        return ScalingRequest("fewer", seen.running - int(seen.running * seen.rollout_idle), text)
    return ScalingRequest("keep", 0, waits)


def by_staleness(config: AutoscalingConfig, seen: Observation) -> ScalingRequest | None:
    """Fewer processes if trained trajectories are too stale: what is under way grows with the processes."""
    value, (low, high) = seen.staleness, config.band
    if value is None:
        return None
    text, middle = f"the mean staleness is {value:.2f}", (low + high) / 2
    if value > high:
        return ScalingRequest("fewer", int(seen.running * middle / value), f"{text}, above {high:g}")
    if value < low:
        wanted = seen.running * 2 if value <= middle / 2 else math.ceil(seen.running * middle / value)
        return ScalingRequest("more", wanted, f"{text}, below {low:g}")
    return ScalingRequest("keep", 0, text)


def by_queue(config: AutoscalingConfig, seen: Observation) -> ScalingRequest | None:
    """As many processes as have slots for the requests that run or wait, at replicas or in placement."""
    load = seen.requests_per_slot
    if load is None:
        return None
    low, high = config.band
    text, wanted = f"{load:.2f} requests a slot", math.ceil(seen.running * load / ((low + high) / 2))
    if load > high:
        return ScalingRequest("more", wanted, f"{text}, above {high:g}")
    if load < low:
        return ScalingRequest("fewer", wanted, f"{text}, below {low:g}")
    return ScalingRequest("keep", 0, text)


def by_split(config: AutoscalingConfig, seen: Observation) -> ScalingRequest | None:
    """The processes that the best split of the devices leaves the rollouts, if it makes steps shorter."""
    idle, use, devices = seen.trainer_idle, seen.requests_per_slot, config.devices
    if idle is None or use is None or not 0 < seen.running < devices:
        return None
    trainer = devices - seen.running
    work = measured_work(trainer, seen.running, 1.0, idle, use)
    most = devices - 1 if config.maximum is None else config.maximum
    wanted = changed_split(work, trainer, devices, range(devices - most, devices - config.minimum + 1))
    text = f"the trainer works {work.trainer / trainer:.0%} of its time, rollouts {work.rollouts / seen.running:.0%}"
    return ScalingRequest("exactly", devices - wanted, text)


def by_price(config: AutoscalingConfig, seen: Observation) -> ScalingRequest | None:
    """The processes of the lowest limit that the price does not exceed."""
    if seen.price is None:
        return None
    for limit in sorted(config.prices, key=lambda limit: limit.price):
        if seen.price <= limit.price:
            return ScalingRequest("exactly", limit.processes, f"the price is {seen.price:g}, at most {limit.price:g}")
    return ScalingRequest("exactly", config.minimum, f"the price is {seen.price:g}, above all limits")


def by_schedule(config: AutoscalingConfig, seen: Observation) -> ScalingRequest | None:
    """The processes of the last entry of the day, or of the day before."""
    entries = sorted(config.schedule, key=lambda entry: entry.second)
    begun = [entry for entry in entries if entry.second <= seen.time_of_day]
    entry = (begun or entries)[-1]
    return ScalingRequest("exactly", entry.processes, f"the schedule from {entry.at} UTC on")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_PolicyFunction = Callable[[AutoscalingConfig, Observation], ScalingRequest | None]
_BUILT_IN: Mapping[str, _PolicyFunction] = {
    "trainer_idle": by_trainer_idle,
    "staleness": by_staleness,
    "queue": by_queue,
    "split": by_split,
    "price": by_price,
    "schedule": by_schedule,
}

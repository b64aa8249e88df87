"""The section [autoscaling]: by which policy the number of rollout processes follows the load, and who changes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from infra.name_lookup import suggest_name
from infra.setting_types import CheckedSettings, FiniteNonNegative, FinitePositive, NonNegativeInt, PositiveInt

BuiltInPolicy = Literal["trainer_idle", "staleness", "queue", "split", "price", "schedule"]
ActuatorName = Literal["local", "kubernetes", "command"]
BANDS: Mapping[str, tuple[float, float]] = {
    "trainer_idle": (0.05, 0.2),
    "staleness": (0.5, 1.5),
    "queue": (0.5, 1.0),
}
"""The default bounds of each policy that keeps a measurement in a band."""
_TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d")


@dataclass(frozen=True)
class PriceLimit(CheckedSettings):
    """Up to a price, so many processes. Raises ValueError naming the invalid field."""

    price: FiniteNonNegative
    """The highest price at which there are so many processes."""
    processes: NonNegativeInt
    """Rollout processes up to this price."""


@dataclass(frozen=True)
class ScheduledTarget(CheckedSettings):
    """From a time of day on, so many processes. Raises ValueError naming the invalid field."""

    at: str
    """The time of day, HH:MM in UTC, by the clock of the autoscaler's machine."""
    processes: NonNegativeInt
    """Rollout processes from then on."""

    def _check(self) -> None:
        if _TIME.fullmatch(self.at) is None:
            raise ValueError(f"at must be a time of day as 08:00, not {self.at!r}")

    @property
    def second(self) -> int:
        """Seconds since midnight."""
        hours, minutes = self.at.split(":")
        return 3600 * int(hours) + 60 * int(minutes)


@dataclass(frozen=True)
class AutoscalingConfig(CheckedSettings):
    """The number of rollout processes follows a policy. Raises ValueError naming the invalid field."""

    policy: str = "trainer_idle"
    """`trainer_idle` keeps the share of time in which the trainer waits for batches between `low` and `high`;
    `staleness` the mean staleness of trained trajectories; `queue` the requests per slot that run or wait, at replicas
    or, since no replica has room, in placement. `split` divides the `devices` by the work of both sides. `price`
    follows `prices`, `schedule` the time of day. Or a class of yours, `module:Class` or `file.py:Class`."""
    devices: NonNegativeInt = 0
    """Rollout processes and ranks of the trainer together: the trainer has the ranks that rollouts leave it, up to
    `trainer.batch_shares`, and starts again from a checkpoint when they change. On GPUs, `trainer.gpus` names all of
    them, and `rollout.gpus` the same ones from the last to the first. 0: only rollout processes change."""
    minimum: NonNegativeInt = 1
    """Rollout processes, at least."""
    maximum: PositiveInt | None = None
    """Rollout processes, at most; unset: as many as placement.max_replicas allows."""
    low: FiniteNonNegative | None = None
    """Below it the policy's measurement requires a change; unset: 0.05, 0.5, 0.5 for trainer_idle, staleness, queue."""
    high: FiniteNonNegative | None = None
    """Above it the policy's measurement requires a change; unset: 0.2, 1.5, 1.0 for trainer_idle, staleness, queue."""
    prices: tuple[PriceLimit, ...] = ()
    """For `price`: the number of processes up to each price; above all of them it is `minimum`."""
    price_file: str = ""
    """For `price`: a CSV file. With the columns `seconds,price` it is a trace, which is replayed from the autoscaler's
    first start; with the column `price` its last row is the present price, which another program writes."""
    schedule: tuple[ScheduledTarget, ...] = ()
    """For `schedule`: the number of processes from each time of day on."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of your own policy class."""
    observe_s: FinitePositive = 10.0
    """Seconds between two observations."""
    stable_s: FinitePositive = 60.0
    """All observations of so many seconds must require more processes, or all fewer, before the target changes."""
    cooldown_s: FinitePositive = 300.0
    """After a change the target stays for so many seconds, so that its effect is measured before the next one."""
    max_step: PositiveInt = 4
    """Processes by which one decision changes the target, at most."""
    actuator: ActuatorName = "local"
    """Who starts and ends processes. `local`: `laminar run` on this machine. `kubernetes`: the StatefulSet of the
    rollouts, through its scale sub-resource. `command`: a program of yours, `command`."""
    command: tuple[str, ...] = ()
    """For `command`: the program and its arguments. It gets the decision as LAMINAR_RUN, LAMINAR_TARGET,
    LAMINAR_BEFORE, LAMINAR_DECISION, LAMINAR_REASON and LAMINAR_MACHINES, and may be called again with the same one."""
    kubernetes_name: str = ""
    """For `kubernetes`: the name of the StatefulSet; empty: the one that `laminar deploy` writes."""
    actuator_timeout_s: FinitePositive = 30.0
    """Seconds that the actuator may take before the attempt counts as failed."""
    retry_s: FinitePositive = 30.0
    """Seconds between two attempts to carry out a decision."""
    dry_run: bool = False
    """Whether decisions are only written, and not carried out."""

    def _check(self) -> None:
        policies = get_args(BuiltInPolicy)
        if ":" not in self.policy and self.policy not in policies:
            hint = suggest_name(self.policy, policies)
            raise ValueError(f"policy {self.policy!r} is neither built in nor module:Class{hint}")
        least = int(self.policy in (*BANDS, "split"))  # nothing can be measured without a rollout
        if self.minimum < least:
            raise ValueError(f"minimum must be at least {least} for policy {self.policy!r}, not {self.minimum}")
        if self.maximum is not None and self.maximum < self.minimum:
            raise ValueError(f"maximum must be at least minimum = {self.minimum}, not {self.maximum}")
        if self.devices and self.actuator != "local":
            raise ValueError(f"devices needs actuator = 'local', not {self.actuator!r}: `laminar run` starts the ranks")
        for name, processes in (("minimum", self.minimum), ("maximum", self.maximum)):
            if self.devices and processes is not None and processes >= self.devices:
                raise ValueError(f"{name} must be below devices = {self.devices}, not {processes}: the trainer has one")
        if self.cooldown_s < self.stable_s:
            raise ValueError(f"cooldown_s must be at least stable_s = {self.stable_s}, not {self.cooldown_s}")
        self._check_policy()
        if self.actuator == "command" and not self.command:
            raise ValueError("actuator = 'command' needs autoscaling.command, a program and its arguments")

    def _check_policy(self) -> None:
        if self.policy in BANDS:
            low, high = self.band
            if not low < high:
                raise ValueError(f"low must be below high, not {low} and {high}")
        elif self.low is not None or self.high is not None:
            raise ValueError(f"low and high are for {', '.join(BANDS)}, not for policy {self.policy!r}")
        if self.policy == "price" and not (self.prices and self.price_file):
            raise ValueError("policy = 'price' needs autoscaling.prices and autoscaling.price_file")
        if self.policy == "split" and not self.devices:
            raise ValueError("policy = 'split' needs autoscaling.devices")
        if self.policy == "schedule" and not self.schedule:
            raise ValueError("policy = 'schedule' needs autoscaling.schedule")
        if self.options and ":" not in self.policy:
            raise ValueError(f"options are for a policy of your own (module:Class), not for {self.policy!r}")

    @property
    def band(self) -> tuple[float, float]:
        """The bounds of the measurement that a policy of BANDS keeps. Raises KeyError for other policies."""
        low, high = BANDS[self.policy]
        return low if self.low is None else self.low, high if self.high is None else self.high

    def most(self, replicas: int, inboxes: int) -> int:
        """The maximum of the target, for processes of `replicas` replicas each, with `inboxes` inboxes.

        Raises ValueError if the bounds need more inboxes.
        """
        fits = max(1, inboxes // replicas)
        for name, processes in (("maximum", self.maximum), ("minimum", self.minimum)):
            if processes is not None and processes > fits:
                raise ValueError(
                    f"autoscaling.{name} is {processes} processes of {replicas} replicas, but there are {inboxes} "
                    "inboxes: raise placement.max_replicas"
                )
        if self.devices:
            fits = min(fits, self.devices - 1)
        return fits if self.maximum is None else self.maximum

"""The split of devices between the trainer and the rollouts, by the work that was measured of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GAIN = 0.05
"""Share of a step's time that another split must gain. A trainer that waits for more of it waits for the rollouts."""
FULL = 0.9
"""Use of what replicas have room for at which they do all they can, while the trainer does not wait."""


@dataclass(frozen=True, slots=True)
class SideWork:
    """What a step takes of each side, in seconds of one device, and how long it is."""

    trainer: float
    rollouts: float
    seconds: float


def measured_work(trainer: int, rollouts: int, seconds: float, idle: float, use: float | None) -> SideWork:
    """The work of steps of `seconds`, of which the trainer on so many devices waits a share `idle`.

    `use` is the share of their room that the replicas use (None: unknown). A trainer that waits shows that the rollouts
    do all they can; otherwise they could do more in as far as they have room.
    """
    busy = 1.0 if use is None or idle > GAIN else min(1.0, use / FULL)
    return SideWork((1 - idle) * seconds * trainer, busy * seconds * rollouts, seconds)


def best_split(work: SideWork, devices: int, choices: Iterable[int]) -> int:
    """Of `choices` the devices of the trainer with which the slower side takes the least time."""
    return min(choices, key=lambda count: _step_seconds(work, count, devices))


def changed_split(work: SideWork, trainer: int, devices: int, choices: Iterable[int]) -> int:
    """The devices of the trainer from now on: the best ones if they shorten a step by `GAIN`, else those it has."""
    best = best_split(work, devices, choices)
    return best if _step_seconds(work, best, devices) <= (1 - GAIN) * work.seconds else trainer


def _step_seconds(work: SideWork, trainer: int, devices: int) -> float:
    return max(work.trainer / trainer, work.rollouts / (devices - trainer))

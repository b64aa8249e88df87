"""The elastic split of `laminar run`: the trainer has the ranks that rollouts leave it of `autoscaling.devices`.

A device is given up before it is taken: ranks end, with a checkpoint, before another rollout starts, and a rollout
hands its work over and ends before another rank starts. All ranks start again when their number changes.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from pipelines.roles import is_of_pipeline, processes_of_pipeline
from pipelines.run.fleet import Fleet
from pipelines.run.local_scaling import ROLLOUT

TRAINER = "trainer"
STOP_S = 60.0
"""How long ranks may take to end their batch and write a checkpoint before they are killed."""


class ElasticSplit:
    """The trainer in `fleet` has `ranks` ranks at first, rollouts the other ones of `devices`.

    `save` stores a number of ranks in the configuration with which ranks start; `note` receives one-line messages.
    """

    def __init__(
        self,
        fleet: Fleet,
        devices: int,
        ranks: int,
        save: Callable[[int], None],
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._devices, self.ranks = fleet, devices, ranks
        self._save, self._note, self._clock = save, note, clock
        self._kill_at: float | None = None
        """When ranks that are ending are killed; None while none has to end."""

    def follow(self, target: int) -> int:
        """Move devices towards a `target` of rollout processes, and return how many may run now. Call it often."""
        members = self._fleet.members
        rollouts = sum(each.alive for name, each in members.items() if is_of_pipeline(name, ROLLOUT))
        wanted = self._devices - max(target, rollouts)
        of_ranks = [name for name in members if is_of_pipeline(name, TRAINER)]
        working = [name for name in of_ranks if members[name].alive]
        if self._kill_at is None:
            if wanted != self.ranks:
                self._kill_at = self._clock() + STOP_S
                self._fleet.stop(of_ranks)
        elif not working:
            self._start(wanted)
        elif self._clock() > self._kill_at:
            self._kill_at += STOP_S
            self._fleet.stop(working, signal.SIGKILL)
        return min(target, self._devices - self.ranks)

    def _start(self, ranks: int) -> None:
        if ranks != self.ranks:
            self._note(f"the trainer continues with {ranks} of {self._devices} devices, {self.ranks} before")
        self._save(ranks)
        self.ranks, self._kill_at = ranks, None
        for name in [name for name in self._fleet.members if is_of_pipeline(name, TRAINER)]:
            del self._fleet.members[name]
        for process in processes_of_pipeline(TRAINER, ranks):
            self._fleet.add(process)

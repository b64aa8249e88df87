"""Replicas of a predicted run that leave, with notice or without: preempted, or because fewer are wanted."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from operators.rollout.departure import RESERVE_S, SETTLE_S
from pipelines.simulate.prediction.replicas import PredictedReplica
from pipelines.simulate.prediction.world import RUN, PredictedWorld
from schemas.records import Progress

CHECK_S = 0.5
"""How often a leaving replica checks whether its work has left."""


@dataclass
class DepartureCounts:
    """What the departures so far have cost, in the tokens of the engine."""

    ended: int = 0
    lost_tokens: int = 0
    """Generated, and not published when the replica vanished: they are generated again."""
    generated: int = 0
    """By the replicas that have ended."""
    left: int = 0
    """Trajectories that were still at a replica at the end of its notice."""


class Departures:
    """Ends replicas of `world`. Times are seconds of the run's clock."""

    def __init__(self, world: PredictedWorld) -> None:
        self._world = world
        self._leaving: set[int] = set()
        self.counts = DepartureCounts()

    def staying(self) -> list[int]:
        """The replicas that run and do not leave."""
        return [index for index, each in self._world.replicas.items() if each.alive and index not in self._leaving]

    @property
    def generated(self) -> int:
        """The tokens generated so far, of all replicas."""
        running = (each for each in self._world.replicas.values() if each.alive)
        return self.counts.generated + sum(each.status(RUN).tokens_generated for each in running)

    def leave(self, index: int, notice_s: float, restart_s: float) -> None:
        """End replica `index` after at most `notice_s` seconds, as a process that is given notice (0: at once).

        Another one takes its place `restart_s` seconds after its end; infinite: none does.
        """
        predicted, now = self._world.replicas[index], self._world.scheduler.now
        if not notice_s:
            self._end(index, predicted, restart_s)
            return
        self._leaving.add(index)
        predicted.replica.drain()
        self._world.send_status(predicted.status(RUN))
        self._check(index, predicted, restart_s, now + SETTLE_S, now + max(0.0, notice_s - RESERVE_S))

    def _check(
        self, index: int, predicted: PredictedReplica, restart_s: float, settled_at: float, deadline: float
    ) -> None:
        scheduler = self._world.scheduler
        if scheduler.now < deadline and (scheduler.now < settled_at or not predicted.replica.idle):
            scheduler.after(CHECK_S, lambda: self._check(index, predicted, restart_s, settled_at, deadline))
            return
        self._leaving.discard(index)
        status = predicted.status(RUN)
        self.counts.left += status.running + status.waiting
        predicted.publish(predicted.replica.report_progress())
        self._end(index, predicted, restart_s)
        self._world.send_status(replace(status, state="stopped"))

    def _end(self, index: int, predicted: PredictedReplica, restart_s: float) -> None:
        self.counts.ended += 1
        self.counts.generated += predicted.status(RUN).tokens_generated
        unpublished = [each for each in predicted.replica.report_progress() if isinstance(each, Progress)]
        self.counts.lost_tokens += sum(len(each.gained.token_ids) for each in unpublished)
        self._world.kill(index, restart_s)


class Preemptions:
    """Every `every_s` seconds a random replica leaves with `notice_s` seconds of notice, and is replaced later."""

    def __init__(self, world: PredictedWorld, every_s: float, notice_s: float, restart_s: float, seed: int = 0) -> None:
        self._world, self._every_s, self._notice_s, self._restart_s = world, every_s, notice_s, restart_s
        self._draws, self._stopped = random.Random(seed), False
        self.departures = Departures(world)
        world.scheduler.after(every_s, self._next)

    def stop(self) -> None:
        """Preempt no more replicas. Those that have notice still end."""
        self._stopped = True

    def _next(self) -> None:
        if self._stopped:
            return
        if staying := self.departures.staying():
            self.departures.leave(self._draws.choice(staying), self._notice_s, self._restart_s)
        self._world.scheduler.after(self._every_s, self._next)

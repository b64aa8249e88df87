"""Preemptions of a predicted run: machines of replicas are taken away, with notice or without, and replaced later."""

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
class PreemptionCounts:
    """What the preemptions so far have cost, in the tokens of the engine."""

    ended: int = 0
    lost_tokens: int = 0
    """Generated, and not published when the replica vanished: they are generated again."""
    generated: int = 0
    """By the replicas that have ended."""
    left: int = 0
    """Trajectories that were still at a replica at the end of its notice."""


class Preemptions:
    """Every `every_s` seconds a random replica gets `notice_s` seconds of notice (0: it vanishes at once). `restart_s`
    seconds after its end another one takes its place. Times are seconds of the run's clock.
    """

    def __init__(self, world: PredictedWorld, every_s: float, notice_s: float, restart_s: float, seed: int = 0) -> None:
        self._world, self._every_s, self._notice_s, self._restart_s = world, every_s, notice_s, restart_s
        self._draws = random.Random(seed)
        self._leaving: set[int] = set()
        self._stopped = False
        self.counts = PreemptionCounts()
        world.scheduler.after(every_s, self._next)

    def stop(self) -> None:
        """Preempt no more replicas. Those that have notice still end."""
        self._stopped = True

    def _next(self) -> None:
        if self._stopped:
            return
        world = self._world
        here = [index for index, each in world.replicas.items() if each.alive and index not in self._leaving]
        if here:
            self._give_notice(self._draws.choice(here))
        world.scheduler.after(self._every_s, self._next)

    def _give_notice(self, index: int) -> None:
        predicted, now = self._world.replicas[index], self._world.scheduler.now
        if not self._notice_s:
            self._end(index, predicted)
            return
        self._leaving.add(index)
        predicted.replica.drain()
        self._world.send_status(predicted.status(RUN))
        self._check(index, predicted, now + SETTLE_S, now + max(0.0, self._notice_s - RESERVE_S))

    def _check(self, index: int, predicted: PredictedReplica, settled_at: float, deadline: float) -> None:
        now = self._world.scheduler.now
        if now < deadline and (now < settled_at or not predicted.replica.idle):
            self._world.scheduler.after(CHECK_S, lambda: self._check(index, predicted, settled_at, deadline))
            return
        self._leaving.discard(index)
        status = predicted.status(RUN)
        self.counts.left += status.running + status.waiting
        predicted.publish(predicted.replica.report_progress())
        self._end(index, predicted)
        self._world.send_status(replace(status, state="stopped"))

    def _end(self, index: int, predicted: PredictedReplica) -> None:
        self.counts.ended += 1
        self.counts.generated += predicted.status(RUN).tokens_generated
        unpublished = [each for each in predicted.replica.report_progress() if isinstance(each, Progress)]
        self.counts.lost_tokens += sum(len(each.gained.token_ids) for each in unpublished)
        self._world.kill(index, self._restart_s)

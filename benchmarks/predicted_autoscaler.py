"""An autoscaled predicted run: the autoscaler's decisions on a price trace, carried out on predicted replicas."""

from __future__ import annotations

import math

from benchmarks.predicted_departures import Departures
from operators.autoscaler.config import AutoscalingConfig
from operators.autoscaler.decide import History, ScalingLimits, decide
from operators.autoscaler.observation import Observation
from operators.autoscaler.policies import make_policy
from operators.autoscaler.prices import PriceTrace
from pipelines.simulate.prediction.world import PredictedWorld


class PredictedAutoscaler:
    """Observes `world` every `observe_s` seconds of the run's clock, and has as many replicas as are decided.

    A replica that leaves has `notice_s` seconds of notice. `cost` is the price, in `trace` by hour and replica, of the
    time of all replicas that run or leave.
    """

    def __init__(
        self, world: PredictedWorld, config: AutoscalingConfig, trace: PriceTrace, replicas: int, notice_s: float
    ) -> None:
        self._world, self._config, self._trace, self._notice_s = world, config, trace, notice_s
        self._limits = ScalingLimits(config.minimum, replicas, config.stable_s, config.cooldown_s, config.max_step)
        self._policy = make_policy(config)
        self._observations: list[Observation] = []
        self._target, self._changeable_at = replicas, 0.0
        self.departures = Departures(world)
        self.cost = self.replica_hours = 0.0
        self.changes: list[tuple[float, int, str]] = []
        """Time, target and reason of each decision."""
        world.scheduler.after(config.observe_s, self._observe)

    def _observe(self) -> None:
        world, config, now = self._world, self._config, self._world.scheduler.now
        price, hours = self._trace.at(now), config.observe_s / 3600
        running = sum(each.alive for each in world.replicas.values())
        self.replica_hours += running * hours
        self.cost += running * hours * (price or 0.0)
        self._observations.append(Observation(now, len(self.departures.staying()), price=price))
        self._observations = [
            seen for seen in self._observations if seen.at >= now - config.stable_s - config.observe_s
        ]
        decision = decide(
            History(tuple(self._observations), self._target, self._changeable_at), self._policy, self._limits
        )
        if decision.target != self._target:
            self._target, self._changeable_at = decision.target, now + config.cooldown_s
            self.changes.append((now, decision.target, decision.reason))
        self._follow()
        world.scheduler.after(config.observe_s, self._observe)

    def _follow(self) -> None:
        """Start the replicas below the target that do not run; let those above it leave."""
        world, staying = self._world, set(self.departures.staying())
        for index in range(self._target):
            if not world.replicas[index].alive:
                world.start(index)
        for index in staying:
            if index >= self._target:
                self.departures.leave(index, self._notice_s, math.inf)

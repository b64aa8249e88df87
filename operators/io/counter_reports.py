"""The counters of a shard as a metric of the run, `steps/<role>`: what any runner's interface shows, for our own views.

The metric is an output of an emission, so it needs no transaction and no connection of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from infra.runners.liveness import LIVENESS
from infra.runners.step_metrics import TIME
from operators.io.config import ShardConfig
from operators.io.elements import Emission, Output
from schemas.records import Metric
from schemas.topics import METRICS, PHASE_SECONDS, STEP_COUNTERS


class CounterReports:
    """Adds the counters of `shard` to an emission every `every_s` seconds, if it has counted anything since."""

    def __init__(self, shard: ShardConfig, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._shard, self._every_s, self._clock = shard, every_s, clock
        self._due = clock() + every_s
        self._reported: Mapping[str, int] = {}

    def added_to(self, emission: Emission) -> Emission:
        """`emission`, with the counters if they are due. The last emission of a start has them always."""
        if not emission.last and self._clock() < self._due:
            return emission
        counters = LIVENESS.counters(self._shard.group)
        counted = {name: total for name, total in counters.items() if not name.startswith(TIME)}
        if counted == self._reported:
            return emission
        self._due, self._reported = self._clock() + self._every_s, counted
        name = STEP_COUNTERS + self._shard.pipeline
        metric = Metric(name, self._shard.shard, metric_values(counters), time.time_ns() // 10**6)
        return replace(emission, outputs=(*emission.outputs, Output(METRICS, name, metric)))


def metric_values(counters: Mapping[str, int]) -> dict[str, float]:
    """The values of the metric: `counters`, with times in seconds."""
    return {
        PHASE_SECONDS + name.removeprefix(TIME) if name.startswith(TIME) else name: (
            total / 1e6 if name.startswith(TIME) else float(total)
        )
        for name, total in counters.items()
    }

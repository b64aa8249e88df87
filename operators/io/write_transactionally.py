"""WriteTransactionally: commits a step's outputs and low-water mark in one Kafka transaction."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter

import apache_beam as beam

from infra.clocks import wall_ms
from infra.kafka.log_gaps import CannotResume
from infra.runners.liveness import LIVENESS
from infra.runners.step_metrics import TIME, WAITING, ShardCounters
from operators.io.config import ShardConfig
from operators.io.elements import Emission, Output
from operators.io.sink import SinkBroken, drop_sink, sink_of
from schemas.records import Metric
from schemas.topics import METRICS, PHASE_SECONDS, STEP_COUNTERS

_TOPIC = attrgetter("topic.short_name")


class _CommitFn(beam.DoFn):
    def __init__(self, shards: tuple[ShardConfig, ...]) -> None:
        self._shards = {shard.group: shard for shard in shards}
        self._used: set[str] = set()
        self._counters = ShardCounters()
        self._reports: dict[str, CounterReports] = {}

    def process(self, element: Emission) -> None:
        group = element.group
        self._used.add(group)
        shard, counters = self._shards[group], self._counters[group]
        if element.outputs:
            counters.add_all(Counter(map(_TOPIC, element.outputs)), "written")
        if shard.counters_s is not None:
            if group not in self._reports:
                self._reports[group] = CounterReports(shard, shard.counters_s)
            element = self._reports[group].added_to(element)
        try:
            sink = sink_of(shard)
            sink.write(element)
            counters.set_gauge(WAITING, sink.waiting)
            if written := sink.take_bytes():
                counters.add("bytes", written)
        except (SinkBroken, CannotResume):
            drop_sink(element.group)  # a runner that retries in this process gets a new sink
            raise

    def finish_bundle(self) -> None:
        while self._used:
            group = self._used.pop()
            try:
                sink_of(self._shards[group]).flush()
            except (SinkBroken, CannotResume):
                drop_sink(group)
                raise


class WriteTransactionally(beam.PTransform):
    """Commits the emissions of `shards`; ends the pipeline if a shard's sink breaks."""

    def __init__(self, *shards: ShardConfig) -> None:
        super().__init__()
        self.shards = shards

    def display_data(self) -> dict[str, str]:
        """The producers' transactional ids, for the runner's interface."""
        return {"transactional ids": ", ".join(shard.group for shard in self.shards)}

    def expand(self, emissions: beam.PCollection) -> beam.PCollection:
        return emissions | beam.ParDo(_CommitFn(self.shards))


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
        metric = Metric(name, self._shard.shard, metric_values(counters), wall_ms())
        return replace(emission, outputs=(*emission.outputs, Output(METRICS, name, metric)))


def metric_values(counters: Mapping[str, int]) -> dict[str, float]:
    """The values of the metric: `counters`, with times in seconds."""
    return {
        PHASE_SECONDS + name.removeprefix(TIME) if name.startswith(TIME) else name: (
            total / 1e6 if name.startswith(TIME) else float(total)
        )
        for name, total in counters.items()
    }

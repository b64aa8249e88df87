"""WriteTransactionally: commits a step's outputs and low-water mark in one Kafka transaction."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter

import apache_beam as beam

from infra.runners.step_metrics import ShardCounters
from operators.io.config import ShardConfig
from operators.io.counter_reports import CounterReports
from operators.io.elements import Emission
from operators.io.sink import SinkBroken, drop_sink, sink_of

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
            if written := sink.take_bytes():
                counters.add("bytes", written)
        except SinkBroken:
            drop_sink(element.group)  # a runner that retries in this process gets a new sink
            raise

    def finish_bundle(self) -> None:
        while self._used:
            group = self._used.pop()
            try:
                sink_of(self._shards[group]).flush()
            except SinkBroken:
                drop_sink(group)
                raise


class WriteTransactionally(beam.PTransform):
    """Commits the emissions of `shards`; ends the pipeline if a shard's sink breaks."""

    def __init__(self, *shards: ShardConfig) -> None:
        super().__init__()
        self._shards = shards

    def expand(self, emissions: beam.PCollection) -> beam.PCollection:
        return emissions | beam.ParDo(_CommitFn(self._shards))

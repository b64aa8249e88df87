"""WriteTransactionally: commits a step's outputs and low-water mark in one Kafka transaction."""

from __future__ import annotations

from collections import Counter

import apache_beam as beam

from infra.runners.step_metrics import StepCounters
from operators.io.config import ShardConfig
from operators.io.elements import Emission
from operators.io.sink import SinkBroken, drop_sink, sink_of


class _CommitFn(beam.DoFn):
    def __init__(self, shards: tuple[ShardConfig, ...]) -> None:
        self._shards = {shard.group: shard for shard in shards}
        self._used: set[str] = set()
        self._counters = StepCounters()

    def process(self, element: Emission) -> None:
        self._used.add(element.group)
        for topic, count in Counter(output.topic.short_name for output in element.outputs).items():
            self._counters.add(f"written_{topic}", count)
        try:
            sink = sink_of(self._shards[element.group])
            sink.write(element)
            if written := sink.take_bytes():
                self._counters.add("bytes", written)
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

"""WriteTransactionally: commits a step's outputs and low-water mark in one Kafka transaction."""

from __future__ import annotations

import apache_beam as beam

from operators.io.config import ShardConfig
from operators.io.elements import Emission
from operators.io.sink import SinkBroken, drop_sink, sink_of


class _CommitFn(beam.DoFn):
    def __init__(self, shards: tuple[ShardConfig, ...]) -> None:
        self._shards = {shard.group: shard for shard in shards}
        self._used: set[str] = set()

    def process(self, element: Emission) -> None:
        self._used.add(element.group)
        try:
            sink_of(self._shards[element.group]).write(element)
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

"""The graph of a role as its pipeline builds it, one named step at a time through TestPipeline: list in, list out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import apache_beam as beam
from apache_beam.testing.test_pipeline import TestPipeline
from unrun_pipelines import unrun_pipeline

from operators.io.elements import Checkpoint, Emission, PartitionKey, Polled, ReceivedRecord, Restored
from operators.io.fold_records import FoldRecords, close_folds
from operators.io.read_topics import ReadTopics
from operators.io.write_transactionally import WriteTransactionally
from schemas.topics import Topic

_EMITTED: list[Emission] = []
"""What the step under test has emitted: TestPipeline runs in this process."""

Received = tuple[Topic, Any]
"""A record, or a Block, and the topic that it is read from."""


def keep(emission: Emission) -> None:
    _EMITTED.append(emission)


def run_step(step: beam.PTransform, elements: Sequence[Any]) -> list[Any]:
    """The outputs of `step` for `elements`, in order."""
    _EMITTED.clear()
    try:
        with TestPipeline() as pipeline:
            pipeline | beam.Create(elements, reshuffle=False) | step | "keep" >> beam.Map(keep)
    finally:
        close_folds()
    return [output for emission in _EMITTED for output in emission.outputs]


class RoleGraph:
    """The transforms of a pipeline, by name."""

    def __init__(self, build: Callable[[beam.Pipeline], None]) -> None:
        pipeline = unrun_pipeline()
        build(pipeline)
        parts = pipeline.transforms_stack[0].parts
        self.transforms: dict[str, Any] = {part.full_label: part.transform for part in parts}

    @property
    def named_steps(self) -> list[str]:
        """The names of all steps but the source and the sink."""
        ends = ReadTopics, WriteTransactionally
        return [name for name, transform in self.transforms.items() if not isinstance(transform, ends)]

    def fold(self, name: str, *polls: Sequence[Received], last: bool = False, **changes: Any) -> list[Any]:
        """What the fold `name` makes of `polls` at its first start; with `last`, the last of them ends the process.

        `changes` are fields of its step.
        """
        folds = self.transforms[name]
        assert isinstance(folds, FoldRecords)
        folds.step = replace(folds.step, **changes)  # type: ignore[type-var]
        source = next(each for each in self.transforms.values() if isinstance(each, ReadTopics))
        (shard,) = source.shards
        places = [PartitionKey(each.topic.short_name, p) for each in shard.inputs for p in each.partitions]
        ends = dict.fromkeys(places, 0)
        elements: list[Any] = [Restored(shard.group, 1, (), {}, dict(ends))]
        for number, poll in enumerate(polls, 1):
            received = []
            for topic, record in poll:
                place = PartitionKey(topic.short_name, 0)
                received.append(ReceivedRecord(*place, ends[place], record))
                ends[place] += 1
            elements.append(
                Polled(shard.group, 1, tuple(received), (), dict(ends), True, last and number == len(polls))
            )
        return run_step(folds, elements)

    def map(self, name: str, *outputs: Any) -> list[Any]:
        """What the map `name` makes of the `outputs` of one emission."""
        return run_step(self.transforms[name], [Emission("group", 1, 1, outputs, Checkpoint())])

"""A pipeline whose steps count: a fold that decides, and the re-partitioning of its decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import apache_beam as beam
from decisions import moved, placed

from infra.runners.step_metrics import StepCounters, phase
from operators.io.elements import Checkpoint, PartitionKey, Polled, ReceivedRecord, Restored
from operators.io.fold_records import FoldRecords
from operators.io.repartition import RepartitionTrajectories
from schemas.records import TrajectoryClosed

RECORD = ReceivedRecord("progress", 0, 3, TrajectoryClosed("p0.0"))
STARTED = Restored("g", 1, (), {}, {})
POLLED = Polled("g", 1, (RECORD, RECORD), (), {}, True)


class Deciding:
    def restore(self, restored: Restored) -> Deciding:
        return self

    def fold(self, polled: Polled) -> Sequence[object]:
        with phase("decide"):
            counters = StepCounters(polled.group)
            counters.add("considered/all", 3)
            for size in (7, 5):
                counters.set_gauge("held", size)
            return [placed(1, 0), placed(2, 1, tokens=2), moved("p3.0", "p4.0")]

    def checkpoint(self, positions: Mapping[PartitionKey, int]) -> Checkpoint:
        return Checkpoint()

    def close(self) -> None:
        pass


def counted(*phases: str) -> dict[str, int]:
    """Beam's counters and gauges of one poll, and how often each phase was measured."""
    pipeline = beam.Pipeline(runner="FnApiRunner")
    elements = pipeline | beam.Create([STARTED, POLLED], reshuffle=False)
    elements | "decide" >> FoldRecords(Deciding(), *phases) | "repartition" >> RepartitionTrajectories()  # type: ignore
    found = pipeline.run().metrics().query()
    counters = {each.key.metric.name: each.committed for each in found["counters"]}
    counters |= {each.key.metric.name: each.committed.value for each in found["gauges"]}
    return counters | {each.key.metric.name: each.committed.count for each in found["distributions"]}

"""benchmarks/experience.py: the buffer accepts its experiences; logs are measured at the requested lengths."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from benchmarks.buffer_log import SAMPLES, Experiences, InMemory, Measured
from benchmarks.experience import in_turn, median
from operators.experience.config import ExperienceConfig
from operators.experience.make_batches import MakeBatches
from operators.experience.pack_batches import pack_batches
from operators.io.elements import PartitionKey, Polled, ReceivedRecord, Restored
from schemas.topics import BATCHES, DEAD_LETTERS


def test_buffer_batches_benchmark_experiences_in_whole_groups() -> None:
    experiences = Experiences(tokens=16)
    records = tuple(ReceivedRecord("experiences", 0, offset, experiences.next()) for offset in range(2))
    buffer = MakeBatches(ExperienceConfig(global_batch=256), 1).restore(Restored("g", 1, (), {}, {}))
    selected = buffer.fold(Polled("g", 1, records, (), {PartitionKey("experiences", 0): 2}, True))
    outputs = pack_batches(selected, budget=10**6, shares=1)
    assert not [output for output in outputs if output.topic is DEAD_LETTERS]
    batches = [output.record.records()[0] for output in outputs if output.topic is BATCHES]
    assert [len(batch.trajectory_ids) for batch in batches] == [256, 256]
    assert batches[1].trajectory_ids[:2] == (f"p{256 // SAMPLES}.0", f"p{256 // SAMPLES}.1")
    assert set(batches[0].lengths.to_pylist()) == {16}


def test_in_turn_measures_each_log_and_replaces_grown_ones() -> None:
    started: list[int] = []

    def begin(number: int) -> InMemory:
        started.append(number)
        return InMemory(tokens=16, global_batch=256)

    found = list(in_turn(begin, Namespace(rounds=3, log=[2048, 40960], trajectories=2048)))
    assert [(each.stage, each.log, each.trajectories) for each in found] == [
        ("fold", 2048, 2048),
        ("fold", 43008, 2048),
    ]
    assert started == [0, 1, 2, 3]  # the short log is replaced each time


def test_median_is_taken_of_each_figure() -> None:
    first = Measured("fold", 1, 2, 3.0, 4.0, 5.0)
    slices = [first, replace(first, cpu_us=9.0), replace(first, cpu_us=6.0, log=3)]
    assert median(slices) == replace(first, cpu_us=6.0)

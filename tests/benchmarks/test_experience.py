"""The benchmark's experiences are such as the buffer takes."""

from __future__ import annotations

from benchmarks.experience import SAMPLES, Feeder, machine
from operators.experience.config import ExperienceConfig
from operators.experience.make_batches import MakeBatches
from operators.io.elements import Place, Polled, Received, Restored
from pipelines.config import Config, RunConfig
from schemas.topics import BATCHES, DEAD_LETTERS


def test_what_is_fed_is_batched_in_whole_groups() -> None:
    feeder = Feeder(Config(run=RunConfig(name="benchmark")), tokens=16)
    records = tuple(Received("experiences", 0, offset, feeder._next()) for offset in range(2))
    folder = MakeBatches(ExperienceConfig(global_batch=256), 1).restore(Restored("g", 1, (), {}, {}))
    outputs = folder.fold(Polled("g", 1, records, (), {Place("experiences", 0): 2}, True))
    assert not [output for output in outputs if output.topic is DEAD_LETTERS]
    batches = [output.record.records()[0] for output in outputs if output.topic is BATCHES]
    assert [len(batch.trajectory_ids) for batch in batches] == [256, 256]
    assert batches[1].trajectory_ids[:2] == (f"p{256 // SAMPLES}.0", f"p{256 // SAMPLES}.1")
    assert set(batches[0].lengths.to_pylist()) == {16}


def test_the_machine_has_a_name() -> None:
    assert machine().endswith("cores")

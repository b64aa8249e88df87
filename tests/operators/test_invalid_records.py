"""Invalid or foreign records on the topics of a run neither stop it nor are trained."""

from __future__ import annotations

from collections import Counter

import pytest
from invalid_records import FAR, invalid_records
from pipeline_simulation import PipelineSimulation
from simulation_config import SimulationConfig

from operators.io.validation import invalid_reason
from schemas.identity import parse_trajectory_id
from schemas.records import MicroBatch, WeightVersion
from schemas.topics import BATCH_ASSEMBLY, BATCHES, DEAD_LETTERS, EXPERIENCES, INBOX, REPLICAS, SETTLED

SKIPPED = (BATCHES, EXPERIENCES)
"""The toy trainer counts all batches; the buffer itself validates experiences (see `test_untrainable`)."""


@pytest.mark.parametrize("shards", [1, 2])
def test_run_completes_with_invalid_records_on_every_topic(shards: int) -> None:
    simulation = PipelineSimulation(
        0, SimulationConfig(samples=2, global_batch=4, staleness=1, prompts=30, shards=shards)
    )
    simulation.checks = False
    for shard in simulation.shards:
        shard.validates = True
        shard.start()
    invalid = [(topic, record) for topic, record in invalid_records() if topic not in SKIPPED]
    simulation.rng.shuffle(invalid)
    assert len(invalid) > 800
    written: Counter[str] = Counter()
    for topic, record in invalid:
        key = {REPLICAS: "rollout-3", BATCH_ASSEMBLY: type(record).__name__, INBOX: ""}.get(topic, "p")
        simulation.log.append(topic, record, key)
        written[type(record).__name__] += 1
        simulation.step()
    asked = {f"p{number}.{member}" for number in range(30) for member in range(2)}
    for _ in range(600):
        simulation.run_undisturbed()
        ended = Counter(
            record.trajectory_id for record in simulation.log.rows(SETTLED) if record.trajectory_id in asked
        )
        if len(asked - set(ended)) < 4:
            break
    assert max(ended.values()) == 1
    assert len(asked - set(ended)) < 4
    parts: list[MicroBatch] = simulation.log.rows(BATCHES)
    trained = Counter(name for part in parts for name in part.trajectory_ids)
    assert max(trained.values()) == 1
    assert all(parse_trajectory_id(name).number < FAR for name in trained)
    reasons = Counter(letter.step for letter in simulation.log.rows(DEAD_LETTERS))
    assert reasons["read relay"] > 100


def test_every_record_class_has_invalid_variants() -> None:
    refused = {type(record) for _, record in invalid_records() if invalid_reason(record) is not None}
    assert WeightVersion in refused
    assert len(refused) > 15

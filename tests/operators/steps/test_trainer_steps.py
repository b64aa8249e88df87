"""trainer: micro-batches in, metrics and dead letters out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from record_factories import experience, prompt, trajectory
from role_graph import RoleGraph
from sampled_batches import read_members

from operators.experience.pack_batches import pack
from schemas.block import Block
from schemas.records import MicroBatch
from schemas.topics import BATCHES, DEAD_LETTERS, METRICS


def micro_batch() -> MicroBatch:
    asked = prompt(4, samples=2)
    rows = Block.of([experience(trajectory(asked, member), float(member)) for member in range(2)])
    (parts,) = pack(0, read_members(rows, 0, 0), np.zeros(2, np.int64), budget=10**6, shares=1)
    (record,) = parts[0].records()
    return record


def test_train_makes_one_update_of_each_batch(graph: Callable[..., RoleGraph]) -> None:
    first = micro_batch()
    foreign = replace(first, batch=7)
    outputs = graph("trainer").fold("train", [], [(BATCHES, first)], [(BATCHES, first), (BATCHES, foreign)], [])
    metrics = [each.record for each in outputs if each.topic is METRICS]
    assert [(each.name, each.step, each.values["trajectories"]) for each in metrics] == [("trainer", 1, 2.0)]
    reasons = [each.record.reason for each in outputs if each.topic is DEAD_LETTERS]
    assert len(reasons) == 1

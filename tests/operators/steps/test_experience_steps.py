"""experience: experiences in, a selected batch out; a selected batch in, micro-batches out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from record_factories import experience, prompt, trajectory
from role_graph import RoleGraph

from operators.experience.pack_batches import SelectedBatch
from schemas.block import Block
from schemas.topics import BATCHES, EXPERIENCES, METRICS, SETTLED

Graph = Callable[..., RoleGraph]


def selected(graph: RoleGraph, members: Sequence[int]) -> list[Any]:
    asked = prompt(4, samples=2)
    rows = [experience(trajectory(asked, member), float(member)) for member in members]
    return graph.fold("admit, evict and sample", [(EXPERIENCES, Block.of(rows))])


def test_admit_evict_and_sample_selects_a_whole_group(graph: Graph) -> None:
    batch, metric, settled = selected(graph("experience"), [0, 1])
    assert isinstance(batch, SelectedBatch)
    assert (batch.number, len(batch.members)) == (0, 2)
    assert (metric.topic, metric.record.values["dropped"]) == (METRICS, 0.0)
    assert settled.topic is SETTLED
    assert [(each.trajectory_id, each.outcome, each.batch) for each in settled.record.records()] == [
        ("p4.0", "batched", 0),
        ("p4.1", "batched", 0),
    ]


def test_admit_evict_and_sample_waits_for_the_group(graph: Graph) -> None:
    assert selected(graph("experience"), [1, 1]) == []


def test_pack_micro_batches_writes_the_selected_trajectories(graph: Graph) -> None:
    batch, *others = selected(graph("experience"), [0, 1])
    packed, *after = graph("experience").map("pack micro-batches", batch, *others)
    assert [each.topic for each in after] == [METRICS, SETTLED]
    assert (packed.topic, packed.key, packed.partition) == (BATCHES, "0", 0)
    assert [each.trajectory_ids for each in packed.record.records()] == [("p4.0", "p4.1")]

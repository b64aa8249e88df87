"""score: trajectories in, experiences out."""

from __future__ import annotations

from collections.abc import Callable

from record_factories import failed, prompt, trajectory
from role_graph import RoleGraph

from schemas.block import Block
from schemas.topics import EXPERIENCES, METRICS, TRAJECTORIES

Graph = Callable[..., RoleGraph]


def test_score_writes_one_experience_a_trajectory(graph: Graph) -> None:
    asked = prompt(4)
    first, again = [trajectory(asked, 0), failed(asked, 1)], [trajectory(asked, 0, lease=9)]
    polls = [[(TRAJECTORIES, Block.of(first))], [(TRAJECTORIES, Block.of(again))]]
    outputs = graph("score").fold("score", *polls)
    experiences = [row for output in outputs if output.topic is EXPERIENCES for row in output.record.records()]
    names = [(each.trajectory.trajectory_id, each.trajectory.lease) for each in experiences]
    assert names == [("p4.0", 1), ("p4.1", 1)]
    assert experiences[1].error == "generation failed: given up"
    (metric,) = [output.record.values for output in outputs if output.topic is METRICS]
    assert (metric["trajectories"], metric["generation_errors"]) == (2.0, 1.0)


def test_score_of_an_idle_poll_is_empty(graph: Graph) -> None:
    assert graph("score").fold("score", []) == []

"""rollout: assignments in, trajectories out; events and hand-overs in, records out."""

from __future__ import annotations

from collections.abc import Callable

from decisions import placed
from record_factories import manifest, prompt, trajectory, version
from role_graph import RoleGraph

from operators.io.elements import Output
from schemas.records import Assignment, Cancel, Trajectory
from schemas.topics import DEAD_LETTERS, INBOX, RELAY, TRAJECTORIES, partition_of

Graph = Callable[..., RoleGraph]


def test_accept_and_generate_finishes_an_assignment(graph: Graph) -> None:
    assignment = Assignment(prompt(3, 1), 0, 1, 1, 0, 1, None, None, 0)
    foreign = Cancel(("p1.0",), (9,), 99, 1)
    records = [(RELAY, manifest(version(0))), (INBOX, assignment), (INBOX, foreign)]
    outputs = graph("rollout").fold("accept and generate", records, *[[]] * 20)
    finished = [each for each in outputs if isinstance(each, Trajectory)]
    assert [(each.trajectory_id, each.finish_reason, each.replica) for each in finished] == [("p3.0", "length", 0)]
    letters = [each.record.reason for each in outputs if isinstance(each, Output) and each.topic is DEAD_LETTERS]
    assert letters == ["replica 99 is not hosted here"]


def test_report_events_writes_trajectories_by_group(graph: Graph) -> None:
    done = trajectory(prompt(5), 0)
    partitions = 1
    (output,) = graph("rollout").map("report events", done)
    assert output == Output(TRAJECTORIES, "p5", done, partition_of(5, partitions))


def test_repartition_hand_overs_writes_to_the_next_owners_inbox(graph: Graph) -> None:
    decision = placed(1, 2, tokens=2)
    assert graph("rollout").map("repartition hand-overs", decision) == [Output(INBOX, "", decision.assignment, 2)]

"""placement: prompts and heartbeats in, decisions out; decisions in, inbox records out."""

from __future__ import annotations

from collections.abc import Callable

from decisions import placed
from record_factories import manifest, prompt, status, version
from role_graph import RoleGraph

from operators.io.elements import Output
from operators.io.repartition import LiveReplicas, Placed
from schemas.records import DeadLetter
from schemas.topics import DEAD_LETTERS, INBOX, PROMPTS, RELAY, REPLICAS

Graph = Callable[..., RoleGraph]


def test_track_and_decide_places_each_sample_of_a_prompt(graph: Graph) -> None:
    beat = status(0, version(0), run="steps")
    records = [(REPLICAS, beat), (RELAY, manifest(version(0))), (PROMPTS, prompt(3, samples=2))]
    live, *decisions = graph("placement").fold("track and decide", records)
    assert live == LiveReplicas({0: 1})
    assert [(type(each), each.assignment.trajectory_id, each.assignment.replica) for each in decisions] == [
        (Placed, "p3.0", 0),
        (Placed, "p3.1", 0),
    ]
    assert decisions[0].assignment.lease < decisions[1].assignment.lease


def test_track_and_decide_rejects_an_imported_prompt(graph: Graph) -> None:
    outputs = graph("placement").fold("track and decide", [(PROMPTS, prompt(3, purpose="imported"))])
    letters: list[DeadLetter] = [each.record for each in outputs if each.topic is DEAD_LETTERS]
    assert [each.reason for each in letters] == ["i3: imported prompts are not generated"]


def test_repartition_trajectories_writes_to_the_replicas_inbox(graph: Graph) -> None:
    decision = placed(1, 2, tokens=2)
    outputs = graph("placement").map("repartition trajectories", LiveReplicas({2: 1}), decision)
    assert outputs == [Output(INBOX, "", decision.assignment, 2)]

"""Trajectories of several groups share a record, by purpose: readers select records by the first letter of a key."""

from __future__ import annotations

from record_factories import prompt, trajectory

from operators.io.coalesce import coalesce
from operators.io.elements import Output
from schemas.codec import decode
from schemas.topics import TRAJECTORIES


def test_groups_of_one_purpose_share_a_record_of_trajectories() -> None:
    p3, p4, e1 = (
        trajectory(prompt(number, purpose=of), 0) for number, of in ((3, "train"), (4, "train"), (1, "evaluation"))
    )
    outputs = [Output(TRAJECTORIES, key, row, 0) for key, row in (("p3", p3), ("e1", e1), ("p4", p4))]
    name = TRAJECTORIES.name("run")
    written = coalesce(outputs, lambda topic: topic.name("run"))
    found = [(each.topic, each.partition, each.key, decode(each.value, each.headers)) for each in written]
    assert found == [(name, 0, b"p3", [p3, p4]), (name, 0, b"e1", [e1])]

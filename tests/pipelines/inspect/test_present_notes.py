"""Which commit notes are of the shards and ranks that a run has now."""

from __future__ import annotations

import pytest

from infra.kafka.note import Note
from pipelines.inspect.present_notes import present_notes

RUN = "laminar.run."


def note(*partitions: str, shards: int = 1, sealed: bool = False) -> Note:
    return Note(offsets=dict.fromkeys(partitions, 5), shards=shards, sealed=sealed)


SCORE_0 = {"score.0": note("trajectories:0", "trajectories:1", shards=2)}
TRAINER_0 = {"trainer.0": note("batches:0", "batches:1", "relay:0")}


@pytest.mark.parametrize(
    ("notes", "ended"),
    [
        ({**SCORE_0, "score.2": note("trajectories:2", shards=3, sealed=True)}, {"score.2"}),
        # the change has not ended: the second shard's note is sealed, too
        ({**SCORE_0, "score.1": note("trajectories:1", shards=2, sealed=True)}, set()),
        ({"score.1": note("trajectories:1", sealed=True)}, set()),
        # shards whose number is fixed do not record it
        ({"experience.0": note("experiences:0"), "experience.1": note("experiences:1")}, set()),
        ({**TRAINER_0, "trainer.1": note("batches:1")}, {"trainer.1"}),
        ({"trainer.0": note("batches:0", "relay:0"), "trainer.1": note("batches:1")}, set()),
        ({**TRAINER_0, "trainer.1": note()}, set()),
        ({**TRAINER_0, "trainer.1": note("batches:2"), "trainer.2": note("batches:2")}, {"trainer.2"}),
        # each reads the same for itself
        ({"relay.0": note("relay:0"), "relay.1": note("relay:0")}, set()),
        ({"export.a": note("experiences:0"), "export.b": note("experiences:0")}, set()),
    ],
)
def test_notes_of_ended_shards_and_ranks_are_left_out(notes: dict[str, Note], ended: set[str]) -> None:
    found = present_notes({RUN + name: each for name, each in notes.items()})
    assert found.keys() == {RUN + name for name in notes.keys() - ended}

"""Batches that the trainer does not train: without a use, repeated, missing, too early."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from trainer_batches import make_batch
from trainer_on_a_log import Trainer

from infra.kafka.note import Note
from operators.trainer.assembly import MissingBatch
from operators.trainer.replay import Replay
from schemas.columns import floats, token_ids
from schemas.records import DeadLetter
from schemas.topics import BATCHES, DEAD_LETTERS, METRICS, RELAY


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (floats([float("nan"), 1, 0, 0]), "has a reward that is not finite"),
        (token_ids(range(10**6, 10**6 + 200)), "outside the model's vocabulary"),
    ],
    ids=["not a number", "of another tokenizer"],
)
def test_untrainable_batch_is_a_dead_letter(trainer: Trainer, column: Any, reason: str) -> None:
    trainer.start()
    trainer.run()
    (row,) = make_batch(seed=0, groups=2, samples=2)
    name = "rewards" if len(column) == 4 else "token_ids"
    trainer.log.append(BATCHES, replace(row, **{name: column[: len(getattr(row, name))]}))
    trainer.run()
    assert trainer.committed(BATCHES) == 1
    trainer.feed(1)
    trainer.run(3)
    (letter,) = trainer.log.rows(DEAD_LETTERS)
    assert isinstance(letter, DeadLetter)
    assert (letter.step, letter.offset) == ("train", 0)
    assert reason in letter.reason
    assert trainer.manifests() == [("1.0", None, ()), ("1.1", "1.0", (0,)), ("1.2", "1.1", (1,))]
    assert [m.untrained_batches for m in trainer.log.rows(RELAY)] == [(), (0,), ()]
    before, after = trainer.weights("1.0"), trainer.weights("1.1")
    assert all((before[name] == after[name]).all() for name in before)
    assert trainer.log.rows(METRICS)[0].values["batches/untrained"] == 1.0


@pytest.mark.parametrize("trainer", [1], indirect=True)
def test_run_ends_after_an_untrainable_last_batch(trainer: Trainer) -> None:
    trainer.start()
    trainer.run()
    trainer.feed(*range(5))
    (row,) = make_batch(seed=5, number=5, groups=2, samples=2)
    trainer.log.append(BATCHES, replace(row, trajectory_ids=row.trajectory_ids[:1] * 4))
    trainer.run(7)
    newest = trainer.log.rows(RELAY)[-1]
    assert (newest.final, newest.untrained_batches, newest.trajectories_trained) == (True, (5,), 20)
    assert trainer.steps()[-1] == 6
    assert (trainer.folder / "model" / "config.json").exists()


def test_repeated_batch_is_a_dead_letter(trainer: Trainer) -> None:
    trainer.start()
    trainer.run()
    trainer.feed(0, 1)
    trainer.feed(0, 1)
    trainer.feed(2)
    trainer.run(4)
    assert trainer.ancestry() == [0, 1, 2]
    assert trainer.steps() == [1, 2, 3]
    letters = trainer.log.rows(DEAD_LETTERS)
    assert [(letter.offset, letter.reason.partition(",")[0]) for letter in letters] == [
        (2, "batch 0 was accepted before"),
        (3, "batch 1 was accepted before"),
    ]


def test_missing_batch_fails_with_its_number(trainer: Trainer) -> None:
    trainer.configure(missing_batch_wait_s=0.0)
    trainer.start()
    trainer.run()
    trainer.feed(0, 2)
    trainer.batches_made = 3
    trainer.run()
    with pytest.raises(MissingBatch, match=r"batch 1 is missing .*batch 2 is at offset 1.*lost_batches = \[1\]"):
        trainer.run(2)
    assert trainer.steps() == [1]
    with pytest.raises(MissingBatch, match="batch 1 is missing"):
        replayed(trainer, {0: Note(state={"batch": 3}, shards=1)})
    assert replayed(trainer, {0: Note(state={"batch": 1}, shards=1)}) == 1
    trainer.configure(lost_batches=(1,))
    trainer.start()
    trainer.run(4)
    assert trainer.ancestry() == [0, 1, 2]
    assert {m.version.number: m.untrained_batches for m in trainer.log.rows(RELAY) if m.untrained_batches} != {}
    assert trainer.log.rows(DEAD_LETTERS) == []


def replayed(trainer: Trainer, notes: dict[int, Note]) -> int:
    """The number of batches that a replay trains, where the buffer has committed `notes`."""
    parts = [(part, 0, offset) for offset, part in enumerate(trainer.log.rows(BATCHES))]
    return len(list(Replay(trainer.step.config, trainer.step.model, notes=lambda _: notes).train(parts)))


def test_trainer_waits_for_a_batch_that_arrives_late(trainer: Trainer) -> None:
    """Another writer than the buffer may have written the later batch, so the next one may still arrive."""
    trainer.start()
    trainer.run()
    trainer.feed(1)
    trainer.run(2)
    trainer.feed(0, 1)
    trainer.run(3)
    assert trainer.ancestry() == [0, 1]
    (letter,) = trainer.log.rows(DEAD_LETTERS)
    assert (letter.offset, letter.reason) == (0, "batch 1 arrived before batch 0")


def test_foreign_batch_far_ahead_never_stops_the_trainer(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    trainer.configure(missing_batch_wait_s=0.0)
    trainer.start()
    (foreign,) = make_batch(number=10**6)
    for number in range(6):
        trainer.log.append(BATCHES, foreign)
        trainer.run(3)
        trainer.feed(number)
        trainer.batches_made = number + 1
        trainer.run(2)
    trainer.log.append(BATCHES, foreign)
    trainer.run(3)
    assert trainer.ancestry() == list(range(6))
    assert trainer.steps() == [1, 2, 3, 4, 5, 6]
    reasons = [letter.reason for letter in trainer.log.rows(DEAD_LETTERS)]
    assert reasons == [f"batch {10**6} arrived before batch {number}" for number in range(6)]
    assert caplog.text.count("another program has written it") == 7

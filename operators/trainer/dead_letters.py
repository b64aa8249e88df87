"""Dead letters for the records that the trainer skips; the records themselves stay in the batches topic."""

from __future__ import annotations

from collections.abc import Iterable

from operators.io.elements import Output
from operators.trainer.assembly import RejectedMicroBatch
from schemas.records import DeadLetter
from schemas.topics import BATCHES, DEAD_LETTERS


def dead_letters(rejected: Iterable[RejectedMicroBatch], run: str, now: int) -> list[Output]:
    """A dead letter for each of `rejected` in `run`, at `now` in Unix milliseconds."""
    topic = BATCHES.name(run)
    return [
        Output(DEAD_LETTERS, topic, DeadLetter("train", reason, topic, partition, offset, b"", now))
        for partition, offset, reason in rejected
    ]

"""How many batches the buffer has made, by its commit notes: a batch is missing only if it is one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from infra.kafka.note import Note
from infra.kafka.role_notes import NotesUnavailable
from operators.trainer.missing_batch import batches_made


def noted(shards: int, batch: int, **state: Any) -> Note:
    return Note(state={"batch": batch, **state}, shards=shards)


@pytest.mark.parametrize(
    ("notes", "made"),
    [
        ({}, None),
        ({0: Note()}, 0),
        ({0: noted(1, 7)}, 7),
        ({0: noted(2, 7), 1: noted(2, 5)}, 5),
        ({0: noted(2, 7)}, None),
        ({0: noted(1, 7), 1: replace(noted(2, 5), sealed=True)}, 7),
        ({0: noted(1, 7), 1: noted(1, 5)}, 5),
        ({0: noted(1, 7, progress={"0": [31, 7], "1": [29, 6]})}, 6),
    ],
    ids=[
        "new run",
        "no batch yet",
        "one shard",
        "slowest shard",
        "shard to come",
        "former shard",
        "fixed number",
        "slowest division",
    ],
)
def test_batches_are_made_if_all_shards_have_made_them(notes: Mapping[int, Note], made: int | None) -> None:
    assert batches_made(lambda pipeline: notes if pipeline == "experience" else {}) == made


def test_no_batch_counts_as_made_while_notes_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    def unavailable(pipeline: str) -> NoReturn:
        raise NotesUnavailable("no broker responds")

    assert batches_made(unavailable) is None
    assert "whether a batch is missing is not known: no broker responds" in caplog.text

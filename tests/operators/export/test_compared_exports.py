"""Exports that are compared with the log, and those that a command continues with other options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from export_factories import CONTENTS, block, experience, exported_to, polled

from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import PartitionRange
from operators.export.columns import RecordRows, as_table
from operators.export.config import Contents
from operators.export.export_topic import with_recorded_form
from operators.export.folder import STATE, ExportError, ExportFolder, ExportPart, compact, read_parts
from operators.export.verify import ExportedLog, verify
from operators.io.elements import PartitionKey, Polled, ReceivedRecord
from schemas.records import Experience
from schemas.topics import EXPERIENCES

NO_BROKER = ClientProperties.at("nowhere.invalid:9092")


class LogInMemory(ExportedLog):
    """The log of `polls`, of which it has the offsets from `beginning` to before `end`."""

    def __init__(self, polls: list[Polled], beginning: int, end: int) -> None:
        self._held = PartitionRange(beginning, end)
        self._records = [received for poll in polls for received in poll.records]

    def offsets(self, contents: Contents, partition: int) -> PartitionRange:
        return self._held

    def rows(self, contents: Contents, part: ExportPart):
        assert self._held.beginning <= part.first <= part.last < self._held.end, "it would be read without end"
        own = [each for each in self._records if part.first <= each.offset <= part.last]
        return as_table(EXPERIENCES, 0, [RecordRows.of_one(each.record, each.offset, 1000) for each in own]), []


@pytest.mark.parametrize(
    ("beginning", "end", "not_compared", "compared", "problem"),
    [
        (0, 9, {}, True, ""),
        (0, 7, {}, True, "experiences-p0-000000000004-000000000007.parquet: the log ends at offset 7: the topic"),
        (2, 9, {0: 4}, True, ""),  # it begins within the first file
        (9, 9, {0: 8}, False, ""),
    ],
)
def test_verify_compares_only_what_the_log_has(
    tmp_path: Path, beginning: int, end: int, not_compared: dict[int, int], compared: bool, problem: str
) -> None:
    polls = [polled(0, 3), polled(4, 3, last=True)]
    exported_to(tmp_path, polls, file_bytes=1)
    found = verify(tmp_path, LogInMemory(polls, beginning, end))
    assert (found.not_compared, found.compared, len(found.problems)) == (not_compared, compared, bool(problem))
    assert all(each.startswith(problem) for each in found.problems)


def test_verify_accepts_repeated_questions_of_joined_files(tmp_path: Path) -> None:
    """Each evaluation asks the same question, which the view verl has once in each of the files."""
    polls = [question_at(offset, last=offset == 2) for offset in range(3)]
    exported_to(tmp_path, polls, replace(CONTENTS, view="verl", split="test"), file_bytes=1)
    assert compact(tmp_path, 1 << 20) == 2
    assert [part.rows for part in read_parts(tmp_path)] == [3]
    assert verify(tmp_path, LogInMemory(polls, 0, 3)).problems == []


def question_at(offset: int, *, last: bool) -> Polled:
    """The answer to held-out question 0 at an offset."""
    answer: Experience = experience(0)
    asked = replace(answer.trajectory.prompt, purpose="evaluation", round=f"1.{offset}/greedy")
    held_out = replace(answer, trajectory=replace(answer.trajectory, prompt=asked))
    received = ReceivedRecord("experiences", 0, offset, block(held_out), 1000)
    return Polled("group", 1, (received,), (), {PartitionKey("experiences", 0): offset + 1}, True, last)


def test_export_continues_with_the_recorded_split_and_form(tmp_path: Path) -> None:
    """The topic is not read for the form: it may be empty by now."""
    exported_to(tmp_path, [], replace(CONTENTS, view="trl", split="test", messages=True))
    wanted = replace(CONTENTS, view="trl", split="train")
    same = with_recorded_form(wanted, NO_BROKER, tmp_path, keep_split=False)
    assert (same.split, same.messages) == ("test", True)
    ExportFolder(tmp_path, same).close()
    other = with_recorded_form(wanted, NO_BROKER, tmp_path, keep_split=True)
    with pytest.raises(ExportError, match="is an export with split 'test', not 'train'"):
        ExportFolder(tmp_path, other)
    full = replace(CONTENTS, split="all")
    assert with_recorded_form(full, NO_BROKER, tmp_path, keep_split=False) == full  # of another view: refused later


def test_export_without_a_recorded_split_has_all_rows(tmp_path: Path) -> None:
    contents = replace(CONTENTS, view="conversations")
    exported_to(tmp_path, [], contents)
    file = tmp_path / STATE / "export.json"
    fields = json.loads(file.read_text())
    del fields["split"]
    file.write_text(json.dumps(fields))
    continued = with_recorded_form(replace(contents, split="train"), NO_BROKER, tmp_path, keep_split=False)
    assert continued.split == "all"
    ExportFolder(tmp_path, continued).close()

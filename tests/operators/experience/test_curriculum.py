"""The buffer asks for harder or easier questions by how those of the present level fare, once for each change."""

from __future__ import annotations

import pytest
from buffer_harness import Buffer
from record_factories import experience, failed, prompt, trajectory

from operators.experience.batch_context import BatchContext
from operators.experience.parts import Component
from operators.experience.samplers import Curricular
from schemas.records import LevelReply, LevelRequest, RewardComponent
from schemas.topics import CURRICULUM, LEVEL_REPLY, METRICS

SAMPLER = Component("curriculum", {"least": 4, "harder_above": 0.7, "easier_below": 0.3})


def buffer(levels: int = 3) -> Buffer:
    return Buffer(global_batch=2, levels=levels, sampler=SAMPLER)


def asked(of: Buffer) -> list[tuple[int, float, int]]:
    rows = [row for row in of.log.rows(CURRICULUM) if isinstance(row, LevelRequest)]
    return [(row.level, row.success, row.answered) for row in rows]


def begin(of: Buffer, level: int, number: int, task: str = "") -> None:
    of.log.append(CURRICULUM, LevelReply(task, level, number, 0), LEVEL_REPLY)


def answer(of: Buffer, *numbers: int, right: float = 1.0, task: str = "chain_sum") -> None:
    for number in numbers:
        rows = [trajectory(prompt(number, task=task), member) for member in range(2)]
        of.score(*(experience(row, 9.0, components=(RewardComponent("accuracy", right, 0.0),)) for row in rows))
    of.shard.run()


def test_questions_that_are_answered_right_are_to_be_harder_and_others_easier() -> None:
    one = buffer()
    answer(one, 0)
    assert asked(one) == []  # too few
    answer(one, 2)
    assert asked(one) == [(1, 1.0, 4)]
    answer(one, 4, 6)
    assert len(asked(one)) == 1  # an answer is awaited
    begin(one, 1, 10)
    answer(one, 8)  # still of the level before
    answer(one, 10, 12, right=0.0)
    assert asked(one)[1:] == [(0, 0.0, 4)]
    assert [m.values["curriculum/level"] for m in one.log.rows(METRICS)][-2:] == [1.0, 1.0]


def test_each_task_has_a_curriculum_of_its_own() -> None:
    one = Buffer(global_batch=2, levels={"sums": 3, "words": 2}, sampler=SAMPLER)
    answer(one, 0, 2, task="sums")
    answer(one, 4, 6, right=0.0, task="words")  # there is nothing easier
    answer(one, 8, task="other")
    rows = [row for row in one.log.rows(CURRICULUM) if isinstance(row, LevelRequest)]
    assert [(row.task, row.level, row.success, row.answered) for row in rows] == [("sums", 1, 1.0, 4)]
    begin(one, 1, 10, "sums")
    answer(one, 10, task="words")
    one.shard.start()
    answer(one, 12, 14, task="words")
    rows = [row for row in one.log.rows(CURRICULUM) if isinstance(row, LevelRequest)]
    assert [(row.task, row.level, row.success, row.answered) for row in rows[1:]] == []
    answer(one, 16, 18, 20, 22, 24, 26, task="words")
    rows = [row for row in one.log.rows(CURRICULUM) if isinstance(row, LevelRequest)]
    assert [(row.task, row.level) for row in rows[1:]] == [("words", 1)]
    told = one.log.rows(METRICS)[-1].values
    assert (told["curriculum/level/sums"], told["curriculum/level/words"]) == (1.0, 0.0)


@pytest.mark.parametrize(("levels", "right"), [(1, 1.0), (0, 1.0), (3, 0.0), (3, 0.5)])
def test_nothing_is_asked_beyond_the_levels_or_where_all_is_well(levels: int, right: float) -> None:
    one = buffer(levels)
    answer(one, 0, 2, 4, right=right)
    assert asked(one) == []


def test_what_is_refused_or_has_no_accuracy_counts_and_what_failed_does_not() -> None:
    one = Buffer(global_batch=1, levels=2, sampler=Component(f"{__file__}:Both"))
    first, second = prompt(0, 2), prompt(2, 2)
    one.score(*(experience(trajectory(first, member), 2.0) for member in range(2)))  # refused: all alike
    one.score(experience(trajectory(second, 0), -1.0), experience(failed(second, 1), -1.0))
    one.shard.run()
    assert asked(one) == [(1, pytest.approx(2 / 3), 3)]


class Both(Curricular):
    """Refuses groups of one reward, and asks for harder questions after three answers."""

    def __init__(self) -> None:
        super().__init__(least=3, harder_above=0.5)

    def refuse(self, group: object) -> str | None:
        return "alike" if len({member.reward for member in group.members}) < len(group.members) else None  # type: ignore[attr-defined]


def test_a_sampler_sees_success_by_task() -> None:
    one = Buffer(global_batch=2, levels=2, sampler=Component(f"{__file__}:OfSums"))
    for number, task, reward in ((0, "sums", 0.0), (2, "gcd", 1.0), (4, "sums", 1.0), (6, "sums", 1.0)):
        asked_for = prompt(number, task=task)
        one.score(*(experience(trajectory(asked_for, member), reward) for member in range(2)))
        one.shard.run()
        assert len(asked(one)) == (number == 6)
    assert asked(one) == [(1, 0.75, 8)]


class OfSums(Curricular):
    """Asks for harder questions once two of three answers to sums are right, whatever becomes of others."""

    def wish(self, moment: BatchContext) -> int:
        return int("sums" in moment.success and moment.success["sums"].share > 0.6)


@pytest.mark.parametrize("commit", [True, False])
def test_a_restart_neither_forgets_nor_repeats_what_was_asked_and_counted(commit: bool) -> None:
    one = buffer()
    answer(one, 0)
    one.shard.start()
    for member in range(2):
        right = (RewardComponent("accuracy", 1.0, 0.0),)
        one.score(experience(trajectory(prompt(2), member), components=right))
    one.shard.turn()
    if commit:
        one.shard.commit()
    one.shard.start()
    one.shard.run()
    assert asked(one) == [(1, 1.0, 4)]
    begin(one, 1, 4)
    one.shard.run()
    answer(one, 4)
    one.shard.start()  # begins with all levels that have begun: none of them anew
    answer(one, 6)
    assert asked(one)[1:] == [(2, 1.0, 4)]


def test_what_a_curriculum_needs_is_said() -> None:
    with pytest.raises(ValueError, match="0 <= easier_below < harder_above <= 1"):
        Curricular(easier_below=0.9)

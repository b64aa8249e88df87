"""Layouts of tables: the columns of a row that contain the question, the answer and the task.

Detected without configuration; the first column present counts:

- question: `prompt` (text, or messages as in verl and TRL), `messages`, `question`, `problem`
- answer: `reward_model.ground_truth` (verl), `answer`, `ground_truth`, `solution` (TRL)
- task: `data_source` (verl), `task`
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any

from infra.conditions.rows import column_value, has_column
from operators.prompts.config import TaskConfig
from operators.prompts.question import Question, RefusalKind, SourceError, UnusableRow
from schemas.records import Message

PROMPT_COLUMNS = ("prompt", "messages", "question", "problem")
ANSWER_COLUMNS = ("reward_model.ground_truth", "answer", "ground_truth", "solution")
TASK_COLUMNS = ("data_source", "task")


def top_columns(config: TaskConfig) -> set[str]:
    """Names of the top-level columns that `config` may need, which are the only ones to read."""
    wanted = [config.prompt_column, config.answer_column, *config.reference_columns]
    wanted += [*PROMPT_COLUMNS, *ANSWER_COLUMNS, *TASK_COLUMNS]
    return {name.partition(".")[0] for name in wanted if name} | {name for name in wanted if name}


class ConditionColumns:
    """Finds columns of `where` and `levels` that no row has: they are misspelt. Rows may have no value for one."""

    def __init__(self, config: TaskConfig) -> None:
        self._missing = list(config.condition_columns)
        self._columns: dict[str, None] = {}
        """The columns of the first row."""

    def record(self, row: Any) -> None:
        """Record the columns of `row`."""
        if isinstance(row, Mapping) and self._missing:
            self._columns = self._columns or dict.fromkeys(map(str, row))
            self._missing = [name for name in self._missing if not has_column(row, name)]

    def check(self, source: str) -> None:
        """Raise SourceError if a column is in none of the rows of `source`, if there are any."""
        if self._missing and self._columns:
            columns = ", ".join(sorted(self._columns)[:12])
            missing = f"no column {self._missing[0]} in any row, only {columns}; prompts.where or levels names it"
            raise SourceError(f"{source} has {missing}", missing)


def question_of(row: Any, index: int, config: TaskConfig, task: str) -> Question:
    """The question in `row`, of `task` unless the row names another. Raises UnusableRow."""
    if not isinstance(row, Mapping):
        raise UnusableRow(f"expected an object, got {type(row).__name__}")
    text, messages = _prompt(_find(row, config.prompt_column, PROMPT_COLUMNS, "prompt_column", "no question"))
    reference: dict[str, Any] = {}
    try:
        answer = _find(row, config.answer_column, ANSWER_COLUMNS, "answer_column", "no answer")
        reference["answer"] = _answer(answer, config)
    except UnusableRow:
        if config.answer_required:
            raise
    for name in config.extra_columns:
        reference[name] = _with_times_as_text(_find(row, name, (), "extra_columns"))
    for name in config.condition_columns:
        if name not in reference:  # the answer stays as rewards compare with it, see `answer_after`
            reference[name] = _with_times_as_text(column_value(row, name))
    own_task = next((row[name] for name in TASK_COLUMNS if isinstance(row.get(name), str) and row[name]), task)
    _check_encodable(text, reference)
    return Question(index, text, messages, reference, own_task)


def _find(
    row: Mapping[str, Any],
    name: str,
    candidates: tuple[str, ...],
    option: str,
    kind: RefusalKind = "malformed",
) -> Any:
    names = (name,) if name else candidates
    for candidate in names:
        value = column_value(row, candidate)
        if value is not None:
            return value
    columns = ", ".join(sorted(map(str, row))[:12])
    hint = "" if name else f"; name it with prompts.{option}"
    if name and name.partition(".")[0] not in row and name not in row:
        hint = f"; prompts.{option} names it"
    raise UnusableRow(f"no value in column {' or '.join(names)} (the row has {columns or 'no columns'}){hint}", kind)


def _with_times_as_text(value: Any) -> Any:
    """`value` as JSON has it, if it is a time or a date: in ISO format, in UTC."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC)
    return value.isoformat() if isinstance(value, date) else value


def _answer(value: Any, config: TaskConfig) -> Any:
    if not config.answer_after:
        return value
    if not isinstance(value, str) or config.answer_after not in value:
        raise UnusableRow(f"the answer does not contain answer_after {config.answer_after!r}", "no answer")
    return value.rpartition(config.answer_after)[2].strip()


def _prompt(value: Any) -> tuple[str, tuple[Message, ...]]:
    if isinstance(value, str):
        if not value.strip():
            raise UnusableRow("the prompt is empty", "no question")
        return value, ()
    if not isinstance(value, list) or not value:
        raise UnusableRow(f"the prompt must be text or a list of messages, not {str(value)[:40]!r}")
    messages = tuple(_message(item) for item in value)
    if messages[-1].role == "assistant":
        raise UnusableRow("the last message is of the assistant, so there is nothing to answer")
    if not messages[-1].content.strip():
        raise UnusableRow("the prompt is empty", "no question")
    if len(messages) == 1:
        return messages[0].content, messages
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages), messages


def _message(item: Any) -> Message:
    role, content = (item.get("role"), item.get("content")) if isinstance(item, Mapping) else (None, None)
    if not isinstance(role, str) or not isinstance(content, str):
        raise UnusableRow(f"a message must have a role and a content of text, not {str(item)[:60]!r}")
    return Message(role, content)


def _check_encodable(text: str, reference: Mapping[str, Any]) -> None:
    try:
        text.encode()
        json.dumps(reference, ensure_ascii=False, allow_nan=False).encode()
    except (UnicodeEncodeError, ValueError, TypeError) as error:
        raise UnusableRow(f"the row cannot be written as JSON in UTF-8 ({error})") from error

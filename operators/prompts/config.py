"""Configuration of prompts: the source of questions, their templates and their sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from infra.conditions.grammar import comparisons, parse_condition
from infra.setting_types import CheckedSettings, FinitePositive, NonNegativeInt, PositiveInt, Seed, Share

SourceName = Literal["reasoning_gym", "jsonl", "parquet", "dataset", "synthetic"]
MAX_SUGGESTIONS = 12
"""Maximum valid names that an error lists."""
PROMPT_SLOT = "{prompt}"
"""The placeholder of the question in a template."""


@dataclass(frozen=True)
class TaskConfig(CheckedSettings):
    """Questions of one source and their sampling. Raises ValueError naming the invalid field.

    Seeds are below 2**29 and counts positive. `epochs` None never ends. Held-out questions are identified by their
    text. Their choice depends on neither `seed` nor `shuffle`, so runs that differ in these have the same evaluation.
    (A reasoning-gym task with `size` generates other questions under another seed, held-out ones too.)
    """

    name: str = ""
    """The `task` of its prompts, which selects rewards and labels metrics. Empty: reasoning-gym's task; for files the
    task in the row, or else `task`."""
    weight: FinitePositive = 1.0
    """How often its questions are drawn, relative to the weights of the other tasks."""

    source: SourceName = "reasoning_gym"
    """`reasoning_gym`, `jsonl` (a file with a JSON object a line), `parquet` (a file or a folder of them), `dataset` (a
    Hugging Face folder on disk: of `save_to_disk`, or Parquet or Arrow files), or `synthetic` (prompts of random
    tokens, for emulated runs)."""

    task: str = ""
    """reasoning-gym's task, to be named in a section `[prompts]` without another `source`; for files the task of rows
    that do not name one (default: the file's name without its ending, or the folder's name)."""
    task_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of reasoning-gym's task, except seed and size."""
    size: PositiveInt | None = None
    """Questions in an epoch of a reasoning-gym task; unset: a new question for every number (500 questions of
    the few tasks that cannot)."""

    where: str = ""
    """The condition on the rows to draw, such as `rate >= 0.2 and subject in ('algebra', 'geometry')`; dots select
    struct fields. Verifiers find its columns in the reference, null where a row has no value, times as texts; `answer`
    is what verifiers get. The language is that of `--where` (docs/exports.md)."""

    levels: tuple[str | Mapping[str, Any], ...] = ()
    """A curriculum, from easy to hard. For a reasoning-gym task without size: arguments of each level in addition to
    `task_args`; for a table: the condition of each level in addition to `where`. It begins with the first level; the
    buffer's sampler requests others. Held-out questions follow `task_args` and `where` only, at any level."""

    path: str = ""
    """The file or folder with the questions, for sources that read one."""
    split: str = "train"
    """The split of a `dataset` folder."""
    prompt_column: str = ""
    """Column of the question, text or a list of messages; dots select struct fields. Empty: the first there is of
    `prompt`, `messages`, `question` and `problem`."""
    answer_column: str = ""
    """The column with the reference answer. Empty: the first there is of `reward_model.ground_truth`, `answer`,
    `ground_truth` and `solution`."""
    answer_required: bool = True
    """False accepts rows without an answer, too, for rewards that need only the response."""
    answer_after: str = ""
    """The answer is the text after the last occurrence of this marker in its column ("####" for GSM8K); empty: all."""
    extra_columns: tuple[str, ...] = ()
    """Further columns to include in the reference for verifiers."""

    prompt_tokens: PositiveInt = 2048
    """Tokens of each prompt of the synthetic source."""

    template: str = PROMPT_SLOT
    """Text around the question, which replaces `{prompt}`; in a conversation, around its last message."""
    chat_template: bool = False
    """Render through the tokenizer's chat template."""
    system: str = ""
    """System message for questions that have none; needs `chat_template`."""

    environment: str = ""
    """The one of `rollout.environments` that responds to the model's turns, or a built-in one, `module:Class` or
    `file.py:Class`, which is added to them; `agent`: agents play the prompts; empty: none, a response is one turn."""

    samples_per_prompt: PositiveInt = 8
    """Trajectories generated for each prompt: the size of a group."""
    temperature: float = 1.0
    """Above 0; the trainer divides its logits by it too."""
    top_p: float = 1.0
    """Nucleus sampling; 1 for trained responses."""
    top_k: int = 0
    """`top_p` must be 1 and `top_k` 0: the trainer's distribution is not truncated, so importance ratios would be wrong
    by the kept share (see docs/training.md)."""
    max_new_tokens: PositiveInt = 256
    """Maximum tokens of a response; fewer where the context ends first."""

    stop: tuple[str, ...] = ()
    """Stop strings: each ends a response, or a turn of one, at the token that completes it, in addition to the
    tokenizer's end of sequence. Special tokens have no text."""

    seed: Seed = 0
    """Seed of the drawing of questions."""
    shuffle: bool = True
    """Whether questions are drawn in random order."""
    epochs: PositiveInt | None = None
    """Passes over the questions; unset: without end. A new run whose questions cannot fill all its batches is refused;
    one whose questions end before its goal, because trajectories failed or were dropped, is stopped.
    A submitted run is not: `laminar runs status` shows it."""

    max_refused_share: Share = 0.05
    """The run does not start if a larger share of the rows is refused: too long, malformed, without an answer."""

    heldout: NonNegativeInt = 0
    """Distinct questions that are excluded from training, for evaluation."""
    heldout_path: str = ""
    """File or folder of the same format with the held-out questions: its first `heldout` ones that match `where`, or
    all of them if `heldout` is 0."""

    def _check(self) -> None:
        self._check_sampling()
        if self.source == "reasoning_gym":
            self._check_task()
        elif self.source == "synthetic":
            self._check_synthetic()
        elif not self.path:
            raise ValueError(f"path must be set for source {self.source!r}")
        self._check_levels()
        if PROMPT_SLOT not in self.template:
            raise ValueError(f"template must contain {PROMPT_SLOT}, not {self.template!r}")
        if "" in self.stop:
            raise ValueError("stop must not contain an empty string: it would end every response at once")
        if self.system and not self.chat_template:
            raise ValueError("system needs chat_template = true: plain text has no system message")

    @property
    def task_name(self) -> str:
        """The name of the task, unless a row of a file names another."""
        return self.name or self.row_task

    @property
    def row_task(self) -> str:
        """The task of rows that name none, also of held-out ones elsewhere: `task`, else the name of file or folder."""
        path = Path(self.path)
        return self.task or (path.name if self.source == "dataset" else path.stem) or self.source

    @property
    def has_heldout(self) -> bool:
        """Whether questions are held out."""
        return bool(self.heldout or self.heldout_path)

    @property
    def endless(self) -> bool:
        """Whether questions are generated on demand, without a table."""
        return self.source == "synthetic" or (self.source == "reasoning_gym" and self.size is None)

    @property
    def reference_columns(self) -> tuple[str, ...]:
        """Columns that the reference contains in addition to the answer."""
        return tuple(dict.fromkeys([*self.extra_columns, *self.condition_columns]))

    @property
    def condition_columns(self) -> tuple[str, ...]:
        """Columns of `where` and `levels`; rows may have none of their values."""
        named = (each.column for text in self._conditions() for each in comparisons(parse_condition(text)))
        return tuple(dict.fromkeys(named))

    def for_level(self, level: int) -> TaskConfig:
        """The configuration of questions of `level`."""
        chosen = self.levels[level]
        if isinstance(chosen, str):
            both = f"({self.where}) and ({chosen})" if self.where and chosen else self.where or chosen
            return replace(self, where=both, levels=())
        return replace(self, task_args={**self.task_args, **chosen}, levels=())

    def _conditions(self) -> Iterator[str]:
        """The conditions of `where` and of levels."""
        return (text for text in (self.where, *self.levels) if isinstance(text, str) and text)

    def _check_task(self) -> None:
        if not self.task:
            raise ValueError("task must name a reasoning-gym task, e.g. 'chain_sum', for source 'reasoning_gym'")
        for name in ("path", "heldout_path"):
            if getattr(self, name):
                raise ValueError(f"{name} does not apply to source 'reasoning_gym'")
        for name in ("seed", "size"):
            if name in self.task_args:
                raise ValueError(f"task_args must not contain {name!r}: set {name} beside it")
        self._check_epochs()

    def _check_levels(self) -> None:
        if self.where and self.endless:
            raise ValueError("where needs a table: a file, or a reasoning-gym task with size")
        if self.source == "synthetic" and any(self.levels):
            raise ValueError("levels of source 'synthetic' must be empty tables: its prompts have no text")
        if self.levels and self.epochs is not None:
            raise ValueError("epochs does not apply to levels: a level lasts until another is requested")
        for level in self.levels:
            if isinstance(level, str) == self.endless:
                wanted = "a table of arguments of the task" if self.endless else "a condition such as 'grade <= 2'"
                raise ValueError(f"levels: each must be {wanted}, not {level!r}")
        for text in self._conditions():
            parse_condition(text)

    def _check_synthetic(self) -> None:
        for name in ("path", "heldout", "heldout_path", "chat_template", "environment", "stop"):
            if getattr(self, name):
                raise ValueError(f"{name} does not apply to source 'synthetic': its prompts have no text")
        self._check_epochs()

    def _check_epochs(self) -> None:
        """Raise ValueError for epochs of a source that generates questions without end."""
        if self.epochs is not None and self.size is None:
            raise ValueError(f"epochs needs size for source {self.source!r}: without it there are no epochs")

    def _check_sampling(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive, not {self.temperature}: greedy answers cannot be trained")
        for name, off in (("top_p", 1), ("top_k", 0)):
            if getattr(self, name) != off:
                raise ValueError(
                    f"{name} must be {off}, not {getattr(self, name)}: training needs samples of the whole "
                    "distribution (see docs/training.md); to sharpen it, lower the temperature"
                )


@dataclass(frozen=True)
class PromptsConfig(TaskConfig):
    """The questions of one task, or of a mixture of `tasks`. Raises ValueError as `TaskConfig`.

    With `tasks` each prompt is of one of them, drawn by weight and `seed`. The fields beside them are only defaults for
    tasks that do not set them; the reader of the configuration has filled them in.
    """

    tasks: tuple[TaskConfig, ...] = ()
    """Tasks of a mixture."""

    def _check(self) -> None:
        if not self.tasks:
            super()._check()
            return
        names = [task.task_name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"tasks: two have the same name, of {names}; set name")
        for task in self.tasks:
            if task.levels and not (task.name or task.endless):
                raise ValueError(
                    "tasks: a task of files with levels needs a name, since its rows may name several tasks"
                )
        if len({task.source == "synthetic" for task in self.tasks}) > 1:
            raise ValueError("tasks: synthetic prompts have no text, and cannot be mixed with those that have")

    @property
    def mixture(self) -> tuple[TaskConfig, ...]:
        """The tasks, at least one."""
        return self.tasks or (self,)

    @property
    def curricula(self) -> dict[str, int]:
        """Number of levels by task name, of tasks with levels; "" stands for the only task, whatever its rows name."""
        return {task.task_name if self.tasks else "": len(task.levels) for task in self.mixture if task.levels}

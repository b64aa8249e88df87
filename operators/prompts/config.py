"""How prompts are drawn: where questions come from, how they are worded and how often each is answered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infra.name_lookup import suggest_name
from operators.prompts.conditions import check_condition

SOURCES = ("reasoning_gym", "jsonl", "parquet", "dataset", "synthetic")
MOST_NAMED = 12
"""So many valid names an error lists at the most."""
SLOT = "{prompt}"
"""Where a template takes the question."""


@dataclass(frozen=True)
class TaskConfig:
    """Questions of one kind, and how they are asked. Raises ValueError naming the field that does not fit.

    Seeds are below 2**29 and counts positive. `epochs` None never ends. Held-out questions are told apart by their
    text, and which they are depends on neither `seed` nor `shuffle`: runs that differ in these are evaluated alike.
    (A reasoning-gym task with `size` makes other questions by another seed, held-out ones too.)
    """

    name: str = ""
    """What its prompts say as their task: rewards and metrics are told by it. Empty: reasoning-gym's task; for files
    what a row says of itself, or else `task`."""
    weight: float = 1.0
    """How often its questions are asked, beside the weights of the other tasks."""

    source: str = "reasoning_gym"
    """One of `SOURCES`. `dataset` is a Hugging Face folder on disk: `save_to_disk`'s, or Parquet or Arrow files.
    `synthetic` makes prompts of made-up tokens, for emulated runs."""

    task: str = ""
    """reasoning-gym's task; for files the name given to rows that do not carry one (default: the file's stem)."""
    task_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of reasoning-gym's task, without seed and size."""
    size: int | None = None
    """Questions in an epoch of a reasoning-gym task; None draws a fresh question for every number."""

    where: Mapping[str, Any] = field(default_factory=dict)
    """Which rows of a table to draw, by column (dots reach into structs): a value, one of a list, or a range such as
    `{ least = 0.2, below = 0.6 }`, either end of which may be left out. Verifiers see them in the reference."""

    levels: tuple[Mapping[str, Any], ...] = ()
    """A curriculum, from easy to hard. Of a reasoning-gym task without size: arguments of each level over `task_args`;
    of a table: conditions of each level over `where`. It begins with the first; the buffer's sampler asks for others.
    Held-out questions are of `task_args` and `where` alone, whatever the level."""

    path: str = ""
    split: str = "train"
    """Which split of a `dataset` folder."""
    prompt_column: str = ""
    """Column of the question, text or a list of messages; dots reach into structs. Empty: recognised (see layouts)."""
    answer_column: str = ""
    answer_required: bool = True
    """False lets rows through that have no answer: for rewards that look at the response alone."""
    answer_after: str = ""
    """The answer is what follows the last of these marks in its column ("####" for GSM8K); empty: all of it."""
    extra_columns: tuple[str, ...] = ()
    """Further columns that verifiers see in the reference."""

    prompt_tokens: int = 2048
    """Tokens of each prompt of the synthetic source."""

    template: str = SLOT
    """Wording around the question, which replaces `{prompt}`; of a conversation, around its last message."""
    chat_template: bool = False
    """Render through the tokenizer's chat template."""
    system: str = ""
    """System message put before a question that has none; needs `chat_template`."""

    environment: str = ""
    """Which of `rollout.environments` answers what the model writes; empty: none, and a response is one turn."""

    samples_per_prompt: int = 8
    temperature: float = 1.0
    """Above 0; the trainer divides its logits by it too."""
    top_p: float = 1.0
    top_k: int = 0
    """Must be 1 and 0: the trainer's distribution has no such cut, so importance ratios would be off by the share that
    was kept (see docs/training.md)."""
    max_new_tokens: int = 256
    """Bound of a response in tokens; shorter where the context ends first."""

    stop: tuple[str, ...] = ()
    """Texts that end a response, or a turn of one, beside the tokenizer's end of sequence: at the token that completes
    one. Special tokens have no text."""

    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None

    heldout: int = 0
    """How many distinct questions are kept from training, for evaluation."""
    heldout_path: str = ""
    """Take them from this file or folder (same format) instead: its first `heldout`, or all where that is 0."""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source {self.source!r} is unknown{suggest_name(self.source, SOURCES, MOST_NAMED)}")
        if self.source == "reasoning_gym":
            self._check_task()
        elif self.source == "synthetic":
            self._check_synthetic()
        elif not self.path:
            raise ValueError(f"path must be set for source {self.source!r}")
        self._check_levels()
        if SLOT not in self.template:
            raise ValueError(f"template must contain {SLOT}, not {self.template!r}")
        if "" in self.stop:
            raise ValueError("stop must not have an empty text: every response ends with one")
        if self.system and not self.chat_template:
            raise ValueError("system needs chat_template = true: plain text has no system message")
        self._check_numbers()

    @property
    def called(self) -> str:
        """What it is called where a row of a file says nothing else."""
        return self.name or self.task or Path(self.path).stem or self.source

    @property
    def evaluated(self) -> bool:
        """Whether questions are held out."""
        return bool(self.heldout or self.heldout_path)

    @property
    def endless(self) -> bool:
        """Whether questions are made as they are asked for: there is no table of them."""
        return self.source == "synthetic" or (self.source == "reasoning_gym" and self.size is None)

    @property
    def reference_columns(self) -> tuple[str, ...]:
        """Columns of a table that a reference holds besides the answer."""
        conditions = (self.where, *(() if self.endless else self.levels))
        return tuple(dict.fromkeys([*self.extra_columns, *(name for each in conditions for name in each)]))

    def at(self, level: int) -> TaskConfig:
        """As it is for questions of `level`."""
        if self.endless:
            return replace(self, task_args={**self.task_args, **self.levels[level]}, levels=())
        return replace(self, where={**self.where, **self.levels[level]}, levels=())

    def _check_task(self) -> None:
        if not self.task:
            raise ValueError("task must name a reasoning-gym task, e.g. 'chain_sum'")
        for name in ("path", "heldout_path"):
            if getattr(self, name):
                raise ValueError(f"{name} does not go with source 'reasoning_gym'")
        for name in ("seed", "size"):
            if name in self.task_args:
                raise ValueError(f"task_args must not contain {name!r}: set {name} beside it")
        if self.epochs is not None and self.size is None:
            raise ValueError("epochs needs size for source 'reasoning_gym': without it there are no epochs")

    def _check_levels(self) -> None:
        if self.where and self.endless:
            raise ValueError("where needs a table: a file, or a reasoning-gym task with size")
        if self.levels and self.source == "synthetic":
            raise ValueError("levels do not go with source 'synthetic'")
        if self.levels and self.epochs is not None:
            raise ValueError("epochs does not go with levels: a level lasts until another is asked for")
        for conditions in (self.where, *(() if self.endless else self.levels)):
            for column, wanted in conditions.items():
                check_condition(column, wanted)

    def _check_synthetic(self) -> None:
        for name in ("path", "heldout", "heldout_path", "chat_template", "environment", "stop"):
            if getattr(self, name):
                raise ValueError(f"{name} does not go with source 'synthetic': its prompts have no text")

    def _check_numbers(self) -> None:
        for name in ("prompt_tokens", "samples_per_prompt", "max_new_tokens", "epochs", "size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight must be positive, not {self.weight}")
        if self.heldout < 0:
            raise ValueError(f"heldout must not be negative, not {self.heldout}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive, not {self.temperature}: greedy answers cannot be trained")
        for name, off in (("top_p", 1), ("top_k", 0)):
            if getattr(self, name) != off:
                raise ValueError(
                    f"{name} must be {off}, not {getattr(self, name)}: what is trained must be drawn from the whole "
                    "distribution (see docs/training.md); a lower temperature sharpens it"
                )
        if not 0 <= self.seed < 2**29:
            raise ValueError(f"seed must be in [0, 2**29), not {self.seed}")


@dataclass(frozen=True)
class PromptsConfig(TaskConfig):
    """What the prompts operator draws: the questions of one task, or of several. Raises ValueError as a task does.

    With `tasks` each prompt is of one of them, drawn by weight and `seed`; what stands beside them is what a task has
    that does not say otherwise (the configuration's reader has filled it in), and nothing more.
    """

    tasks: tuple[TaskConfig, ...] = ()

    def __post_init__(self) -> None:
        if not self.tasks:
            super().__post_init__()
            return
        called = [task.called for task in self.tasks]
        if len(set(called)) < len(called):
            raise ValueError(f"tasks: two are called the same, of {called}; set name")
        for task in self.tasks:
            if task.levels and not (task.name or task.endless):
                raise ValueError("tasks: one of files with levels needs a name: its rows may name many tasks")
        if len({task.source == "synthetic" for task in self.tasks}) > 1:
            raise ValueError("tasks: synthetic prompts have no text, and do not go with those that have")

    @property
    def mixture(self) -> tuple[TaskConfig, ...]:
        """The tasks: at least one."""
        return self.tasks or (self,)

    @property
    def curricula(self) -> dict[str, int]:
        """How many levels each task has that has any, by its name; "" is the only task, whatever its rows call it."""
        return {task.called if self.tasks else "": len(task.levels) for task in self.mixture if task.levels}

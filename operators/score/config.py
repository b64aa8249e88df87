"""Settings of scoring: weighted rewards and answer extraction for each task, and the limits of a verifier."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Le

from infra.name_lookup import suggest_name
from infra.setting_types import CheckedSettings, Positive, PositiveInt
from operators.score.attempt import AnswerKind, Extraction
from operators.score.rewards import REWARDS, is_custom

_Amount = Annotated[float, Ge(-1e6), Le(1e6)]
_NEEDED: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    tuple: "a list of one or more texts",
}


@dataclass(frozen=True)
class RewardSpec(CheckedSettings):
    """One weighted reward. Raises ValueError naming the field or option that does not fit.

    `name` is one of `rewards.REWARDS` or a user's function, `module:function` or `file.py:function`. The function must
    be trusted code: it runs with the user's rights, within limits that catch mistakes, not malice.
    """

    name: str
    """A built-in reward, `module:function` or `file.py:function`."""
    weight: _Amount = 1.0
    """Factor of its value in the sum."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the reward."""
    label: str = ""
    """Name of its component; empty: the name of the function or of the reward."""
    correct_from: _Amount | None = None
    """The value from which an answer is correct, for the accuracy; unset: 1, of the first built-in reward that compares
    answers, or of the total reward. Set it where a full reward is not 1, as with costs of steps or partial credit."""

    def _check(self) -> None:
        if is_custom(self.name):
            if not all(self.name.rpartition(":")[::2]):
                raise ValueError(f"rewards: name {self.name!r} must be 'module:function' or 'file.py:function'")
            return
        if self.name not in REWARDS:
            raise ValueError(f"rewards: there is no reward {self.name!r}{suggest_name(self.name, REWARDS)}")
        self._check_options()

    @property
    def component(self) -> str:
        """The name of its component in an Experience."""
        return self.label or self.name.rpartition(":")[2]

    def _check_options(self) -> None:
        known = REWARDS[self.name].options
        for name in self.options:
            if name not in known:
                raise ValueError(f"rewards: {self.name} has no option {name!r}{suggest_name(name, known)}")
        for name, default in known.items():
            if default is None and name not in self.options:
                raise ValueError(f"rewards: {self.name} needs option {name!r}")
        given = self.options
        for name in given:
            # Of the required options only regex's pattern is no number.
            required = str if name == "pattern" else float
            kind = required if known[name] is None else type(known[name])
            if not _is_of(kind, given[name]):
                raise ValueError(f"rewards: {self.name} needs {_NEEDED[kind]} as {name!r}, not {given[name]!r}")
        if self.name == "regex":
            _check_pattern("rewards: regex's pattern", given["pattern"])
        if given.get("tolerance", 0) < 0:
            raise ValueError(f"rewards: numeric needs a 'tolerance' of at least 0, not {given['tolerance']!r}")
        if self.name == "length" and not 0 <= given["target"] < given["limit"]:
            raise ValueError("rewards: length needs 0 <= target < limit")
        if self.name == "code" and not (given.get("seconds", 1) > 0 and given.get("memory_mb", 1) > 0):
            raise ValueError("rewards: code needs seconds > 0 and memory_mb > 0")
        if self.name == "overlong" and not 0 < given["buffer"] <= given["limit"]:
            raise ValueError("rewards: overlong needs 0 < buffer <= limit")


@dataclass(frozen=True)
class Rubric(CheckedSettings):
    """How answers are rewarded. Raises ValueError naming the field that does not fit."""

    rewards: tuple[RewardSpec, ...] = (RewardSpec("reasoning_gym"),)
    """Rewards whose weighted sum is the reward."""
    answer: AnswerKind = "marker"
    """Where the answer is in a response. `marker`: after the last `answer_marker`. `regex`: the first group of the last
    match of `answer_regex`, or the whole match. `boxed`: in the last \\boxed{}. `fenced`: in the last block of ```, for
    programs. `whole`: the whole response."""
    answer_marker: str = "#"
    """The text before the answer, for `answer = "marker"`."""
    answer_regex: str = ""
    """The expression that finds the answer, for `answer = "regex"`."""
    on_error: _Amount | None = None
    """Reward of a trajectory whose reward or episode failed, if the model has drawn a token: it is then trained.
    Unset: a failed trajectory is not trained."""

    def _check(self) -> None:
        if not self.rewards:
            raise ValueError("rewards must name at least one reward, such as 'exact'")
        if sum(spec.correct_from is not None for spec in self.rewards) > 1:
            raise ValueError("rewards: only one reward may have correct_from: an answer has one accuracy")
        names = [spec.component for spec in self.rewards]
        for name in names:
            if names.count(name) > 1 or name == "accuracy":
                raise ValueError(f"rewards: two components would be called {name!r}; set label")
        if self.answer == "marker" and not self.answer_marker:
            raise ValueError("answer_marker must not be empty")
        if self.answer == "regex":
            _check_pattern("answer_regex", self.answer_regex)

    @property
    def accuracy(self) -> tuple[RewardSpec, float] | None:
        """The reward that says whether an answer is correct, and its value from which it is; None if no reward does."""
        declared = [(spec, spec.correct_from) for spec in self.rewards if spec.correct_from is not None]
        comparing = [(spec, 1.0) for spec in self.rewards if not is_custom(spec.name) and REWARDS[spec.name].accuracy]
        return next(iter([*declared, *comparing]), None)

    def needs_process(self, spec: RewardSpec) -> bool:
        """Whether the reward `spec` always runs in a verifier process: it may be slow, or hang.

        An answer pattern may backtrack for ever on a model's text.
        """
        return is_custom(spec.name) or self.answer == "regex" or REWARDS[spec.name].in_process is False

    @property
    def extraction(self) -> Extraction:
        """Where the answer is in a response."""
        return Extraction(self.answer, {"marker": self.answer_marker, "regex": self.answer_regex}.get(self.answer, ""))


@dataclass(frozen=True)
class TaskRubric(Rubric):
    """How answers to prompts of task `name` are rewarded."""

    name: str = ""
    """The task that these rewards are for."""

    def _check(self) -> None:
        if not self.name:
            raise ValueError("name must be the name of a task; it is empty")
        super()._check()


@dataclass(frozen=True)
class ScoreConfig(Rubric):
    """Settings of the score operator. Raises ValueError naming the field that does not fit."""

    tasks: tuple[TaskRubric, ...] = ()
    """Tasks with a rubric of their own. A setting that a task omits is the one of this table (the configuration reader
    fills it in)."""

    time_limit_s: Positive = 5.0
    """Wall-clock limit of one verifier call; a process that exceeds it is killed and replaced."""
    memory_limit_mb: PositiveInt = 2048
    """Address space of a verifier process, in MiB."""
    workers: PositiveInt = 2
    """Verifier processes; none is started if all verifiers in use are fast and safe in this process."""
    allow_processes: bool = False
    """Whether verifiers may start processes, for instance to run generated code."""
    shards: PositiveInt = 1
    """Number of shards of the role: shard k scores the partitions p of trajectories with p mod `shards` = k. A stopped
    run may be resumed with another number, at most kafka.partitions."""

    def _check(self) -> None:
        super()._check()
        limit = self.time_limit_s
        for spec in (spec for rubric in self.rubrics for spec in rubric.rewards):
            if spec.name == "code" and (seconds := {**REWARDS["code"].options, **spec.options}["seconds"]) >= limit:
                raise ValueError(f"time_limit_s must be above the seconds of reward code, {seconds:g}, not {limit:g}")
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"tasks: a task is named twice in {names}")

    @property
    def may_be_slow(self) -> bool:
        """Whether a reward always runs in a verifier process."""
        return any(rubric.needs_process(spec) for rubric in self.rubrics for spec in rubric.rewards)

    @property
    def rubrics(self) -> tuple[Rubric, ...]:
        """All rubrics; the first is for tasks that are not named."""
        return (self, *self.tasks)

    @property
    def rewards_failures(self) -> Mapping[str, bool]:
        """By task, and for all others by "", whether failed trajectories have a reward to train."""
        return {"": self.on_error is not None} | {task.name: task.on_error is not None for task in self.tasks}

    def check_tasks(self, known: Collection[str]) -> None:
        """Raise ValueError if a task named here is not in `known`."""
        for task in self.tasks:
            if task.name not in known:
                hint = suggest_name(task.name, known)
                raise ValueError(f"score.tasks: no prompts.name or prompts.task is {task.name!r}{hint}")


def _is_of(kind: type, value: object) -> bool:
    """Whether an option's `value` is of `kind`: an integer is a float, too; a tuple has texts, none empty."""
    if kind is tuple:
        return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, str) and each for each in value)
    if kind is float:
        return type(value) in (int, float) and -math.inf < value < math.inf  # type: ignore[operator]
    return type(value) is kind


def _check_pattern(name: str, pattern: str) -> None:
    if not pattern:
        raise ValueError(f"{name} must not be empty")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{name} {pattern!r} is not a regular expression: {error}") from error

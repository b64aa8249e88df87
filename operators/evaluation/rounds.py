"""Evaluation rounds: the questions of one version in one mode, their answers and their metric."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from operators.evaluation.config import EvaluationConfig
from schemas.metric_labels import labelled
from schemas.records import Experience, PolicyVersion
from schemas.scalars import LARGEST_REWARD

Mode = Literal["greedy", "sampled"]

MEASURED_SHARE = 0.95
"""A round is measured if at least this share of its questions has a valid answer. The questions that remain when a
version is gone, when replicas, episodes or rewards fail, are no sample of the others: short answers come first."""
FULL_REWARD = 1.0
"""The reward of a correct answer, where no verifier says what is correct."""


@dataclass(frozen=True, slots=True)
class AnnouncedVersion:
    """What evaluation needs of a weight manifest: its version, and whether it is the final one of the run."""

    version: PolicyVersion
    final: bool


@dataclass(slots=True)
class Round:
    """The prompts numbered `expected` under one version in one mode, and their `answers` by prompt number."""

    version: PolicyVersion
    mode: Mode
    final: bool
    expected: range
    answers: dict[int, Experience] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return round_name(self.version, self.mode, self.final)

    def complete(self) -> bool:
        """Whether every question has an answer, valid or not."""
        return len(self.answers) == len(self.expected)

    def is_measured(self) -> bool:
        """Whether enough answers are valid for the round to have an accuracy."""
        return _enough(sum(map(self._is_valid, self.answers.values())), len(self.expected))

    def is_lost(self) -> bool:
        """Whether it is not measured because its version was gone: under the same weights it could be."""
        answers = self.answers.values()
        return not _enough(sum(self._is_valid(each) or _has_failed(each) for each in answers), len(self.expected))

    def values(self) -> dict[str, float]:
        """The values of the metric: number of valid answers, accuracy and mean reward; with several tasks, by task too.

        An answer is valid if it was generated under the version of this round and neither its episode nor its reward
        failed. `unanswered/MODE` is the number of questions without one, if there are any, and `failed/MODE` of those
        whose episode or reward failed. With too many of them there is no accuracy and no reward.
        """
        by_task: dict[str, list[Experience]] = defaultdict(list)
        for answer in self.answers.values():
            by_task[answer.trajectory.prompt.task].append(answer)
        values = {"final": float(self.final), **self._values(list(self.answers.values()))}
        if len(by_task) > 1:
            for task, answers in by_task.items():
                values |= self._values(answers, task=task)
        return values

    def _values(self, answers: Sequence[Experience], **labels: str) -> dict[str, float]:
        valid = list(filter(self._is_valid, answers))
        values = {"questions": float(len(valid))}
        if unanswered := len(answers) - len(valid):
            values[f"unanswered/{self.mode}"] = float(unanswered)
        if failed := sum(map(_has_failed, answers)):
            values[f"failed/{self.mode}"] = float(failed)
        if _enough(len(valid), len(answers)):
            values[f"accuracy/{self.mode}"] = fmean(map(accuracy_of, valid))
            mean = fmean(answer.reward for answer in valid)
            values[f"reward/{self.mode}"] = round(mean, DIGITS) + 0.0  # rewards that cancel out to 1e-17 are 0
        return {labelled(name, **labels): value for name, value in values.items()}

    def _is_valid(self, answer: Experience) -> bool:
        valid = answer.error is None and not _has_failed(answer)
        return valid and answer.trajectory.policy_version == self.version


def _has_failed(answer: Experience) -> bool:
    """Whether its episode or its reward failed, or the reward is larger than any that score gives."""
    trajectory = answer.trajectory
    if answer.error is None:
        return not max(abs(answer.reward), abs(accuracy_of(answer))) <= LARGEST_REWARD
    return trajectory.finish_reason != "failed" or trajectory.episode is not None


DIGITS = 12
"""Digits after the point of a mean reward."""


def _enough(valid: int, asked: int) -> bool:
    return valid > 0 and valid >= MEASURED_SHARE * asked


def accuracy_of(experience: Experience) -> float:
    """Whether the answer is correct, 1 or 0: the component named accuracy, or else whether the reward is 1 or more."""
    for component in experience.components:
        if component.name == "accuracy":
            return component.value
    return float(experience.reward >= FULL_REWARD)


def round_name(version: PolicyVersion, mode: Mode, final: bool) -> str:
    """The name of a round in its prompts."""
    return f"{version}/{mode}" + ("/final" if final else "")


def open_round(name: str, expected: range) -> Round:
    """The round with this name, without answers. Raises ValueError if `name` is not that of a round."""
    version, _, rest = name.partition("/")
    mode, _, final = rest.partition("/")
    if mode not in ("greedy", "sampled"):
        raise ValueError(f"not an evaluation round: {name[:80]!r}")
    return Round(PolicyVersion.parse(version), "greedy" if mode == "greedy" else "sampled", final == "final", expected)


def modes_due(
    manifest: AnnouncedVersion, last: int | None, config: EvaluationConfig, open_rounds: int
) -> tuple[Mode, ...]:
    """The modes in which to evaluate `manifest`; version number `last` was evaluated last (None: none was).

    The first and the final version are always evaluated; a periodic round waits while another round is open.
    """
    number = manifest.version.number
    if last is None or manifest.final:
        return ("greedy", "sampled") if config.sampled else ("greedy",)
    if config.every and not open_rounds and number // config.every > last // config.every:
        return ("greedy",)
    return ()

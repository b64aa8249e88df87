"""Evaluation rounds: the questions of one version in one mode, their answers and their metric."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from operators.evaluation.config import EvaluationConfig
from schemas.records import Experience, PolicyVersion

Mode = Literal["greedy", "sampled"]

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

    def all_valid(self) -> bool:
        """Whether every answer was generated under the version of this round."""
        return all(map(self._is_valid, self.answers.values()))

    def values(self) -> dict[str, float]:
        """The values of the metric: number of valid answers, accuracy and mean reward; with several tasks, by task too.

        An answer is valid if it was generated under the version of this round.
        """
        valid: dict[str, list[Experience]] = defaultdict(list)
        for answer in self.answers.values():
            answers = valid[answer.trajectory.prompt.task]
            if self._is_valid(answer):
                answers.append(answer)
        values = {
            "final": float(self.final),
            **self._values("", [answer for answers in valid.values() for answer in answers]),
        }
        if len(valid) > 1:
            for task, answers in valid.items():
                values |= self._values(f"/{task}", answers)
        return values

    def _values(self, task: str, answers: Sequence[Experience]) -> dict[str, float]:
        means = {}
        if answers:
            means[f"accuracy/{self.mode}{task}"] = fmean(map(accuracy_of, answers))
            means[f"reward/{self.mode}{task}"] = fmean(answer.reward for answer in answers)
        return {f"questions{task}": float(len(answers)), **means}

    def _is_valid(self, answer: Experience) -> bool:
        return answer.trajectory.policy_version == self.version


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

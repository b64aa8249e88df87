"""Rounds of evaluation: which versions are asked what, and what came of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from operators.evaluation.config import EvaluationConfig
from schemas.records import Experience, PolicyVersion

Mode = Literal["greedy", "sampled"]


@dataclass(frozen=True, slots=True)
class AnnouncedVersion:
    """What evaluation needs of a weight manifest: its version, and whether it is the run's last."""

    version: PolicyVersion
    final: bool


@dataclass(slots=True)
class Round:
    """One version asked the prompts numbered `expected` in one mode; `answers` are counted once, by prompt number."""

    version: PolicyVersion
    mode: Mode
    final: bool
    expected: range
    answers: dict[int, Experience] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return round_name(self.version, self.mode, self.final)

    def complete(self) -> bool:
        """Whether every question was answered, one way or another."""
        return len(self.answers) == len(self.expected)

    def all_count(self) -> bool:
        """Whether every answer is this very version's."""
        return all(map(self._counts, self.answers.values()))

    def values(self) -> dict[str, float]:
        """What its metric says: how many answers count, those that this very version gave, and their mean accuracy; by
        task, too, where it has asked questions of several."""
        scores: dict[str, list[float]] = defaultdict(list)
        for answer in self.answers.values():
            of = scores[answer.trajectory.prompt.task]
            if self._counts(answer):
                of.append(accuracy_of(answer))
        told = {"final": float(self.final), **self._figures("", [score for of in scores.values() for score in of])}
        if len(scores) > 1:
            for task, of in scores.items():
                told |= self._figures(f"/{task}", of)
        return told

    def _figures(self, task: str, scores: Sequence[float]) -> dict[str, float]:
        accuracy = {f"accuracy/{self.mode}{task}": fmean(scores)} if scores else {}
        return {f"questions{task}": float(len(scores)), **accuracy}

    def _counts(self, answer: Experience) -> bool:
        return answer.trajectory.policy_version == self.version


def accuracy_of(experience: Experience) -> float:
    """The component named accuracy, the reward where there is none."""
    for component in experience.components:
        if component.name == "accuracy":
            return component.value
    return experience.reward


def round_name(version: PolicyVersion, mode: Mode, final: bool) -> str:
    """How a round is called in its prompts."""
    return f"{version}/{mode}" + ("/final" if final else "")


def open_round(name: str, expected: range) -> Round:
    """The round called `name`, without answers. Raises ValueError for what is no such name."""
    version, _, rest = name.partition("/")
    mode, _, final = rest.partition("/")
    if mode not in ("greedy", "sampled"):
        raise ValueError(f"not an evaluation round: {name[:80]!r}")
    return Round(PolicyVersion.parse(version), "greedy" if mode == "greedy" else "sampled", final == "final", expected)


def modes_due(
    manifest: AnnouncedVersion, last: int | None, config: EvaluationConfig, open_rounds: int
) -> tuple[Mode, ...]:
    """In which modes to evaluate `manifest`, when version number `last` was the last evaluated one (None: none was).

    The first and the final version always are; a periodic round is put off while another is under way.
    """
    number = manifest.version.number
    if last is None or manifest.final:
        return ("greedy", "sampled") if config.sampled else ("greedy",)
    if config.every and not open_rounds and number // config.every > last // config.every:
        return ("greedy",)
    return ()

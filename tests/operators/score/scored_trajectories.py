"""Trajectories and judges of the tests of score."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from record_factories import prompt
from record_factories import trajectory as made

from operators.score.attempt import AnswerContext
from operators.score.config import RewardSpec, Rubric, ScoreConfig
from operators.score.pool import VerifierResult
from operators.score.scoring import score_trajectories
from schemas.block import Block
from schemas.records import Experience, Trajectory


def trajectory(text: str, reference: Any = None, task: str = "sums", tokens: int = 5, **changes: Any) -> Trajectory:
    known = json.dumps({"answer": "4"} if reference is None else reference)
    asked = prompt(0, 8, task=task, text="What is 2 + 2?", reference=known)
    return made(asked, 0, tokens, text=text, **changes)


class FixedJudge:
    """A judge that gives the same outcomes to every trajectory."""

    def __init__(self, config: ScoreConfig, *results: VerifierResult) -> None:
        self.config, self.results = config, list(results)
        self.judged = 0

    def rubric(self, task: str) -> Rubric:
        return self.config

    def judge(self, answers: Sequence[AnswerContext]) -> list[list[VerifierResult]]:
        self.judged += len(answers)
        return [self.results for _ in answers]


def scored(trajectories: Sequence[Trajectory], judge: Any, now: int = 0) -> list[Experience]:
    return score_trajectories(Block.of(trajectories), judge, now).records()


CONFIG = ScoreConfig(
    rewards=(RewardSpec("format", 0.25), RewardSpec("exact", 2.0), RewardSpec("mine:extra", -1.0)), on_error=-0.5
)

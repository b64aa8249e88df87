"""Trajectories and judges of the tests of score."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from operators.score.attempt import AnswerContext
from operators.score.config import RewardSpec, Rubric, ScoreConfig
from operators.score.pool import VerifierResult
from operators.score.scoring import AnswerJudge, score_trajectories
from schemas.block import Block
from schemas.columns import flags, floats, token_ids
from schemas.records import Experience, Prompt, Response, Sampling, Trajectory


def trajectory(text: str, reference: Any = None, task: str = "sums", tokens: int = 5, **changes: Any) -> Trajectory:
    known = json.dumps({"answer": "4"} if reference is None else reference)
    sampling = Sampling(1.0, 1.0, 0, 48, (2,), 0)
    prompt = Prompt(0, "train", task, "What is 2 + 2?", token_ids([1, 2]), known, 8, sampling)
    response = Response(token_ids([3] * tokens), floats([0.0] * tokens), flags([True] * tokens))
    made = Trajectory(
        prompt=prompt,
        member=0,
        lease=1,
        attempt=0,
        replica=0,
        incarnation=1,
        response=response,
        text=text,
        version_spans=(),
        newest_version=None,
        finish_reason="stop",
        error=None,
        started_at=1,
        first_token_at=None,
        finished_at=2,
    )
    return replace(made, **changes)


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


def scored(trajectories: Sequence[Trajectory], judge: AnswerJudge, now: int = 0) -> list[Experience]:
    return score_trajectories(Block.of(trajectories), judge, now).records()


CONFIG = ScoreConfig(
    rewards=(RewardSpec("format", 0.25), RewardSpec("exact", 2.0), RewardSpec("mine:extra", -1.0)), on_error=-0.5
)

"""Turns trajectories into experiences, one for each, even if generation, environment or verifiers failed.

So groups always complete. If something failed, the experience has an `error`, and the reward `on_error` or 0; the
buffer trains it only if `on_error` is set.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra.runners.step_metrics import phase
from infra.workers.error_text import first_line
from operators.score.attempt import AnswerContext
from operators.score.config import Rubric
from operators.score.pool import VerifierResult
from operators.score.scorer import Scorer
from schemas.arrow import arrow_schema
from schemas.block import Block
from schemas.records import AGENT, Experience
from schemas.scalars import LARGEST_REWARD

ACCURACY = "accuracy"
"""A component of weight 0: 1 if the answer is correct by `Rubric.accuracy`, else 0.

It is separate from the reward because some verifiers give partial credit: reasoning-gym's gcd gives it if the correct
number occurs anywhere in the answer.
"""


class WeightedReward(NamedTuple):
    """The fields of RewardComponent."""

    name: str
    value: float
    weight: float


class ScoredAnswer(NamedTuple):
    """The reward of one answer, its components, and the error if there was one.

    `of_conversations` are the rewards of the conversations of an agent, empty if all have `reward`.
    """

    reward: float
    components: Sequence[WeightedReward]
    error: str | None
    of_conversations: Sequence[float] = ()


def score_trajectories(trajectories: Block, scorer: Scorer, now: int) -> Block:
    """The experiences of `trajectories`, in their order, scored at `now` (Unix milliseconds). Token columns are reused.

    A bad trajectory or verifier gives an error, not an exception. Raises VerifierUnavailable if no verifier process can
    be started.
    """
    failed = [reason == "failed" for reason in trajectories.column("finish_reason").to_pylist()]
    with phase("extract answers"):
        answers = read_answers(trajectories)
    with phase("verify"):
        results = iter(scorer.judge([answer for answer, lost in zip(answers, failed, strict=True) if not lost]))
    with phase("compose rewards"):
        return _compose(trajectories, answers, failed, results, scorer, now)


def _compose(
    trajectories: Block,
    answers: Sequence[AnswerContext],
    failed: Sequence[bool],
    results: Iterator[list[VerifierResult]],
    scorer: Scorer,
    now: int,
) -> Block:
    """The experiences of `trajectories`; `results` are those of the answers that have not failed."""
    errors = trajectories.column("error").to_pylist()
    episodes = pc.is_valid(trajectories.column("episode.ending")).to_pylist()
    rubrics = {task: scorer.rubric(task) for task in {answer.task for answer in answers}}
    scored = [
        ScoredAnswer(
            float(rubrics[answer.task].on_error or 0.0),
            (),
            f"{'the episode' if episode else 'generation'} failed: {error or 'no reason given'}",
        )
        if lost
        else score_answer(next(results), rubrics[answer.task])
        for answer, lost, error, episode in zip(answers, failed, errors, episodes, strict=True)
    ]
    return _experiences(trajectories, scored, now)


def read_answers(trajectories: Block) -> list[AnswerContext]:
    """What verifiers need of each of `trajectories`."""
    prompts = (trajectories.column(f"prompt.{name}").to_pylist() for name in ("text", "task", "reference"))
    tokens = np.diff(trajectories.column("response.token_ids").offsets.to_numpy()).tolist()
    episodes = trajectories.column("episode.rewards").to_pylist()
    environment = [None if rewards is None else _total(rewards) for rewards in episodes]
    messages = [[each["messages"] for each in row] for row in _of_agents(trajectories, "conversations")]
    reported = _of_agents(trajectories, "conversation_rewards")
    texts = trajectories.column("text").to_pylist()
    return list(map(AnswerContext, texts, tokens, *prompts, environment, messages, reported))


def _total(rewards: Sequence[float]) -> float:
    """The sum; if that is no float the largest one, which is more than a reward may be."""
    try:
        return math.fsum(rewards)
    except OverflowError:
        return math.copysign(sys.float_info.max, sum(rewards))


def _of_agents(trajectories: Block, name: str) -> list[list[Any]]:
    """The lists in column `name`, empty where the trajectory is not an agent's: theirs are long, and not needed."""
    column = trajectories.column(name)
    of_agents = pc.equal(trajectories.column("prompt.environment"), AGENT).to_pylist()
    return [column[row].as_py() if of_agent else [] for row, of_agent in enumerate(of_agents)]


def score_answer(results: Sequence[VerifierResult], rubric: Rubric) -> ScoredAnswer:
    """The weighted sum of `results`, one for each reward of `rubric`; a result without a value has no component."""
    components: list[WeightedReward] = []
    errors: list[str] = []
    accuracy: list[WeightedReward] = []
    measure, least = rubric.accuracy or (None, 0.0)
    for spec, result in zip(rubric.rewards, results, strict=True):
        if result.value is None or not abs(result.value) <= LARGEST_REWARD:
            errors.append(f"{spec.component}: {result.error or f'returned {result.value}'}")
            continue
        components.append(WeightedReward(spec.component, result.value, float(spec.weight)))
        if spec is measure:
            accuracy.append(WeightedReward(ACCURACY, float(result.value >= least), 0.0))
    reward = sum(component.value * component.weight for component in components)
    of_conversations = _of_conversations(results, rubric)
    if not all(abs(each) <= LARGEST_REWARD for each in (reward, *of_conversations)):
        errors.append(f"the weighted sum is {[reward, *of_conversations] if of_conversations else reward}")
    # Tracebacks follow the errors, so that the first line names all of them.
    traces = [trace for _, _, trace in (each.partition("\n") for each in errors) if trace]
    error = "\n".join(["; ".join(map(first_line, errors)), *traces]) or None
    reward, of_conversations = (float(rubric.on_error or 0.0), ()) if error else (reward, of_conversations)
    return ScoredAnswer(reward, (*components, *accuracy), error, of_conversations)


def _of_conversations(results: Sequence[VerifierResult], rubric: Rubric) -> tuple[float, ...]:
    """The weighted sum of each conversation; a verifier that does not tell them apart counts alike in each."""
    count = max((len(result.values) for result in results), default=0)
    return tuple(
        sum(
            float(spec.weight) * (result.values[number] if result.values else result.value or 0.0)
            for spec, result in zip(rubric.rewards, results, strict=True)
        )
        for number in range(count)
    )


def _experiences(trajectories: Block, scored: Sequence[ScoredAnswer], now: int) -> Block:
    kind = arrow_schema(Experience).field("components").type
    parts = zip(*(component for each in scored for component in each.components), strict=True)
    columns = [pa.array(values, field.type) for values, field in zip(parts, kind.value_type, strict=False)]
    flat = columns or [pa.array([], field.type) for field in kind.value_type]
    ends = [0, *accumulate(len(each.components) for each in scored)]
    values = pa.StructArray.from_arrays(flat, fields=list(kind.value_type))
    return Block.from_columns(
        Experience,
        {
            **{f"trajectory.{name}": trajectories.column(name) for name in trajectories.batch.schema.names},
            "reward": [each.reward for each in scored],
            "components": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values, type=kind),
            "error": [each.error for each in scored],
            "scored_at": [now] * len(scored),
            "conversation_rewards": [each.of_conversations for each in scored],
        },
    )

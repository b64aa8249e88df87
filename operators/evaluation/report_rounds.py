"""PublishQuestions and ReportRounds: what an opened and a closed round of evaluation write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from operators.evaluation.rounds import Mode
from operators.io.elements import Output
from operators.io.map_outputs import MapOutputs
from schemas.records import Experience, Metric, PolicyVersion, Prompt, Settled
from schemas.topics import EVAL_PROMPTS, METRICS, SETTLED

NAME = "evaluation"
"""Name and key of the metrics of evaluation."""
GIVEN_UP = "given_up"
"""In the metric of a final round that is not measured and will not be asked again: 1."""


@dataclass(frozen=True, slots=True)
class OpenedRound:
    """A round that has begun: `questions` are asked under `version`, numbered from `first` on."""

    name: str
    version: PolicyVersion
    mode: Mode
    first: int
    questions: Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """A round with all its answers, and its metric."""

    name: str
    answers: tuple[Experience, ...]
    metric: Metric


class PublishQuestions(MapOutputs):
    """Writes the prompts of opened rounds."""

    writes = (EVAL_PROMPTS,)

    def __init__(self) -> None:
        super().__init__(ask_questions)


class ReportRounds(MapOutputs):
    """Settles the answers of closed rounds, and writes their metrics."""

    writes = (SETTLED, METRICS)

    def __init__(self) -> None:
        super().__init__(report_rounds)


def ask_questions(outputs: Sequence[Any]) -> list[Any]:
    """The prompts of the opened rounds in `outputs`; all other outputs stay, in their place."""
    return [each for output in outputs for each in (_asked(output) if isinstance(output, OpenedRound) else [output])]


def report_rounds(outputs: Sequence[Any]) -> list[Any]:
    """The records of the closed rounds and metrics in `outputs`; all other outputs stay, in their place."""
    return [each for output in outputs for each in _reported(output)]


def _asked(opened: OpenedRound) -> Iterator[Output]:
    for number, question in enumerate(opened.questions, opened.first):
        sampling = question.sampling
        prompt = replace(
            question,
            number=number,
            purpose="evaluation",
            samples=1,
            sampling=sampling if opened.mode == "sampled" else replace(sampling, temperature=0.0),
            policy_version=opened.version,
            round=opened.name,
        )
        yield Output(EVAL_PROMPTS, prompt.prompt_id, prompt)


def _reported(output: Any) -> Iterator[Any]:
    if isinstance(output, Metric):
        yield Output(METRICS, NAME, output)
    elif isinstance(output, ClosedRound):
        for answer in output.answers:
            name, tokens = answer.trajectory.trajectory_id, len(answer.trajectory.response.token_ids)
            reason, now = f"round {output.name}", output.metric.measured_at
            yield Output(SETTLED, "", Settled(name, 1, "evaluated", reason, None, None, tokens, now))
        yield Output(METRICS, NAME, output.metric)
    else:
        yield output

"""ReportDecisions: the records of decisions, of their outcomes and of observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from operators.autoscaler.scale_rollouts import NAME
from operators.io.elements import Output
from operators.io.map_outputs import MapOutputs
from schemas.records import Metric, ScalingDecision, ScalingOutcome
from schemas.topics import DECISION, METRICS, OUTCOME, SCALING


class ReportDecisions(MapOutputs):
    """Writes decisions and outcomes to `scaling`, and what was observed to `metrics`."""

    writes = (SCALING, METRICS)

    def __init__(self) -> None:
        super().__init__(report_decisions)


def report_decisions(outputs: Sequence[Any]) -> list[Any]:
    """The records of the decisions, outcomes and metrics in `outputs`; all other outputs stay, in their place."""
    return [_reported(output) for output in outputs]


def _reported(output: Any) -> Any:
    match output:
        case ScalingDecision():
            return Output(SCALING, DECISION, output)
        case ScalingOutcome():
            return Output(SCALING, OUTCOME, output)
        case Metric():
            return Output(METRICS, NAME, output)
    return output

"""ReportEvents: the events of replicas become records: trajectories by group, progress by replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from operators.io.elements import Output
from operators.io.map_outputs import MapOutputs
from schemas.records import AssignmentRejected, Progress, Trajectory, TurnEnded
from schemas.topics import PROGRESS, TRAJECTORIES, partition_of


class ReportEvents(MapOutputs):
    """Writes finished trajectories to the partition of their group, of `partitions`, and progress to its topic.

    Hand-overs pass: `RepartitionTrajectories` writes them.
    """

    writes = (TRAJECTORIES, PROGRESS)

    def __init__(self, partitions: int) -> None:
        super().__init__(partial(report_events, partitions=partitions), count_events)


def report_events(outputs: Sequence[Any], partitions: int) -> list[Any]:
    """The records of the events in `outputs`; all other outputs stay, in their place."""
    return [_reported(output, partitions) for output in outputs]


def count_events(events: Sequence[Any], _: Sequence[Any]) -> Counter[str]:
    """The counters of the step: finished trajectories by reason, and their tokens."""
    counts: Counter[str] = Counter()
    for event in events:
        if isinstance(event, Trajectory):
            counts[f"finished/{event.finish_reason}"] += 1
            counts["finished_tokens"] += len(event.response.token_ids)
    return counts


def _reported(output: Any, partitions: int) -> Any:
    match output:
        case Trajectory(prompt=prompt):
            return Output(TRAJECTORIES, prompt.prompt_id, output, partition_of(prompt.number, partitions))
        case Progress() | AssignmentRejected() | TurnEnded():
            # Keyed by replica, not by trajectory: events that a replica emits together are rows of one record.
            return Output(PROGRESS, f"rollout-{output.replica}", output)
    return output

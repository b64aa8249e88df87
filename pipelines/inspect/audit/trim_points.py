"""The trimmed part of a run's log, from the newest trim point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic, partition_ranges
from infra.kafka.topic_reader import read_rows
from schemas.identity import Purpose
from schemas.records import PolicyVersion, TrimPoint
from schemas.topics import EVAL_PROMPTS, PROMPTS, TRIM_POINTS, Topic

PROMPT_TOPICS: Mapping[Purpose, Topic] = {"train": PROMPTS, "evaluation": EVAL_PROMPTS}


@dataclass(frozen=True)
class TrimmedHistory:
    """Trajectories with numbers below `closed_below` of their purpose have ended; `counts` are their audit counts.

    Batches up to `batch` are part of `version`, at which the ancestor line of manifests may begin.
    """

    version: PolicyVersion
    batch: int
    closed_below: Mapping[Purpose, int]
    counts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, trim_point: TrimPoint) -> TrimmedHistory:
        closed = dict(zip(trim_point.purposes, trim_point.closed_below, strict=True))
        return cls(
            trim_point.version,
            trim_point.batch,
            closed,  # type: ignore[arg-type]
            dict(zip(trim_point.count_names, trim_point.counts, strict=True)),
        )


def trim_points(client: ClientProperties, run: str) -> Iterator[TrimPoint]:
    """The trim points of `run`, in order.

    Other records in the topic are skipped, as are incomplete trim points, those that close prompts which nobody has
    drawn, and those that do not have the next number: of two trims at once, the one counts whose point was written
    first.
    """
    number = 0
    try:
        for found in read_rows(client, TRIM_POINTS.name(run), TrimPoint):
            if _is_complete(found) and found.number == number + 1 and _closes_known_prompts(client, run, found):
                number = found.number
                yield found
    except UnknownTopic:
        return


def newest_trim_point(client: ClientProperties, run: str) -> TrimPoint | None:
    """The newest trim point of `run`; None if it was never trimmed."""
    points = list(trim_points(client, run))
    return points[-1] if points else None


def _closes_known_prompts(client: ClientProperties, run: str, point: TrimPoint) -> bool:
    """Whether the numbers below which `point` closes trajectories are of prompts: each takes an offset of its topic."""
    closed = TrimmedHistory.of(point).closed_below
    for purpose, topic in PROMPT_TOPICS.items():
        with suppress(UnknownTopic):
            if closed.get(purpose, 0) > partition_ranges(client, topic.name(run))[0].end:
                return False
    return True


def _is_complete(point: TrimPoint) -> bool:
    columns = (point.offsets, point.record_counts, point.byte_counts, point.digests)
    return (
        len(point.purposes) == len(point.closed_below)
        and len(point.count_names) == len(point.counts)
        and all(len(each) == len(point.partitions) for each in columns)
    )

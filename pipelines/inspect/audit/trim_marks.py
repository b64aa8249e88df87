"""What stood before the newest trim of a run's log, as its mark says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic
from infra.kafka.reading import read_topic
from schemas.identity import Purpose
from schemas.records import PolicyVersion, TrimMark
from schemas.topics import MARKS


@dataclass(frozen=True)
class TrimmedHistory:
    """Trajectories numbered below `closed_below` of their purpose have ended; `counts` are the audit's figures of them.

    Batches up to `batch` are those that made `version`, where the line of manifests may begin.
    """

    version: PolicyVersion
    batch: int
    closed_below: Mapping[Purpose, int]
    counts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, mark: TrimMark) -> TrimmedHistory:
        closed = dict(zip(mark.purposes, mark.closed_below, strict=True))
        return cls(mark.version, mark.batch, closed, dict(zip(mark.figures, mark.counts, strict=True)))  # type: ignore[arg-type]


def newest_mark(client: ClientProperties, run: str) -> TrimMark | None:
    """Where the log of `run` begins; None if it was never trimmed. Records that are no marks are passed over."""
    mark: TrimMark | None = None
    try:
        for record in read_topic(client, MARKS.name(run)):
            mark = next((row for row in reversed(record.rows) if isinstance(row, TrimMark)), mark)
    except UnknownTopic:
        return None
    return mark

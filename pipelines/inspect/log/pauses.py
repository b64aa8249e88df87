"""The pause of a run, from its topic `control`."""

from __future__ import annotations

from infra.kafka.properties import ClientProperties
from infra.kafka.ranges import UnknownTopic
from infra.kafka.topic_reader import read_rows
from operators.io.validation import invalid_reason
from schemas.records import Pause
from schemas.topics import CONTROL


def newest_pause(client: ClientProperties, run: str) -> Pause | None:
    """The last valid request to pause the run or to end its pause; None without any. Raises UnknownTopic."""
    requests = [row for row in read_rows(client, CONTROL.name(run), Pause) if invalid_reason(row) is None]
    return requests[-1] if requests else None


def is_paused(client: ClientProperties, run: str) -> bool:
    """Whether the run is paused. A run of an earlier release has no such topic and cannot be paused."""
    try:
        newest = newest_pause(client, run)
    except UnknownTopic:
        return False
    return newest is not None and newest.paused

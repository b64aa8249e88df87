"""Detects partitions whose readers are blocked by an open transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kafka.errors import KafkaError

from infra.kafka.admin import admin_client
from infra.kafka.open_transactions import describe, open_transactions
from infra.kafka.properties import ClientProperties
from infra.kafka.session_config import Partition

STALLED_S = 30.0
"""How long a reader may make no progress before an open transaction is suspected."""
REPORT_INTERVAL_S = 300.0
"""Minimum interval between two reports of a partition."""


class StallWatch:
    """Compares a reader's positions with the ends of the log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Partition, tuple[int, float]] = {}
        self._reported_at: dict[Partition, float] = {}

    def stalled(self, positions: Mapping[Partition, int], ends: Mapping[Partition, int | None]) -> list[Partition]:
        """Partitions without progress before their end for STALLED_S; each at most once every REPORT_INTERVAL_S."""
        now, found = self._clock(), []
        for place, position in positions.items():
            end = ends.get(place)
            before, since = self._seen.get(place, (-1, now))
            if end is None or position >= end or position != before:
                self._seen[place] = position, now
            elif (
                now - since >= STALLED_S and now - self._reported_at.get(place, -REPORT_INTERVAL_S) >= REPORT_INTERVAL_S
            ):
                self._reported_at[place] = now
                found.append(place)
        return found


def describe_blocking_transactions(client: ClientProperties, places: list[Partition]) -> list[str]:
    """The open transactions in `places`, one line each; the error if the brokers cannot be asked."""
    try:
        with admin_client(client) as admin:
            found = open_transactions(admin, sorted({place.topic for place in places}))
    except KafkaError as error:
        return [f"{sorted(places)} cannot be read further, and its open transactions cannot be listed: {error!r}"]
    return describe((each for each in found if (each.topic, each.partition) in places), time.time_ns() // 10**6)

"""Partitions that cannot be read on although more is written there: an open transaction holds their readers back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kafka.errors import KafkaError

from infra.kafka.admin import admin_client
from infra.kafka.open_transactions import describe, open_transactions
from infra.kafka.properties import ClientProperties
from infra.kafka.session_config import Partition

STALLED_S = 30.0
"""How long a reader may stand still before an open transaction is suspected."""
REPORT_INTERVAL_S = 300.0
"""How long nothing more is said of a partition."""


class StallWatch:
    """Compares where a reader stands with where the log ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stood: dict[Partition, tuple[int, float]] = {}
        self._said: dict[Partition, float] = {}

    def stalled(self, positions: Mapping[Partition, int], ends: Mapping[Partition, int | None]) -> list[Partition]:
        """The partitions that have stood still for STALLED_S before their end; each once every AGAIN_S."""
        now, found = self._clock(), []
        for place, position in positions.items():
            end = ends.get(place)
            before, since = self._stood.get(place, (-1, now))
            if end is None or position >= end or position != before:
                self._stood[place] = position, now
            elif now - since >= STALLED_S and now - self._said.get(place, -REPORT_INTERVAL_S) >= REPORT_INTERVAL_S:
                self._said[place] = now
                found.append(place)
        return found


def describe_blocking_transactions(client: ClientProperties, places: list[Partition]) -> list[str]:
    """The open transactions in `places`, a line each; why they are not known, where the brokers do not say."""
    try:
        with admin_client(client) as admin:
            found = open_transactions(admin, sorted({place.topic for place in places}))
    except KafkaError as error:
        return [f"{sorted(places)} cannot be read on, and the brokers do not say why: {error!r}"]
    return describe((each for each in found if (each.topic, each.partition) in places), time.time_ns() // 10**6)

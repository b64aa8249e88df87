"""The present ends of topics."""

from __future__ import annotations

from collections.abc import Sequence

from kafka.errors import KafkaError

from infra.kafka.admin import admin_client, end_offsets
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import connection_problem
from infra.kafka.session_config import Partition


class EndsUnknown(RuntimeError):
    """Kafka does not respond."""


def log_ends(client: ClientProperties, topics: Sequence[str]) -> dict[Partition, int]:
    """The end of each partition of `topics`, open transactions included. Raises EndsUnknown."""
    if (reason := connection_problem(client.admin(), timeout_s=2.0)) is not None:
        raise EndsUnknown(reason)
    try:
        with admin_client(client) as admin:
            return {Partition(*place): end for place, end in end_offsets(admin, topics, committed=False).items()}
    except KafkaError as error:
        raise EndsUnknown(repr(error)) from error

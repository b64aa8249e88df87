"""The present ends of partitions, as their present leaders know them."""

from __future__ import annotations

from collections.abc import Iterable

from kafka import TopicPartition
from kafka.errors import KafkaError

from infra.kafka.clients import SessionClients
from infra.kafka.present_leaders import write_aborted
from infra.kafka.session_config import Partition

ENDS_S = 10.0
"""How long the leaders may take to write, at most."""


class EndsUnknown(RuntimeError):
    """Kafka does not respond."""


def log_ends(
    clients: SessionClients, transactional_id: str, places: Iterable[Partition], transaction_timeout_s: float
) -> dict[Partition, int]:
    """Offsets after all that is written to `places` now, open transactions included. Raises EndsUnknown.

    They are the offsets of records that a transaction of `transactional_id` writes and aborts: a broker that is cut off
    from the others would name older ends (see `present_leaders`). The transaction takes `transaction_timeout_s` seconds
    at most.
    """
    if (reason := clients.problem()) is not None:
        raise EndsUnknown(reason)
    try:
        producer = clients.producer(transactional_id, min(ENDS_S, transaction_timeout_s))
        try:
            producer.init_transactions()
            written = write_aborted(producer, transactional_id, [TopicPartition(*place) for place in places])
        finally:
            producer.close(timeout=1)
    except KafkaError as error:
        raise EndsUnknown(repr(error)) from error
    return {Partition(*place): offset for place, offset in written.items()}

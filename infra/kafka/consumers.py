"""Consumers for inspection: they read committed records in whole batches, join no group and commit nothing."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from kafka import KafkaConsumer, TopicPartition

from infra.kafka.client_patches import report_resets, request_metadata_at_once
from infra.kafka.properties import ClientProperties
from infra.kafka.record_batches import poll_whole_batches
from infra.kafka.stored.consumer import StoredConsumer

log = logging.getLogger(__name__)

MAX_POLL_BATCHES = 16
"""Maximum batches per poll: a batch is as its producer sent it, at most some megabytes."""

FETCH_WAIT_MS = 50
"""How long a broker may hold a fetch without records: the next request waits behind it."""

_IO_THREADS = "kafka-io-"
_idle: list[tuple[ClientProperties, KafkaConsumer]] | None = None


@contextlib.contextmanager
def open_consumer(client: ClientProperties) -> Iterator[KafkaConsumer]:
    """A consumer that starts at the beginning of its partitions; it may be an idle one, see `reuse_consumers`."""
    consumer, sound = _take_idle(client) or new_consumer(client), False
    try:
        yield consumer
        sound = True
    except GeneratorExit:  # the reader stopped early
        sound = True
        raise
    finally:
        if sound and _idle is not None:
            consumer.unsubscribe()
            _idle.append((client, consumer))
        else:
            _close(consumer)


def _close(consumer: KafkaConsumer) -> None:
    """Close `consumer`. The garbage collector may end an abandoned reader on a thread of kafka-python, which must not
    wait for its own work: another thread closes the consumer then."""
    if threading.current_thread().name.startswith(_IO_THREADS):
        threading.Thread(target=_close, args=(consumer,), name="close", daemon=True).start()
    else:
        consumer.close(autocommit=False)


@contextlib.contextmanager
def reuse_consumers() -> Iterator[None]:
    """Within this context idle consumers are reused: creating one takes longer than most reads."""
    global _idle
    _idle = []
    try:
        yield
    finally:
        kept, _idle = _idle or [], None
        for _, consumer in kept:
            _close(consumer)


def _take_idle(client: ClientProperties) -> KafkaConsumer | None:
    """An idle consumer for `client`, or None. Thread-safe."""
    kept = _idle or []
    for entry in list(kept):
        if entry[0] == client:
            with contextlib.suppress(ValueError):  # another thread took it
                kept.remove(entry)
                return entry[1]
    return None


def new_consumer(client: ClientProperties, max_poll_batches: int = MAX_POLL_BATCHES) -> Any:
    """A consumer of committed records by batches, without partitions; of a stopped broker's log one of its files.

    Where the log does not have its next offset any more, it goes on at the first one, with a warning.
    """
    if client.clients is not None:
        return client.clients.consumer()
    if client.log is not None:
        return StoredConsumer(client.log, max_poll_batches)
    consumer = KafkaConsumer(
        **client.consumer(
            group_id=None,
            enable_auto_commit=False,
            isolation_level="read_committed",
            auto_offset_reset="earliest",  # retention may delete the first records meanwhile
            metrics_enabled=False,
            fetch_max_wait_ms=FETCH_WAIT_MS,
            max_poll_records=max_poll_batches,
        )
    )
    poll_whole_batches(consumer)
    request_metadata_at_once(consumer)
    report_resets(consumer, warn_of_gap)
    return consumer


def warn_of_gap(place: TopicPartition, offset: int, begin: int) -> None:
    """Log that a reader of `place` that was at `offset` goes on at `begin`, because the log does not have `offset`."""
    if offset < begin:
        log.warning(
            "offsets %d to %d of %s, partition %d, are not read: they were deleted, the log begins at %d",
            *(offset, begin - 1, place.topic, place.partition, begin),
        )
    elif offset > begin:
        log.warning(
            "%s, partition %d, ends before offset %d, which is to be read next: it was deleted and created again, or "
            "has lost records; it is read on from offset %d",
            *(place.topic, place.partition, offset, begin),
        )

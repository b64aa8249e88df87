"""Consumers that only look: of committed records, in whole batches, in no group, committing nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kafka import KafkaConsumer

from infra.kafka.properties import ClientProperties
from infra.kafka.record_batches import poll_whole_batches

MAX_POLL_BATCHES = 16
"""What one poll takes apart: a batch is as its producer sent it, at most some megabytes."""

FETCH_WAIT_MS = 50
"""How long a broker may wait for records that do not come: whatever is asked of it next waits behind that."""

_idle: list[tuple[ClientProperties, KafkaConsumer]] | None = None


@contextlib.contextmanager
def open_consumer(client: ClientProperties) -> Iterator[KafkaConsumer]:
    """A consumer, from the beginning of what it is assigned; it may have served before, see `reuse_consumers`."""
    consumer, sound = _take_idle(client) or _new_consumer(client), False
    try:
        yield consumer
        sound = True
    except GeneratorExit:  # whoever reads has had enough
        sound = True
        raise
    finally:
        if sound and _idle is not None:
            consumer.unsubscribe()
            _idle.append((client, consumer))
        else:
            consumer.close(autocommit=False)


@contextlib.contextmanager
def reuse_consumers() -> Iterator[None]:
    """Within this, consumers that are done with serve again: a new one takes longer than most looks take."""
    global _idle
    _idle = []
    try:
        yield
    finally:
        kept, _idle = _idle or [], None
        for _, consumer in kept:
            consumer.close(autocommit=False)


def _take_idle(client: ClientProperties) -> KafkaConsumer | None:
    """One that is kept, for `client`. Threads may ask for it at once."""
    kept = _idle or []
    for entry in list(kept):
        if entry[0] == client:
            with contextlib.suppress(ValueError):  # another thread was faster
                kept.remove(entry)
                return entry[1]
    return None


def skip_metadata_backoff(consumer: KafkaConsumer) -> None:
    """Let `consumer`, just connected, ask for a topic's metadata at once.

    kafka-python waits 100 ms after the metadata with which it connects, as if that had failed.
    """
    consumer._cluster._last_refresh_ms = 0


def _new_consumer(client: ClientProperties) -> KafkaConsumer:
    consumer = KafkaConsumer(
        **client.consumer(
            group_id=None,
            enable_auto_commit=False,
            isolation_level="read_committed",
            auto_offset_reset="earliest",  # retention may take what was there a moment ago
            metrics_enabled=False,
            fetch_max_wait_ms=FETCH_WAIT_MS,
            max_poll_records=MAX_POLL_BATCHES,
        )
    )
    poll_whole_batches(consumer)
    skip_metadata_backoff(consumer)
    return consumer

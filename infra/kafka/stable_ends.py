"""The end of a topic as one moment had it: whatever was written by then is committed or aborted, and seen or gone."""

from __future__ import annotations

import time

from kafka import KafkaAdminClient

from infra.kafka.admin import end_offsets

STABLE_TIMEOUT_S = 20.0
"""Brokers end a dead process's transaction within its time-out, 10 s, and a little more."""


def stable_ends(client: KafkaAdminClient, topic: str, timeout_s: float = STABLE_TIMEOUT_S) -> dict[int, int]:
    """The committed end of each partition, once every record written before the call is committed or aborted.

    A transaction's markers reach its partitions one by one, and another's that is still open hides what follows it: so
    what one partition shows, another that the same transaction wrote may not show yet. Raises RuntimeError when a
    transaction is still open after `timeout_s`.
    """
    written = end_offsets(client, [topic], committed=False)
    deadline = time.monotonic() + timeout_s
    while any((ends := end_offsets(client, [topic]))[where] < end for where, end in written.items()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{topic}: a transaction has been open for {timeout_s:g} s; try again later")
        time.sleep(0.05)
    return {where.partition: end for where, end in ends.items()}

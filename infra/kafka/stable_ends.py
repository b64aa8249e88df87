"""The end of a topic at one moment, with every transaction before it committed or aborted."""

from __future__ import annotations

import time

from kafka import KafkaAdminClient

from infra.kafka.admin import end_offsets

STABLE_TIMEOUT_S = 20.0
"""Brokers abort the transaction of a dead process soon after its time-out, 10 s."""


def stable_ends(client: KafkaAdminClient, topic: str, timeout_s: float = STABLE_TIMEOUT_S) -> dict[int, int]:
    """The committed end of each partition, once every record written before the call is committed or aborted.

    The markers of a transaction reach its partitions one by one, and another open transaction hides the records after
    it: without the wait, one partition may show a transaction that another does not show yet. Raises RuntimeError if a
    transaction is still open after `timeout_s`.
    """
    written = end_offsets(client, [topic], committed=False)
    deadline = time.monotonic() + timeout_s
    while any((ends := end_offsets(client, [topic]))[where] < end for where, end in written.items()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{topic}: a transaction has been open for {timeout_s:g} s; try again later")
        time.sleep(0.05)
    return {where.partition: end for where, end in ends.items()}

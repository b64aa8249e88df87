"""Hanging transactions: complete for their coordinator, but still open in a partition.

If Kafka 4.3 is killed during its start it loses markers: at the next start a transaction counts as complete although
some partitions never got its marker. No read_committed reader passes it, and the offsets that it committed stay
unknown. The coordinator's log has the outcome, so the marker can be written again (KIP-664). The coordinator's present
state is not the outcome: a pipeline may have started again in the meantime, with the same transactional.id.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kafka.errors import InvalidProducerEpochError, RetriableError, TransactionCoordinatorFencedError

from infra.kafka.admin import admin_client
from infra.kafka.open_transactions import (
    ENDING,
    OpenTransaction,
    coordinators_view,
    decided,
    open_transactions,
    write_marker,
)
from infra.kafka.properties import ClientProperties

_MOVED = RetriableError, TransactionCoordinatorFencedError, InvalidProducerEpochError
"""Coordinators and leaders may move after a check, and a transaction may end by itself."""
CHECK_INTERVAL_S = 1.0
"""Pause between two checks: a transaction that hangs in both has no active producer."""
MAX_CHECKS = 10
"""With active producers, successive checks may always differ."""
STARTUP_TIMEOUT_S = 60.0
"""How long a broker that has just started may take to complete transactions in state prepare."""


def end_hanging_transactions(client: ClientProperties, sleep: Callable[[float], None] = time.sleep) -> list[str]:
    """End all hanging transactions, each with its outcome; return the names of the partitions.

    Raises KafkaError, and DamagedTransactionLog if an outcome cannot be read.
    """
    deadline = time.monotonic() + STARTUP_TIMEOUT_S
    ended: set[str] = set()
    with admin_client(client) as admin:
        while True:
            last = time.monotonic() > deadline
            try:
                if last or not any(known.state in ENDING for _, known in coordinators_view(admin).values()):
                    _end(client, admin, sleep, ended)
                    return sorted(ended)
            except _MOVED:
                if last:
                    raise
            sleep(0.1)


def _end(client: ClientProperties, admin: Any, sleep: Callable[[float], None], ended: set[str]) -> None:
    """End hanging transactions; add their partitions to `ended` one by one, so that a later failure keeps them."""
    topics = admin.list_topics()
    before: set[OpenTransaction] = set()
    for check in range(MAX_CHECKS):
        hanging = {each for each in open_transactions(admin, topics) if each.hangs}
        if not hanging:
            return
        if hanging == before or check == MAX_CHECKS - 1:
            break
        before = hanging
        sleep(CHECK_INTERVAL_S)  # a coordinator that has just loaded may know more at the next check
    ending = decided(client, hanging & before)
    present = set(open_transactions(admin, topics))
    for each in ending:
        if replace(each, committed=False) not in present:  # it has ended by itself since
            continue
        write_marker(admin, each)
        ended.add(f"{each.topic}-{each.partition}")

"""Transactions that are over for their coordinator and open in a partition still.

Kafka 4.3 loses markers where it is killed while it starts: at its next start a transaction counts as complete of which
some partitions were never told. No reader of committed records gets past it, ever, and the offsets that it committed
are never known. What the coordinator says of it last is how it ended, so that can be told again (KIP-664).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kafka.errors import RetriableError

from infra.kafka.admin import admin_client
from infra.kafka.open_transactions import (
    ENDING,
    OpenTransaction,
    coordinators_view,
    open_transactions,
    write_marker,
)
from infra.kafka.properties import ClientProperties

CHECK_INTERVAL_S = 1.0
"""Between two looks: what is open and over for its coordinator in both, no producer is at work on."""
MAX_CHECKS = 10
"""Looks at most: where producers are at work, one may differ from the next for ever."""
STARTUP_TIMEOUT_S = 60.0
"""How long a broker that has just started may take to end what it knows to be ending."""


def end_hanging_transactions(client: ClientProperties, sleep: Callable[[float], None] = time.sleep) -> list[str]:
    """End the transactions that hang, each as its coordinator says that it ended; the names of the partitions.

    Raises KafkaError.
    """
    deadline = time.monotonic() + STARTUP_TIMEOUT_S
    ended: set[str] = set()
    with admin_client(client) as admin:
        while True:
            last = time.monotonic() > deadline
            try:
                if last or not any(said.state in ENDING for _, said in coordinators_view(admin).values()):
                    _end(admin, sleep, ended)
                    return sorted(ended)
            except RetriableError:  # coordinators and leaders may come to be, or move, after the first look
                if last:
                    raise
            sleep(0.1)


def _end(admin: Any, sleep: Callable[[float], None], ended: set[str]) -> None:
    """End what hangs; the names of the partitions go into `ended`, which counts also where a later one fails."""
    topics = admin.list_topics()
    before: set[OpenTransaction] = set()
    for look in range(MAX_CHECKS):
        hanging = {each for each in open_transactions(admin, topics) if each.hangs}
        if not hanging:
            return
        if hanging == before or look == MAX_CHECKS - 1:
            break
        before = hanging
        sleep(CHECK_INTERVAL_S)  # a coordinator that has just loaded may know more in the next look
    for each in hanging & before:
        write_marker(admin, each)
        ended.add(f"{each.topic}-{each.partition}")

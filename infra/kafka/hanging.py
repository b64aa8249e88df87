"""Transactions that are over for their coordinator and open in a partition still.

Kafka 4.3 loses markers where it is killed while it starts: at its next start a transaction counts as complete of which
some partitions were never told. No reader of committed records gets past it, ever, and the offsets that it committed
are never known. What the coordinator says of it last is how it ended, so that can be told again (KIP-664).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kafka import TopicPartition
from kafka.admin import AbortTransactionSpec, TransactionState
from kafka.errors import RetriableError

from infra.kafka.admin import admin_client
from infra.kafka.properties import ClientProperties

APART_S = 1.0
"""Between two looks: what is open in both, at one offset, and over in both, no producer is at work on."""
SETTLES_S = 60.0
"""How long a broker that has just started may take to end what it knows to be ending."""
_ENDING = (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT, TransactionState.PREPARE_EPOCH_FENCE)
_UNDER_WAY = (*_ENDING, TransactionState.ONGOING)


def end_hanging(client: ClientProperties, sleep: Callable[[float], None] = time.sleep) -> list[str]:
    """End the transactions that hang, each as its coordinator says that it ended; the names of the partitions.

    Raises KafkaError.
    """
    deadline = time.monotonic() + SETTLES_S
    ended: set[str] = set()
    with admin_client(client) as admin:
        while True:
            last = time.monotonic() > deadline
            try:
                if last or not any(each.state in _ENDING for each in _transactions(admin).values()):
                    _end(admin, sleep, ended)
                    return sorted(ended)
            except RetriableError:  # coordinators and leaders may come to be, or move, after the first look
                if last:
                    raise
            sleep(0.1)


def _end(admin: Any, sleep: Callable[[float], None], ended: set[str]) -> None:
    """End what hangs; the names of the partitions go into `ended`, which counts also where a later one fails."""
    if not (first := _hanging(admin)):
        return
    sleep(APART_S)
    again = _hanging(admin)
    hanging = {found: committed for found, committed in again.items() if first.get(found) == committed}
    for (place, _, spec), committed in hanging.items():
        _tell(admin, spec, committed)
        ended.add(f"{place.topic}-{place.partition}")


def _transactions(admin: Any) -> dict[int, Any]:
    """What coordinators say, by producer id."""
    listed = {each.transactional_id for rows in admin.list_transactions().values() for each in rows}
    described = admin.describe_transactions(sorted(listed)) if listed else {}
    return {each.producer_id: each for each in described.values()}


def _hanging(admin: Any) -> dict[tuple[TopicPartition, int, AbortTransactionSpec], bool]:
    """Partition, first offset and producer of what hangs, and whether it was committed."""
    topics = admin.describe_topics(admin.list_topics())
    places = [
        TopicPartition(topic["name"], partition["partition_index"])
        for topic in topics
        for partition in topic["partitions"]
    ]
    open_ones = [
        (place, producer)
        for place, state in admin.describe_producers(places).items()
        for producer in state.active_producers
        if producer.current_transaction_start_offset >= 0
    ]
    known, found = _transactions(admin), {}
    for place, producer in open_ones:
        said = known.get(producer.producer_id)
        if said is not None and said.state in _UNDER_WAY:
            continue
        epoch = producer.producer_epoch
        committed = said is not None and (said.state, said.producer_epoch) == (TransactionState.COMPLETE_COMMIT, epoch)
        spec = AbortTransactionSpec(place, producer.producer_id, epoch, max(0, producer.coordinator_epoch))
        found[place, producer.current_transaction_start_offset, spec] = committed
    return found


def _tell(admin: Any, spec: AbortTransactionSpec, committed: bool) -> None:
    """Write the marker. The client has a call for aborts alone."""
    if not committed:
        admin.abort_transaction(spec)
        return
    request = admin._abort_transaction_request(spec)
    request.markers[0].transaction_result = True
    leader = next(iter(admin._manager.run(admin._async_get_leader_for_partitions, [spec.topic_partition])))
    response = admin._manager.run(lambda: admin._manager.send(request, node_id=leader))
    admin._abort_transaction_process_response(response, spec)

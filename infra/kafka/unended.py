"""A producer must not write while an earlier transaction of its own has no end in a partition.

Kafka ends all transactions of a producer before its successor may begin. If it has lost a marker (see
`hanging_transactions.py`), the earlier records are still open in that partition, and the end of the next transaction
would decide them too: aborted records would become visible, or committed ones would be lost. So every start ends such
transactions first, each with its outcome; and every reconnected producer looks for them, because its broker may have
restarted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from kafka import TopicPartition
from kafka.errors import AuthorizationError, KafkaTimeoutError, UnsupportedVersionError

from infra.kafka.admin import admin_client
from infra.kafka.open_transactions import decided, open_transactions, write_marker
from infra.kafka.properties import ClientProperties
from infra.kafka.transaction_log import DamagedTransactionLog

log = logging.getLogger(__name__)


def check_own_transactions(
    client: ClientProperties, group: str, producer_id: int, places: Collection[TopicPartition]
) -> None:
    """Raise KafkaTimeoutError if a transaction of `producer_id` is open in one of `places`.

    Nothing is checked on a cluster that denies the request (it needs READ on the topics) or does not know it.
    """
    if open_places := _open_places(client, group, producer_id, places):
        raise _unended(group, producer_id, open_places)


def end_own_transactions(
    client: ClientProperties, group: str, producer_id: int, places: Collection[TopicPartition]
) -> None:
    """End the transactions of `producer_id` that are open in `places`, as Kafka's transaction log has decided them.

    For a start that has fenced its predecessor: none of its transactions is under way. Raises KafkaTimeoutError if one
    cannot be ended, since the cluster does not permit it (CLUSTER_ACTION, and READ on `__transaction_state`).
    """
    open_places = _open_places(client, group, producer_id, places)
    if not open_places:
        return
    try:
        with admin_client(client) as admin:
            found = open_transactions(admin, sorted({place.topic for place in open_places}))
            own = [each for each in found if each.producer_id == producer_id]
            for each in decided(client, own):
                write_marker(admin, each)
                log.warning(
                    "%s: Kafka had lost the end of a transaction in %s, partition %d, offset %d: %s again",
                    group,
                    each.topic,
                    each.partition,
                    each.first,
                    "committed" if each.committed else "aborted",
                )
    except (AuthorizationError, DamagedTransactionLog) as error:
        raise _unended(group, producer_id, open_places) from error
    check_own_transactions(client, group, producer_id, open_places)


def _open_places(
    client: ClientProperties, group: str, producer_id: int, places: Collection[TopicPartition]
) -> list[TopicPartition]:
    try:
        with admin_client(client) as admin:
            states = admin.describe_producers(places) if places else {}
    except (AuthorizationError, UnsupportedVersionError) as error:
        log.debug("%s: open transactions are not checked: %r", group, error)
        return []
    return sorted(
        place
        for place, state in states.items()
        for each in state.active_producers
        if each.producer_id == producer_id and each.current_transaction_start_offset >= 0
    )


def _unended(group: str, producer_id: int, places: Collection[TopicPartition]) -> KafkaTimeoutError:
    where = ", ".join(f"{place.topic}-{place.partition}" for place in places)
    return KafkaTimeoutError(
        f"an earlier transaction of {group} is still open in {where}, although its coordinator has ended it; "
        f"`laminar topics transactions abort {producer_id}` writes the missing markers"
    )

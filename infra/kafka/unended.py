"""A producer must not write while an earlier transaction of its own has no end in a partition.

Kafka ends all transactions of a producer before its successor may begin. If it has lost a marker (see
`hanging_transactions.py`), the earlier records are still open in that partition, and the end of the next
transaction would decide them too: aborted records would become visible, or committed ones would be lost. So every start
checks its outputs, and every reconnected producer does, because the broker may have restarted.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from kafka import TopicPartition
from kafka.errors import AuthorizationError, KafkaTimeoutError, UnsupportedVersionError

from infra.kafka.admin import admin_client
from infra.kafka.properties import ClientProperties

log = logging.getLogger(__name__)


def check_own_transactions(
    client: ClientProperties, group: str, producer_id: int, places: Collection[TopicPartition]
) -> None:
    """Raise KafkaTimeoutError if a transaction of `producer_id` is open in one of `places`.

    Nothing is checked on a cluster that denies the request (it needs READ on the topics) or does not know it.
    """
    try:
        with admin_client(client) as admin:
            states = admin.describe_producers(places) if places else {}
    except (AuthorizationError, UnsupportedVersionError) as error:
        log.debug("%s: open transactions are not checked: %r", group, error)
        return
    for place, state in states.items():
        for each in state.active_producers:
            if each.producer_id == producer_id and each.current_transaction_start_offset >= 0:
                raise KafkaTimeoutError(
                    f"{place.topic}, partition {place.partition}: an earlier transaction of {group} is open from "
                    f"offset {each.current_transaction_start_offset} on, although its coordinator has ended it; "
                    f"`laminar topics transactions abort {producer_id}` writes the missing marker"
                )

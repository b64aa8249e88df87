"""Waits for the markers of ended transactions."""

from __future__ import annotations

import time

from infra.kafka.admin import admin_client, end_offsets
from infra.kafka.properties import ClientProperties


def wait_for_markers(client: ClientProperties, *topics: str) -> None:
    """Wait until all transactions in `topics` have ended for readers, too: a commit returns before its markers are
    written, and until then a reader of committed records takes an earlier end for the end of the topic.
    """
    with admin_client(client) as admin:
        while end_offsets(admin, topics) != end_offsets(admin, topics, committed=False):
            time.sleep(0.01)

"""The heartbeats of a relay on a real broker: published by a separate thread, outside of transactions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from infra.files import create_secret
from infra.kafka.admin import TopicSpec, admin_client, create_topics, end_offsets
from infra.kafka.broker import Broker
from infra.kafka.topic_reader import read_topic
from operators.io.coalesce import coalesce
from operators.io.elements import Output, Polled, Restored
from operators.relay.config import RelayConfig
from operators.relay.relay import RelayStep
from schemas.records import RelayStatus
from schemas.topics import RELAY, REPLICAS, Topic

TIMEOUT_S = 60.0


def statuses(broker: Broker, run: str) -> list[RelayStatus]:
    return [row for record in read_topic(broker.client(), REPLICAS.name(run)) for row in record.rows]


def test_relay_publishes_heartbeats_outside_of_transactions(broker: Broker, run_id: str, tmp_path: Path) -> None:
    with admin_client(broker.client()) as admin:
        create_topics(admin, [TopicSpec(REPLICAS.name(run_id), 1)])
    create_secret(tmp_path / "token")
    config = RelayConfig(str(tmp_path), relay=3, heartbeat_s=0.02, token_file=str(tmp_path / "token"))
    step = RelayStep(config, broker.client(), run_id)
    fold = step.restore(Restored("group", 1, (), {}, {}))
    try:
        fold.fold(Polled("group", 1, (), (), {}, True))
        deadline = time.monotonic() + TIMEOUT_S  # no fold runs meanwhile
        while len(statuses(broker, run_id)) < 3:
            assert time.monotonic() < deadline
    finally:
        fold.close()
    published = statuses(broker, run_id)
    assert {status.relay for status in published} == {3}
    with admin_client(broker.client()) as admin:
        (end,) = end_offsets(admin, [REPLICAS.name(run_id)], committed=False).values()
    assert end == len(published)  # the marker of each transaction would take an offset, too


@pytest.mark.parametrize("topic", [REPLICAS, RELAY])
def test_sink_rejects_topics_of_plain_producers(topic: Topic) -> None:
    def name_of(topic: Topic) -> Any:
        raise AssertionError("nothing is encoded")

    with pytest.raises(ValueError, match=f"topic {topic.short_name} is not transactional"):
        coalesce([Output(topic, "key", None)], name_of)

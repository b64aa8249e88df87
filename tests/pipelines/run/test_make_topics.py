"""The topics of a run on an existing Kafka: unsuitable settings are named before any record is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.kafka.admin import TopicSpec, admin_client, create_topics, end_offsets
from infra.kafka.broker import Broker
from infra.kafka.settings_check import UnsuitableKafka
from pipelines.config import load_config
from pipelines.run.topics import make_topics
from schemas.topics import SCHEMAS, SETTLED

EXAMPLE = Path(__file__).parents[3] / "examples" / "chain_sum.toml"


@pytest.mark.parametrize(
    ("changes", "held", "error"),
    [
        ([], {"retention.ms": "604800000"}, r"settled: retention\.ms is 604800000, must be -1: records that a restart"),
        (
            ["kafka.transaction_timeout_s=3600"],
            {"retention.ms": "-1"},
            r"broker 1: transaction\.max\.timeout\.ms is 900000, must be at least 3600000",
        ),
    ],
)
def test_unsuitable_kafka_is_an_error_before_any_record(
    broker: Broker, run_id: str, changes: list[str], held: dict[str, str], error: str
) -> None:
    servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    config = load_config(EXAMPLE, [f"run.name={run_id}", servers, *changes])
    with admin_client(broker.client()) as admin:
        create_topics(admin, [TopicSpec(SETTLED.name(run_id), 1, config=held | {"max.message.bytes": "16777216"})])
        with pytest.raises(UnsuitableKafka, match=error):
            make_topics(config)
        assert set(end_offsets(admin, [SCHEMAS.name(run_id)], committed=False).values()) == {0}

"""The topics of a run on an existing Kafka: unsuitable settings are named before any record is written."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from infra.kafka.admin import TopicError, TopicSpec, admin_client, create_topics, end_offsets, list_topics
from infra.kafka.broker import Broker
from infra.kafka.settings_check import SettingProblem, UnsuitableKafka
from pipelines.config import Config, KafkaConfig, RunConfig, load_config
from pipelines.run.topics import check_kafka, make_topics, topic_spec
from schemas.topics import CATALOGUE, SCHEMAS, SETTLED

EXAMPLE = Path(__file__).parents[3] / "examples" / "chain_sum.toml"


@pytest.mark.parametrize(
    ("changes", "held", "error"),
    [
        (
            [],
            {"retention.ms": "604800000"},
            r"with kafka-configs\.sh --alter: .*settled: retention\.ms is 604800000, must be -1: records that",
        ),
        (
            ["kafka.transaction_timeout_s=3600"],
            {"retention.ms": "-1"},
            r"in server\.properties: broker 1: transaction\.max\.timeout\.ms is 900000, must be at least 3600000",
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
        for check in (check_kafka, make_topics):
            with pytest.raises(UnsuitableKafka, match=error):
                check(config)
        assert set(end_offsets(admin, [SCHEMAS.name(run_id)], committed=False).values()) == {0}


@pytest.mark.parametrize(("hours", "kept"), [(2.0, "7200000"), (math.inf, "-1")])
def test_only_metrics_expire_after_the_configured_hours(hours: float, kept: str) -> None:
    config = replace(Config(), run=RunConfig("any"), kafka=KafkaConfig(metrics_hours=hours))
    specs = {topic.short_name: topic_spec(config, topic).config for topic in CATALOGUE.values()}
    held = {name: spec["retention.ms"] for name, spec in specs.items() if spec["cleanup.policy"] == "delete"}
    assert held.pop("metrics") == kept
    assert set(held.values()) == {"-1"}


def test_check_kafka_names_one_reason_once_and_creates_nothing(broker: Broker, run_id: str) -> None:
    servers = f"kafka.bootstrap_servers={broker.bootstrap_servers}"
    config = load_config(EXAMPLE, [f"run.name={run_id}", servers, "kafka.replication_factor=3"])
    with pytest.raises(TopicError) as refused:
        check_kafka(config)
    text = str(refused.value)
    assert text.startswith(f"laminar.{run_id}.batch-assembly and {len(CATALOGUE) - 1} more topics cannot be created: ")
    assert text.endswith("; lower kafka.replication_factor")
    assert text.count("replication factor") == 1
    with admin_client(broker.client()) as admin:
        assert list_topics(admin, f"laminar.{run_id}.") == []


def test_unsuitable_settings_are_listed_one_a_line() -> None:
    problem = SettingProblem("broker 1", "log.cleaner.enable", "false", "true", "compacted topics would grow")
    error = UnsuitableKafka([problem, problem])
    assert str(error) == "this Kafka is unsuitable, change it in server.properties: 2 settings"
    assert error.detail_lines == (str(problem), str(problem))

"""Creates the topics of a run before its roles start, and checks that Kafka's settings retain their records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from infra.kafka.admin import (
    TopicError,
    TopicSpec,
    admin_client,
    check_new_topics,
    create_topics,
    list_topics,
    partition_counts,
    partition_problems,
)
from infra.kafka.producer import BoundedProducer
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import connection_problem, retry_transient
from infra.kafka.settings_check import SettingProblem, UnsuitableKafka, checked_broker_settings, find_problems
from pipelines.config import Config, KafkaConfig
from pipelines.run.upgrade import record_first_release
from pipelines.shards import partitions_of
from schemas.codec import MAX_VALUE_BYTES, RECORD_TYPES, encode
from schemas.topics import CATALOGUE, PREFIX, SCHEMAS, Topic, run_of

SEGMENT_BYTES = 4 << 20
"""segment.bytes of a compacted topic: a read from the beginning reads the newest record of each key and about this much
more."""
MARKER_MS = 60_000
"""delete.retention.ms of a compacted topic: Kafka keeps the marker of each transaction so long, 24 h by default, after
its records have gone. A note has a marker of its own, which each start would read.
"""
HOUR_MS = 3_600_000
DELIVER_S = 60.0
"""Time limit of the delivery of all schemas."""
ANSWER_S = 3.0
"""Time limit of each broker's response before a role is submitted."""
PARTITIONS_FROM = {
    "one": "the number of partitions",
    "shards": "kafka.partitions",
    "batch shares": "trainer.batch_shares (or trainer.ranks) × experience.max_shards (or experience.shards)",
    "replicas": "placement.max_replicas",
}
"""The settings that decide the number of partitions of topics, see `partitions_of`."""


def settings_of(topic: Topic, metrics_hours: float | None = None) -> dict[str, str]:
    """The settings of `topic`. Only `laminar runs trim` deletes data: replay, audit and export read the whole log.

    Without `metrics_hours`, the settings leave out the retention of metrics.
    """
    settings = {"cleanup.policy": topic.cleanup, "max.message.bytes": str(MAX_VALUE_BYTES + 1024 * 1024)}
    match topic.retention:
        case "trim":
            settings |= {"retention.ms": "-1", "retention.bytes": "-1"}
        case "window" if metrics_hours is not None:
            kept = "-1" if metrics_hours == math.inf else str(int(metrics_hours * HOUR_MS))
            settings |= {"retention.ms": kept, "retention.bytes": "-1"}
        case "newest":
            settings |= {"segment.bytes": str(SEGMENT_BYTES), "min.cleanable.dirty.ratio": "0.1"}
            settings["delete.retention.ms"] = str(MARKER_MS)
    return settings


def topic_spec(config: Config, topic: Topic) -> TopicSpec:
    """The specification to create `topic` for a run."""
    copies, name = config.kafka.replication_factor, topic.name(config.run.name)
    settings = settings_of(topic, config.kafka.metrics_hours)
    if copies >= 3:
        settings["min.insync.replicas"] = str(copies // 2 + 1)
    return TopicSpec(name, len(partitions_of(config, topic)), copies, settings, PARTITIONS_FROM[topic.partitions])


def unsuitable_settings(client: ClientProperties) -> list[SettingProblem]:
    """Unsuitable settings of a Kafka cluster: of its brokers and of the topics of all its runs."""
    with admin_client(client) as admin:
        names = [name for name in list_topics(admin, f"{PREFIX}.") if run_of(name)]
        specs = [TopicSpec(name, 1, config=settings_of(CATALOGUE[name.rpartition(".")[2]])) for name in names]
        return find_problems(admin, specs, KafkaConfig().transaction_timeout_s)


def checked_settings(client: ClientProperties) -> dict[str, dict[str, str]]:
    """The settings that a check of the brokers judges, by broker; empty if this client may not read them."""
    with admin_client(client) as admin:
        return checked_broker_settings(admin)


def make_topics(config: Config, note: Callable[[str], None] = lambda line: None) -> None:
    """Create missing topics, and publish the schemas of their records; `note` receives warnings about settings.

    Raises TopicError if a topic has another partition count, UnsuitableKafka if settings would lose records.
    """
    problems = retry_transient(lambda: _make_topics(config))
    _refuse_fatal(problems)
    for problem in problems:
        note(str(problem))
    publish_schemas(config.kafka.client(), config.run.name)
    retry_transient(lambda: record_first_release(config.kafka.client(), config.run.name))


def check_kafka(config: Config) -> None:
    """Raise TopicError, UnsuitableKafka as `make_topics`, as far as they can be found without creating a topic."""
    specs = _specs(config)
    with admin_client(config.kafka.client()) as admin:
        retry_transient(lambda: check_new_topics(admin, specs))
        _refuse_fatal(retry_transient(lambda: find_problems(admin, specs, config.kafka.transaction_timeout_s)))


def kafka_problems(config: Config) -> tuple[list[str], list[SettingProblem]]:
    """As `check_kafka`, all of it: why topics cannot be created or used, and unsuitable settings, warnings included."""
    specs = _specs(config)
    with admin_client(config.kafka.client()) as admin:
        topics = partition_problems(specs, partition_counts(admin, [spec.name for spec in specs]))
        try:
            check_new_topics(admin, specs)
        except TopicError as error:
            topics += str(error).splitlines()
        return topics, find_problems(admin, specs, config.kafka.transaction_timeout_s)


def existing_topics(config: Config) -> tuple[dict[str, int], list[str]]:
    """The partition counts of the run's existing topics, and why roles cannot use them or Kafka, with its settings;
    empty if Kafka is unreachable, with the reason.
    """
    try:
        client = config.kafka.client()
        if (reason := connection_problem(client.admin(), ANSWER_S)) is not None:
            setting = config.kafka.address_setting
            return {}, [f"{setting} is {client.bootstrap_servers!r}, but Kafka does not answer there: {reason}"]
    except (ValueError, OSError) as error:
        return {}, [f"kafka: {error}"]
    specs = _specs(config)
    with admin_client(client) as admin:
        counts = retry_transient(lambda: partition_counts(admin, [spec.name for spec in specs]))
        settings = retry_transient(lambda: find_problems(admin, specs, config.kafka.transaction_timeout_s))
    return counts, [*partition_problems(specs, counts), *(str(each) for each in settings if each.fatal)]


def _refuse_fatal(problems: Sequence[SettingProblem]) -> None:
    if fatal := [problem for problem in problems if problem.fatal]:
        raise UnsuitableKafka(fatal)


def publish_schemas(client: ClientProperties, run: str) -> None:
    """Write the schema of every record to the topic `schemas`. Raises DeliveryFailed."""
    from schemas.published import record_schema

    with BoundedProducer(client) as producer:
        for entry in RECORD_TYPES:
            value, headers = encode(record_schema(entry))
            producer.send(SCHEMAS.name(run), value, key=entry.schema.encode(), headers=headers)
        producer.flush(DELIVER_S)


def _make_topics(config: Config) -> list[SettingProblem]:
    specs = _specs(config)
    with admin_client(config.kafka.client()) as admin:
        create_topics(admin, specs)
        return find_problems(admin, specs, config.kafka.transaction_timeout_s)


def _specs(config: Config) -> list[TopicSpec]:
    return [topic_spec(config, topic) for topic in CATALOGUE.values()]

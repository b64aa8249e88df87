"""The topics of a run, made before its roles start, on a Kafka whose settings keep what they hold."""

from __future__ import annotations

import math
from collections.abc import Callable

from infra.kafka.admin import TopicSpec, admin_client, create_topics, list_topics
from infra.kafka.properties import ClientProperties
from infra.kafka.readiness import retried
from infra.kafka.suitability import SettingProblem, UnsuitableKafka, find_problems
from pipelines.config import Config, KafkaConfig
from pipelines.shards import partitions_of
from schemas.codec import MAX_VALUE_BYTES
from schemas.topics import CATALOGUE, PREFIX, Topic, run_of

SEGMENT_BYTES = 4 << 20
"""Of a compacted topic: whoever reads it from the beginning reads the newest record of each key, and about so much."""
HOUR_MS = 3_600_000


def settings_of(topic: Topic, metrics_hours: float | None = None) -> dict[str, str]:
    """The settings of `topic`: a run is replayed, audited and exported from its log, so data goes by a trim alone.

    Without `metrics_hours` they say nothing of how long measurements are kept.
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
    return settings


def topic_spec(config: Config, topic: Topic) -> TopicSpec:
    """How `topic` is made for a run."""
    copies, name = config.kafka.replication_factor, topic.name(config.run.name)
    return TopicSpec(name, len(partitions_of(config, topic)), copies, settings_of(topic, config.kafka.metrics_hours))


def unsuitable_settings(client: ClientProperties) -> list[SettingProblem]:
    """What does not fit in the settings of a Kafka: of its brokers, and of the topics of all runs on it."""
    with admin_client(client) as admin:
        names = [name for name in list_topics(admin, f"{PREFIX}.") if run_of(name)]
        specs = [TopicSpec(name, 1, config=settings_of(CATALOGUE[name.rpartition(".")[2]])) for name in names]
        return find_problems(admin, specs, KafkaConfig().transaction_timeout_s)


def make_topics(config: Config, note: Callable[[str], None] = lambda line: None) -> None:
    """Create what is missing; `note` takes what might be better.

    Raises TopicError where a topic of this run has another shape, UnsuitableKafka where settings would lose records.
    """
    problems = retried(lambda: _make_topics(config))
    if fatal := [problem for problem in problems if problem.fatal]:
        raise UnsuitableKafka(fatal)
    for problem in problems:
        note(str(problem))


def _make_topics(config: Config) -> list[SettingProblem]:
    specs = [topic_spec(config, topic) for topic in CATALOGUE.values()]
    with admin_client(config.kafka.client()) as admin:
        create_topics(admin, specs)
        return find_problems(admin, specs, config.kafka.transaction_timeout_s)

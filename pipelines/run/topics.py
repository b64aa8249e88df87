"""The topics of a run, made before its roles start."""

from __future__ import annotations

from infra.kafka.admin import TopicSpec, admin_client, create_topics
from infra.kafka.readiness import retried
from pipelines.config import Config
from pipelines.shards import partitions_of
from schemas.codec import MAX_VALUE_BYTES
from schemas.topics import CATALOGUE, Topic


def topic_spec(config: Config, topic: Topic) -> TopicSpec:
    """How `topic` is made: data is kept for good, for the log is what a run is replayed, audited and exported from."""
    settings = {"cleanup.policy": topic.cleanup, "max.message.bytes": str(MAX_VALUE_BYTES + 1024 * 1024)}
    if topic.cleanup == "delete":
        settings["retention.ms"] = "-1"
    return TopicSpec(
        topic.name(config.run.name), len(partitions_of(config, topic)), config.kafka.replication_factor, settings
    )


def make_topics(config: Config) -> None:
    """Create what is missing. Raises TopicError where a topic of this run has another shape."""
    retried(lambda: _make_topics(config))


def _make_topics(config: Config) -> None:
    admin = admin_client(config.kafka.client())
    try:
        create_topics(admin, [topic_spec(config, topic) for topic in CATALOGUE.values()])
    finally:
        admin.close()

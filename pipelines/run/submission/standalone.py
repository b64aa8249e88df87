"""Prepares Kafka for a pipeline that is submitted separately."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from infra.kafka.readiness import wait_for_brokers
from pipelines.config import Config, ConfigError
from pipelines.roles import Role
from pipelines.run.run_kafka import WAIT_S
from pipelines.run.topics import make_topics
from pipelines.shards import partitions_of
from schemas.topics import INBOX


def prepare(config: Config, role: Role, note: Callable[[str], None]) -> None:
    """Wait for Kafka and create the run's missing topics; `note` receives one-line messages.

    Raises ConfigError if `config` is incomplete for `role`, BrokerUnreachable, TopicError.
    """
    if not config.run.name:
        raise ConfigError("run.name is not set: it names the topics to read and write")
    if role.pipeline in ("prompts", "rollout", "trainer", "evaluation") and not config.emulated:
        config.model_folder()
    if role.pipeline == "rollout":
        inboxes = len(partitions_of(config, INBOX))
        hosted = config.rollout.hosted(role.index)
        if hosted.stop > inboxes:
            raise ConfigError(
                f"rollout process {role.index} would host replica {hosted[-1]}, but the inbox topic has {inboxes} "
                "partitions: placement.max_replicas is fixed when a run starts"
            )
    config = replace(config, kafka=config.kafka.for_role(role.pipeline))
    wait_for_brokers(config.kafka.client(), WAIT_S, lambda _, line: note(line))
    make_topics(config, note)

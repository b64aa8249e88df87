"""What one pipeline that is submitted alone needs before it can run."""

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
    """Wait for Kafka and make the run's topics, unless another pipeline has; `note` takes one-line news.

    Raises ConfigError where `config` does not say enough for `role`, BrokerUnreachable, TopicError.
    """
    if not config.run.name:
        raise ConfigError("run.name is not set: which run's topics to read and write")
    if role.pipeline in ("prompts", "rollout", "trainer", "evaluation") and not config.emulated:
        config.model_folder()
    if role.pipeline == "rollout":
        inboxes = len(partitions_of(config, INBOX))
        hosted = config.rollout.hosted(role.index)
        if hosted.stop > inboxes:
            raise ConfigError(
                f"rollout process {role.index} would host replica {hosted[-1]}, but there are inboxes for {inboxes}: "
                "placement.max_replicas is fixed when a run starts"
            )
    config = replace(config, kafka=config.kafka.for_role(role.pipeline))
    wait_for_brokers(config.kafka.client(), WAIT_S, lambda _, line: note(line))
    make_topics(config, note)

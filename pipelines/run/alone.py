"""What one pipeline that is submitted alone needs before it can run."""

from __future__ import annotations

from collections.abc import Callable

from infra.kafka.readiness import wait_for_brokers
from pipelines.config import Config, ConfigError
from pipelines.roles import Role, roles_of
from pipelines.run.kafka_of_run import WAIT_S
from pipelines.run.topics import make_topics


def get_ready(config: Config, role: Role, note: Callable[[str], None]) -> None:
    """Wait for Kafka and make the run's topics, unless another pipeline has; `note` takes one-line news.

    Raises ConfigError where `config` does not say enough for `role`, BrokerUnreachable, TopicError.
    """
    if not config.run.name:
        raise ConfigError("run.name is not set: which run's topics to read and write")
    if role.pipeline in ("prompts", "rollout", "trainer", "evaluation") and not config.emulated:
        config.model_folder()
    if role.pipeline == "rollout" and role not in roles_of(config):
        raise ConfigError(f"there is no rollout process {role.index}: rollout.processes is {config.rollout.processes}")
    wait_for_brokers(config.kafka.client(), WAIT_S, lambda _, line: note(line))
    make_topics(config)

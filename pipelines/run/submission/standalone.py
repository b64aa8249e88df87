"""Prepares Kafka for a pipeline that is submitted separately."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from infra.kafka.admin import admin_client, cluster_id
from infra.kafka.readiness import retry_transient, wait_for_brokers
from infra.store.errors import StoreError
from infra.store.ownership import claim_store
from operators.relay.config import AUTO
from pipelines.config import Config, ConfigError
from pipelines.roles import Role
from pipelines.run.run_kafka import WAIT_S
from pipelines.run.topics import make_topics
from pipelines.shards import partitions_of, store_folder
from schemas.topics import INBOX

_WITH_STORE = ("relay", "rollout", "trainer")


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


@contextmanager
def claimed_store(config: Config, role: Role) -> Iterator[None]:
    """Hold this machine's weight store for the run while `role` runs, if the role has one.

    Roles that are submitted one by one find the store by the run's name. Raises ConfigError if a run of that name in
    another Kafka cluster uses it.
    """
    if role.pipeline not in _WITH_STORE or config.relay.store != AUTO:
        yield
        return
    with admin_client(config.kafka.for_role(role.pipeline).client()) as admin:
        cluster = retry_transient(lambda: cluster_id(admin))
    try:
        lock = claim_store(store_folder(config), cluster, config.run_folder)
    except StoreError as error:
        raise ConfigError(str(error)) from error
    try:
        yield
    finally:
        lock.release()

"""The Kafka side of each pipeline: what it reads, where its ledger lies. One place that knows partition counts."""

from __future__ import annotations

from pathlib import Path

from infra.store.ownership import choose_store_folder
from operators.io.config import ShardConfig, TopicInput
from pipelines.config import Config
from schemas.topics import Topic


def shard_config(
    config: Config,
    pipeline: str,
    *inputs: TopicInput,
    ledger: tuple[Topic, ...] = (),
    index: int = 0,
    owned: tuple[tuple[Topic, tuple[int, ...]], ...] = (),
    patient: bool = False,
    attentive: bool = False,
) -> ShardConfig:
    """Shard `index` of `pipeline`.

    `ledger` topics are read back whole, with all their partitions; `owned` partitions have no other writer.

    A `patient` one is not waited for by others: it looks and commits less often, which spares the brokers. An
    `attentive` one has a clock to heed, however little there is to read.
    """
    return ShardConfig(
        client=config.kafka.client(),
        run=config.run.name,
        pipeline=pipeline,
        shard=index,
        inputs=inputs,
        ledger=tuple((topic, partitions_of(config, topic)) for topic in ledger),
        owned=owned,
        poll_s=0.25 if patient else 0.02 if attentive else 0.1,
        commit_s=5.0 if patient else 1.0,
        transaction_timeout_s=config.kafka.transaction_timeout_s,
        budget=config.progress.budget(pipeline),
    )


def topic_input(config: Config, topic: Topic, **how: str | bool | int | tuple[str, ...]) -> TopicInput:
    """All partitions of `topic`."""
    return TopicInput(topic, partitions_of(config, topic), **how)  # type: ignore[arg-type]


def partitions_of(config: Config, topic: Topic) -> tuple[int, ...]:
    """The partitions that `topic` has in this run."""
    counts = {
        "one": 1,
        "shards": config.kafka.partitions,
        "ranks": config.trainer.ranks * config.experience.shards,
        "replicas": max(config.rollout.total_replicas, config.placement.max_replicas),
    }
    return tuple(range(counts[topic.partitions]))


def newest_manifests(config: Config) -> int:
    """How many of the newest weight manifests a relay or a rollout reads that is new to the run: those of all versions
    that may still be somewhere, and as many again for those that were published twice.
    """
    return max(64, 4 * config.relay.keep_versions)


def store_folder(config: Config) -> Path:
    """The weight store of this machine."""
    if config.relay.store != "auto":
        return Path(config.relay.store)
    return choose_store_folder(config.run.name, config.run_folder)

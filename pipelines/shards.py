"""Shard configurations of the pipelines: consumed topics, ledgers and partition counts."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from infra.files import create_secret
from infra.machine import GATEWAY_URL
from infra.store.ownership import choose_store_folder
from operators.io.config import ShardConfig, TopicInput
from pipelines.config import Config
from schemas.topics import Topic

COUNTERS_S = 10.0
"""Seconds between two reports of a role's counters: every scrape of 15 s sees new ones."""
RELAY_SECRET = "relay.secret"
"""In the run's folder: the token of its relays, if the configuration names none."""
_NAME_CHARACTERS = 80
"""Of a run's name in the name of its weight store, which has a hash beside it."""


def shard_config(
    config: Config,
    pipeline: str,
    *inputs: TopicInput,
    ledger: tuple[Topic, ...] = (),
    ledger_partitions: tuple[int, ...] | None = None,
    ledger_keys: str = "",
    heartbeats: bool = False,
    index: int = 0,
    shards: int = 1,
    owned: tuple[tuple[Topic, tuple[int, ...]], ...] = (),
    slow_poll: bool = False,
    slow_commit: bool = False,
    fast_poll: bool = False,
    unnoted: tuple[Topic, ...] = (),
) -> ShardConfig:
    """The configuration of shard `index` of `pipeline`. `shards`: their number, where it may change, see ShardConfig.

    `ledger` topics are read back with all their partitions, or with `ledger_partitions`; `owned` partitions and records
    with keys like `ledger_keys` have no other writer. `heartbeats`: it is a rollout process, which sends some.

    `slow_poll`: an idle poll waits longer, for steps that only follow their inputs, at which a poll ends at once.
    `slow_commit`: commit offsets less often, for pipelines that no other waits for. `fast_poll`: poll more often, for
    steps that follow a clock. `unnoted`: see ShardConfig.
    """
    return ShardConfig(
        client=config.kafka.client(),
        run=config.run.name,
        pipeline=pipeline,
        shard=index,
        inputs=inputs,
        shards=shards,
        ledger=tuple((topic, ledger_partitions or partitions_of(config, topic)) for topic in ledger),
        owned=owned,
        ledger_keys=ledger_keys,
        heartbeats=heartbeats,
        poll_s=0.25 if slow_poll else 0.02 if fast_poll else 0.1,
        commit_s=5.0 if slow_commit else 1.0,
        transaction_timeout_s=config.kafka.transaction_timeout_s,
        budget=config.progress.budget(pipeline),
        counters_s=COUNTERS_S,
        unnoted=unnoted,
    )


def shard_numbers(pipeline: str, shards: int, shard: int | None) -> tuple[int, ...]:
    """The shards of a graph of `pipeline`: all of `shards`, or only `shard`. Raises ValueError if it does not exist."""
    if shard is None:
        return tuple(range(shards))
    if not 0 <= shard < shards:
        raise ValueError(f"shard {shard} does not exist: {pipeline}.shards is {shards}")
    return (shard,)


def topic_input(config: Config, topic: Topic, **options: str | bool | int | tuple[str, ...]) -> TopicInput:
    """All partitions of `topic` as an input; `options` are those of TopicInput."""
    return TopicInput(topic, partitions_of(config, topic), **options)  # type: ignore[arg-type]


def partitions_of(config: Config, topic: Topic) -> tuple[int, ...]:
    """The partitions that `topic` has in this run."""
    counts = {
        "one": 1,
        "shards": config.kafka.partitions,
        "batch shares": config.trainer.shares * config.experience.divisions,
        "replicas": config.inboxes,
    }
    return tuple(range(counts[topic.partitions]))


def newest_manifests(config: Config) -> int:
    """How many of the newest weight manifests a relay or rollout without a committed offset reads: two for each version
    that a machine may still hold, since a version may be published twice.
    """
    return max(64, 4 * config.relay.keep_versions)


def with_relay_token(config: Config, folder: Path, *, create: bool = False) -> Config:
    """`config` with a token of its relays: without `relay.token_file` that of the run, in its folder `folder`.

    With `create` it is written if it does not exist. Raises OSError.
    """
    if config.relay.token_file:
        return config
    file = (folder / RELAY_SECRET).absolute()
    if create:
        create_secret(file)
    return replace(config, relay=replace(config.relay, token_file=str(file)))


def files_folder(config: Config) -> Path:
    """The folder for files of gateway and agents: the run's, but in containers, which cannot write to it, another."""
    return Path(tempfile.gettempdir()) / config.run.name if GATEWAY_URL in os.environ else config.run_folder


def store_folder(config: Config) -> Path:
    """The folder of this machine's weight store."""
    if config.relay.store != "auto":
        return Path(config.relay.store)
    return choose_store_folder(config.run.name, config.run_folder)


def own_store_folder(config: Config) -> Path:
    """The folder of the weight store of a run that one command starts whole: no run of another user or folder has it.

    Roles that are started one by one find each other's store by the run's name alone, see `store_folder`.
    """
    if config.relay.store != "auto":
        return Path(config.relay.store)
    place = f"{os.geteuid()}:{config.run_folder.absolute()}"
    digest = hashlib.sha256(place.encode()).hexdigest()[:8]
    return choose_store_folder(f"{config.run.name[:_NAME_CHARACTERS]}-{digest}", config.run_folder)
